"""A loop without a loader that draws its batches from generators of its own."""

import random

import numpy as np
import torch

torch.manual_seed(1)
data = torch.randn(200, 4)
batches, noise, choice = torch.Generator().manual_seed(2), np.random.default_rng(3), random.Random(4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(1, 31):
    chosen = data[torch.randint(200, (8,), generator=batches)] + float(noise.normal())
    loss = (model(chosen) - choice.random()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print("step", step, f"{loss.item():.8f}")
print("sum", f"{model.weight.sum().item():.8f}")
