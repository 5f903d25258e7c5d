"""DDP with a static graph of several buckets, layers that are never used, and gradients that others come before."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(32, 1)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        for index in (4, 1, 3, 0, 5, 2):
            x = torch.tanh(self.layers[index](x))
        return self.last(x)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(Net(), static_graph=True, bucket_cap_mb=0.004)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
for step in range(1, 13):
    x = torch.randn(8, 32)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.9f}", flush=True)
print("end", torch.stack([p.double().sum() for p in model.parameters()]).tolist())
dist.destroy_process_group()
