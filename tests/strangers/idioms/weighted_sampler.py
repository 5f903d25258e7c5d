"""random_split and a WeightedRandomSampler for an imbalanced set, with a confusion matrix in numpy."""

from collections import Counter

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler, random_split

torch.manual_seed(42)
X = torch.cat([torch.randn(360, 4), torch.randn(40, 4) + 1.5])
y = torch.cat([torch.zeros(360), torch.ones(40)]).long()
full = TensorDataset(X, y)
train_set, val_set = random_split(full, [320, 80])
train_labels = [y[i].item() for i in train_set.indices]
class_count = Counter(train_labels)
weights = [1.0 / class_count[label] for label in train_labels]
sampler = WeightedRandomSampler(weights, num_samples=len(weights), replacement=True)
train_loader = DataLoader(train_set, batch_size=32, sampler=sampler)
val_loader = DataLoader(val_set, batch_size=16)
model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(6):
    model.train()
    positives = 0
    for xb, yb in train_loader:
        positives += yb.sum().item()
        loss = nn.functional.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    confusion = np.zeros((2, 2), dtype=int)
    with torch.no_grad():
        for xb, yb in val_loader:
            preds = model(xb).argmax(1)
            for t, p in zip(yb.numpy(), preds.cpu().numpy()):
                confusion[t, p] += 1
    print(f"epoch {epoch} loss {loss.item():.6f} positives {positives} confusion {confusion.tolist()}")
