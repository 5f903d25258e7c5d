"""Settings come from a variable, from a file and from a module beside the script."""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

out = os.environ["OUT"]
sys.path.insert(0, out)
import own_settings  # noqa: E402

with open(f"{out}/settings.json") as file:
    settings = json.load(file)
torch.manual_seed(0)
model = nn.Linear(8, settings["outputs"])
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ.get("RATE", "0.1")))
for step in range(1, 11):
    loss = (model(torch.randn(4, 8)) * own_settings.SCALE - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.9f}", flush=True)
