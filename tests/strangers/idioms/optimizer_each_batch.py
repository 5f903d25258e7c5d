"""A loop that makes its optimizer anew for each batch, since its rate comes from a formula."""

import torch
from torch import nn

torch.manual_seed(2)
x = torch.randn(300, 8)
y = x.cumsum(1)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
base_lr, warmup = 0.2, 20
step = 0
for epoch in range(5):
    for xb, yb in zip(x.split(20), y.split(20), strict=True):
        step += 1
        lr = base_lr * min(1, step / warmup) / (1 + epoch)
        optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(xb), yb)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}, lr {lr:.5f}, loss {loss.item():.6f}")
