"""A plain loop that does not know holdfast: the replay adapter follows it."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from record import Record, of_torch

torch.set_num_threads(1)
torch.manual_seed(7)
x = torch.randn(48, 8)
train = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4, shuffle=True)
held_out = DataLoader(TensorDataset(x[:16]), batch_size=8)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
record = Record()

step = 0
for epoch in range(3):
    model.train()
    total = 0.0
    for inputs, labels in train:
        step += 1
        record.begin(step, of_torch(model))
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        record.end(step, of_torch(model))
    model.eval()
    with torch.no_grad():
        spread = torch.stack([model(inputs).std() for (inputs,) in held_out]).mean().item()
    scheduler.step(total)
    print(f"epoch {epoch}: loss {total:.6f}, spread {spread:.6f}")
record.close(of_torch(model))
