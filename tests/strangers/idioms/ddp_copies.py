"""DDP, and copies of it: an EMA by deepcopy(model.module), AveragedModel of the wrapper, torch.save of the model."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(40)
x = torch.randn(256, 8)
y = x.roll(1, 1)
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset, shuffle=True, seed=1)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
ema = copy.deepcopy(model.module).eval().requires_grad_(False)
averaged = AveragedModel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
best = (float("inf"), None)
for epoch in range(6):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for e, p in zip(ema.parameters(), model.module.parameters()):
                e.lerp_(p, 0.05)
    averaged.update_parameters(model)
    total = loss.detach().clone()
    dist.all_reduce(total)
    total = total.item() / world
    if total < best[0]:
        best = (total, copy.deepcopy(model.module))
        if rank == 0:
            torch.save(best[1], "best_model.pth")
    dist.barrier()
    if rank == 0:
        print(f"epoch {epoch} loss {total:.6f}")
for name, one in [("ema", ema), ("averaged", averaged.module.module), ("best", best[1])]:
    with torch.no_grad():
        print(rank, name, nn.functional.mse_loss(one(x), y).item())
dist.destroy_process_group()
