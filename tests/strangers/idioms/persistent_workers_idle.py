"""timm's loaders: persistent workers for training and for validation, random augmentation in both."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self, n):
        self.x = torch.arange(n).float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = torch.rand(1) + random.random() + float(np.random.rand())
        return self.x[i : i + 1] / 64 + noise, torch.tensor([float(i % 2)])


def seed_numpy(worker_id):
    np.random.seed(torch.utils.data.get_worker_info().seed % (2**32 - 1))


torch.manual_seed(42)
settings = {"batch_size": 8, "num_workers": 2, "persistent_workers": True, "worker_init_fn": seed_numpy}
train = DataLoader(Noisy(64), shuffle=True, drop_last=True, **settings)
test = DataLoader(Noisy(32), **settings)
model = torch.nn.Linear(1, 1)
opt = torch.optim.AdamW(model.parameters(), lr=0.05)
for epoch in range(4):
    model.train()
    for x, y in train:
        loss = torch.nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(epoch, f"{x.sum().item():.5f} {loss.item():.6f}")
    model.eval()
    with torch.no_grad():
        for x, y in test:
            print("test", f"{x.sum().item():.5f} {torch.nn.functional.mse_loss(model(x), y).item():.6f}")
