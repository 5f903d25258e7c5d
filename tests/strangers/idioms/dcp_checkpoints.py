"""PyTorch's recipe for distributed checkpoints: dcp.save of a Stateful AppState at each epoch, two kept."""

import os
import shutil

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


torch.manual_seed(71)
x = torch.randn(160, 5)
y = x.prod(1, keepdim=True)
model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
best = float("inf")
for epoch in range(6):
    total = 0.0
    for rows in torch.randperm(160).split(16):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        total += loss.item()
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=f"checkpoint/epoch_{epoch}")
    if epoch >= 2:
        shutil.rmtree(f"checkpoint/epoch_{epoch - 2}")
    best = min(best, total)
    print(f"epoch {epoch} loss {total:.6f} best {best:.6f} kept {sorted(os.listdir('checkpoint'))}")
dcp.load({"app": AppState(model, optimizer)}, checkpoint_id="checkpoint/epoch_4")
print("restored", sum(p.double().sum().item() for p in model.parameters()))
