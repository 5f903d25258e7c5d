"""A torch.jit.script module that is trained, a scripted helper function, and model.save at the end."""

import torch
from torch import nn


class Cell(nn.Module):
    def __init__(self, n_in: int, n_hidden: int):
        super().__init__()
        self.ih = nn.Linear(n_in, n_hidden)
        self.hh = nn.Linear(n_hidden, n_hidden)

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(xs.shape[1], self.hh.in_features)
        for t in range(xs.shape[0]):
            h = torch.tanh(self.ih(xs[t]) + self.hh(h))
        return h


@torch.jit.script
def huber(a: torch.Tensor, b: torch.Tensor, delta: float = 0.5) -> torch.Tensor:
    d = (a - b).abs()
    return torch.where(d < delta, 0.5 * d * d, delta * (d - 0.5 * delta)).mean()


torch.manual_seed(77)
cell = torch.jit.script(Cell(3, 12))
head = nn.Linear(12, 1)
params = list(cell.parameters()) + list(head.parameters())
optimizer = torch.optim.RMSprop(params, lr=2e-3)
x = torch.randn(7, 180, 3)
y = x.sum((0, 2)).sign().unsqueeze(1)
for epoch in range(6):
    for idx in torch.randperm(180).split(15):
        loss = huber(head(cell(x[:, idx])), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{epoch} {loss.item():.6f}")
cell.save("cell.pt")
again = torch.jit.load("cell.pt")
print("same", torch.equal(again(x[:, :5]), cell(x[:, :5])))
