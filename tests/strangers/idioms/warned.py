"""Warnings of torch name the script's own line."""

import torch

torch.manual_seed(0)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cuda")
total = 0.0
for step in range(40):
    loss = (model(torch.randn(8, 6)) - 1).pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    total += float(loss)
    if step % 10 == 9:
        print(step, f"{total:.6f}", flush=True)
