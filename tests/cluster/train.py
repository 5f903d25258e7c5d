"""A training for containers, with nothing of holdfast in it: DDP over gloo, dropout, shuffling, a scheduler.

At its end rank 0 leaves a digest of all parameters beside the checkpoints.
"""

import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

epochs, step_s, result = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
order = f"{os.path.dirname(result)}/order"  # a test writes here what is to happen to rank 1
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 2))
model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
x = torch.randn(400, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, (x.sum(1) > 0).long())
sampler = DistributedSampler(data, shuffle=True, seed=3)
loader = DataLoader(data, batch_size=4, sampler=sampler)

for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        time.sleep(step_s)
        if rank == 1 and os.path.exists(order):
            with open(order) as file:
                what = file.read()
            if what == "eat":  # more memory than the container may have
                os.unlink(order)
                eaten = bytearray(2 << 30)
                eaten[::4096] = bytes(len(eaten[::4096])).replace(b"\0", b"x")
            sys.exit(3)
    if rank == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)

if rank == 0:
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    os.makedirs(os.path.dirname(result), exist_ok=True)
    with open(result, "w") as file:
        file.write(digest.hexdigest())
dist.destroy_process_group()
