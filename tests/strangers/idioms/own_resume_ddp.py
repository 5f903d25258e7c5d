"""PyTorch's multigpu_torchrun tutorial: DDP, rank 0 saves a snapshot, all ranks load it where it exists."""

import os
import sys

import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main(total_epochs=6, save_every=2):
    init_process_group(backend="gloo")
    rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(7)
    data = TensorDataset(torch.rand(256, 20), torch.rand(256, 1))
    loader = DataLoader(data, batch_size=16, shuffle=False, sampler=DistributedSampler(data))
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    epochs_run = 0
    if os.path.exists("snapshot.pt"):
        print("Loading snapshot", file=sys.stderr)
        snapshot = torch.load("snapshot.pt", map_location="cpu")
        model.load_state_dict(snapshot["MODEL_STATE"])
        epochs_run = snapshot["EPOCHS_RUN"]
        print(f"Resuming training from snapshot at Epoch {epochs_run}", file=sys.stderr)
    model = DDP(model)
    for epoch in range(epochs_run, total_epochs):
        print(f"[GPU{rank}] Epoch {epoch} | Steps: {len(loader)}")
        loader.sampler.set_epoch(epoch)
        for source, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(source), targets)
            loss.backward()
            optimizer.step()
        if rank == 0 and epoch % save_every == 0:
            torch.save({"MODEL_STATE": model.module.state_dict(), "EPOCHS_RUN": epoch + 1}, "snapshot.pt")
            print(f"Epoch {epoch} | Training snapshot saved at snapshot.pt")
    print("weights", model.module.weight.sum().item())
    destroy_process_group()


if __name__ == "__main__":
    main()
