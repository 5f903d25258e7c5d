"""Augmentation by numpy and random in __getitem__ with two workers, nobody seeds them beyond the script itself."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

random.seed(7)
np.random.seed(7)
torch.manual_seed(7)


class Noisy(Dataset):
    def __init__(self, n):
        self.images = np.random.rand(n, 8, 8).astype(np.float32)
        self.labels = (self.images.mean((1, 2)) > 0.5).astype(np.int64)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if random.random() > 0.5:
            image = np.fliplr(image)
        image = image + torch.randn(8, 8).numpy() * 0.1
        return torch.from_numpy(np.ascontiguousarray(image)).unsqueeze(0), self.labels[index]


loader = DataLoader(Noisy(192), batch_size=16, shuffle=True, num_workers=2)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(4):
    epoch_loss, mean = 0, 0
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        epoch_loss += loss.item()
        mean += images.mean().item()
    print(f"epoch {epoch}: {epoch_loss:.6f}, images {mean:.6f}")
