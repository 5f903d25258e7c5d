"""A loop with holdfast.Run: optimizer, scheduler, a shuffled DataLoader, and incremental saves beside a frozen part."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from record import Record, of_torch

torch.set_num_threads(1)
torch.manual_seed(7)
x = torch.randn(48, 8)
data = TensorDataset(x, (x.sum(1) > 0).long())
loader = DataLoader(data, batch_size=4, shuffle=True)
backbone = torch.nn.Linear(8, 32).requires_grad_(False)
model = torch.nn.Sequential(torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=100)
record = Record()

objects = {"model": model, "backbone": backbone, "optimizer": optimizer, "scheduler": scheduler}
with holdfast.Run("checkpoints", save_every="6 steps", settings={"save_type": "incremental"}, **objects) as run:
    for _ in run.epochs(3):
        for inputs, labels in run.batches(loader):
            record.begin(run.steps + 1, of_torch(model))
            loss = torch.nn.functional.cross_entropy(model(backbone(inputs)), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            record.end(run.steps + 1, of_torch(model))
            run.step(loss=loss)
record.close(of_torch(model))
