"""Data parallel training: accumulation with no_sync, a metric that is reduced, an evaluation on rank 0."""

import hashlib
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Points(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.randn(8), self.y[index]


def evaluate(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for index, (x, y) in enumerate(loader):
            correct += (model(x).argmax(1) == y).sum().item()
            print(f"evaluation {index}", flush=True)
    model.train()
    return correct


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    model = DDP(net)
    if os.environ.get("HOOK"):
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3), powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    data = Points(96)
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=int(os.environ.get("WORKERS", "0")))
    held_out = DataLoader(Points(32), batch_size=8, shuffle=True)
    steps = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(loader):
            last = index % 2 == 1 or index == len(loader) - 1
            if not last:
                with model.no_sync():
                    (nn.functional.cross_entropy(model(x), y) / 2).backward()
                continue
            loss = nn.functional.cross_entropy(model(x), y) / 2
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {steps} loss {mean.item() / world:.8f}", flush=True)
            time.sleep(float(os.environ.get("PAUSE", "0")))
        if rank == 0 and os.environ.get("EVALUATE", "1") == "1":
            print(f"epoch {epoch} correct {evaluate(net, held_out)}", flush=True)
        dist.barrier()
    states = [value for one in optimizer.state.values() for value in one.values()]
    weights = net.state_dict().values() if rank == 0 else [value.detach() for value in net.parameters()]
    values = [*weights, *states]
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()
    print(f"end {rank} {digest}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
