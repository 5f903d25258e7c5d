"""A dataset with its own default_rng for the noise and a counter that hardens it, in the loader alone, no workers."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset


class NoisySines(Dataset):
    def __init__(self, n, seed=3):
        self.rng = np.random.default_rng(seed)
        self.phase = np.linspace(0, 6, n)
        self.served = 0

    def __len__(self):
        return len(self.phase)

    def __getitem__(self, i):
        self.served += 1
        noise = min(1.0, self.served / 600)
        t = np.arange(8) / 3 + self.phase[i]
        return torch.from_numpy(np.sin(t) + noise * 0.2 * self.rng.standard_normal(8)).float()


def get_loader():
    return DataLoader(Subset(NoisySines(220), range(200)), batch_size=10, shuffle=True)


torch.manual_seed(0)
loader = get_loader()
model = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(4):
    for batch in loader:
        loss = nn.functional.mse_loss(model(batch[:, :7]), batch[:, 7:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.6f} last {batch.sum().item():.6f}")
