"""persistent_workers, prefetch_factor and a worker_init_fn that seeds random and numpy, as the docs recommend."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Crops(Dataset):
    def __init__(self, n):
        self.signals = np.sin(np.arange(n)[:, None] * np.linspace(0.1, 1, 24)[None]).astype("float32")

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, i):
        start = random.randint(0, 7)
        crop = self.signals[i, start : start + 16].copy()
        if np.random.rand() < 0.5:
            crop = crop[::-1].copy()
        return torch.from_numpy(crop), float(i % 2)


def seed_worker(worker_id):
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)
    random.seed(worker_seed)


g = torch.Generator()
g.manual_seed(0)
torch.manual_seed(0)
loader = DataLoader(
    Crops(160),
    batch_size=10,
    shuffle=True,
    num_workers=2,
    worker_init_fn=seed_worker,
    generator=g,
    persistent_workers=True,
    prefetch_factor=4,
)
net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1), torch.nn.Flatten(0))
opt = torch.optim.Adam(net.parameters(), 2e-3)
for epoch in range(4):
    total = 0
    for x, y in loader:
        opt.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(x), y.float())
        loss.backward()
        opt.step()
        total += loss.item()
    print(epoch, total)
