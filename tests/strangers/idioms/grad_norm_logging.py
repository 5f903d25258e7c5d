"""A loop that logs the norm of the gradients, layer by layer, and skips a step where it is too large."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(600, 12)
y = x.square().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))
criterion = nn.MSELoss()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=30, shuffle=True)

skipped = 0
for epoch in range(4):
    for step, (xb, yb) in enumerate(loader):
        opt.zero_grad()
        loss = criterion(net(xb), yb)
        loss.backward()
        total_norm = 0.0
        for p in net.parameters():
            total_norm += p.grad.detach().norm(2).item() ** 2
        total_norm = total_norm**0.5
        if total_norm > 60:
            skipped += 1
            continue
        opt.step()
        if step % 5 == 0:
            norms = {name: round(p.grad.norm().item(), 5) for name, p in net.named_parameters()}
            print(f"epoch {epoch} step {step} loss {loss.item():.5f} grad {total_norm:.5f} {norms}")
print("skipped", skipped)
