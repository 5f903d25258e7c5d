"""An IterableDataset that shuffles by an epoch which it counts itself, and a sampler with a Random of its own."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler


class Lines(IterableDataset):
    def __init__(self, texts):
        self.texts, self.epoch = texts, 0

    def __iter__(self):
        order = list(range(len(self.texts)))
        random.Random(self.epoch).shuffle(order)
        self.epoch += 1
        for i in order:
            yield torch.tensor([float(ord(c)) for c in self.texts[i]]) / 128


class Buckets(Sampler):
    def __init__(self, n, size):
        self.n, self.size, self.random = n, size, random.Random(1)

    def __len__(self):
        return self.n // self.size

    def __iter__(self):
        buckets = [list(range(i, i + self.size)) for i in range(0, self.n - self.size + 1, self.size)]
        self.random.shuffle(buckets)
        yield from buckets


torch.manual_seed(36)
lines = DataLoader(Lines([f"{7 * i:05d} {i % 13:02d}" for i in range(150)]), batch_size=15)
pairs = DataLoader(torch.rand(120, 8), batch_sampler=Buckets(120, 12))
model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(5):
    total = 0
    for line, pair in zip(lines, pairs):
        loss = nn.functional.mse_loss(model(line), line.flip(1)) + nn.functional.mse_loss(model(pair), pair)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch} loss {total / 10:.6f} last {line.sum().item():.6f} {pair.sum().item():.6f}")
