"""A training loop as a generator that yields metrics, an infinite cycle over the loader, itertools.islice around it."""

import itertools

import torch
from torch import nn


def cycle(loader):
    while True:
        yield from loader


def smooth(values, beta=0.8):
    average = None
    for step, value in values:
        average = value if average is None else beta * average + (1 - beta) * value
        yield step, value, average


def training(model, optimizer, batches):
    for step, (x, y) in enumerate(batches):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step, loss.item()


torch.manual_seed(20)
x = torch.randn(190, 4)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(x, x.abs()), batch_size=20, shuffle=True, drop_last=True
)
model = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 4))
optimizer = torch.optim.Adamax(model.parameters(), lr=8e-3)
for step, value, average in itertools.islice(smooth(training(model, optimizer, cycle(loader))), 100):
    if step % 12 == 0:
        print(f"{step:4d} {value:.6f} {average:.6f}")
print("weights", sum(p.sum() for p in model.parameters()).item())
