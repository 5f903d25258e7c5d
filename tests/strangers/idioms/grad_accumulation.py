"""Gradient accumulation over four micro batches, the rest of an epoch stepped too, clip_grad_norm_, warmup by hand."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(99)
accumulation_steps = 4
max_lr, warmup = 2e-2, 10
x = torch.randn(330, 9)
y = torch.tanh(x.sum(1))
loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(9, 18), nn.GELU(), nn.Dropout(0.15), nn.Linear(18, 1))
optimizer = torch.optim.AdamW(
    [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ],
    lr=max_lr,
)
updates = 0
for epoch in range(8):
    running = 0.0
    optimizer.zero_grad()
    for i, (a, b) in enumerate(loader):
        loss = nn.functional.smooth_l1_loss(model(a).squeeze(-1), b)
        running += loss.detach()
        (loss / accumulation_steps).backward()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
            for group in optimizer.param_groups:
                group["lr"] = max_lr * min(1.0, (updates + 1) / warmup)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    print(f"epoch {epoch}: {updates} updates, loss {running.item() / len(loader):.6f}, norm {norm.item():.6f}")
