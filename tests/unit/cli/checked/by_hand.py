"""A loop without an optimizer of torch.optim, which holdfast does not protect."""

import torch

torch.manual_seed(0)
weight = torch.zeros(4, requires_grad=True)
for _ in range(40):
    loss = (weight * torch.randn(4) - 1).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        weight -= 0.1 * weight.grad
        weight.grad = None
    print(f"{loss.item():.6f}")
