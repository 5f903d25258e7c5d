"""A defaultdict of lists with 0-d tensors in it, numpy arrays of predictions, pickled at the end with the config."""

import pickle
from collections import defaultdict

import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(24)
history = defaultdict(list)
config = {"lr": 0.03, "layers": (5, 10, 1)}
x = torch.randn(150, 5)
y = x.norm(dim=1, keepdim=True)
model = nn.Sequential(nn.Linear(5, 10), nn.Sigmoid(), nn.Linear(10, 1))
opt = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
for epoch in range(8):
    for xb, yb in zip(x.chunk(10), y.chunk(10)):
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(xb), yb)
        loss.backward()
        history["grad"].append(torch.stack([p.grad.norm() for p in model.parameters()]))
        opt.step()
        history["loss"].append(loss.detach())
    with torch.no_grad():
        history["predictions"].append(model(x).squeeze(1).numpy().copy())
    mean = torch.stack(history["loss"][-10:]).mean()
    print("epoch", epoch, "loss", mean, "spread", history["predictions"][-1].std())
with open("history.pkl", "wb") as f:
    pickle.dump({"config": config, **{k: [np.asarray(v) for v in vs] for k, vs in history.items()}}, f)
with open("history.pkl", "rb") as f:
    print(sorted(pickle.load(f)), len(history["grad"]))
