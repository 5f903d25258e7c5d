"""PyTorch's tutorial on saving memory: an optimizer for each parameter, stepped in post-accumulate-grad hooks."""

import torch
from torch import nn

torch.manual_seed(66)
model = nn.Sequential(nn.Linear(10, 20), nn.LayerNorm(20), nn.ReLU(), nn.Linear(20, 10))
optimizer_dict = {p: torch.optim.Adam([p], foreach=False, lr=3e-3) for p in model.parameters()}


def optimizer_hook(parameter) -> None:
    optimizer_dict[parameter].step()
    optimizer_dict[parameter].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(optimizer_hook)

x = torch.randn(300, 10)
loader = torch.utils.data.DataLoader(x, batch_size=25, shuffle=True)
for epoch in range(6):
    total = 0
    for batch in loader:
        loss = nn.functional.mse_loss(model(batch), batch.flip(1))
        loss.backward()
        total += loss.item()
    print(f"epoch {epoch}: {total / len(loader):.6f}")
