"""A log file opened with "w", a history appended with "a", and the metrics as JSON at the end."""

import json
import sys

import torch
from torch import nn


class Logger:
    """Writes to the terminal and to a file."""

    def __init__(self, path):
        self.terminal = sys.stdout
        self.log = open(path, "w")

    def write(self, message):
        self.terminal.write(message)
        self.log.write(message)

    def flush(self):
        self.terminal.flush()
        self.log.flush()


sys.stdout = Logger("train.log")
torch.manual_seed(5)
x = torch.randn(400, 6)
y = (x.sum(1) > 0).float().unsqueeze(1)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
history = {"loss": [], "acc": []}
for epoch in range(6):
    perm = torch.randperm(len(x))
    losses = []
    for i in range(0, len(x), 40):
        idx = perm[i : i + 40]
        loss = nn.functional.binary_cross_entropy_with_logits(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    acc = ((model(x) > 0) == y.bool()).float().mean().item()
    history["loss"].append(sum(losses) / len(losses))
    history["acc"].append(acc)
    with open("history.txt", "a") as f:
        f.write(f"{epoch}\t{history['loss'][-1]:.6f}\t{acc:.4f}\n")
    print(f"Epoch {epoch + 1}/6 loss={history['loss'][-1]:.6f} acc={acc:.4f}")
with open("metrics.json", "w") as f:
    json.dump(history, f, indent=2)
