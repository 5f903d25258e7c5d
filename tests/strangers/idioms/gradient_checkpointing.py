"""A deep residual net whose blocks are recomputed in the backward pass by torch.utils.checkpoint, dropout and all."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

torch.manual_seed(11)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim))

    def forward(self, x):
        return x + self.ff(self.norm(x))


class Net(nn.Module):
    def __init__(self, dim=16, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.tail = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim), nn.Tanh())
        self.head = nn.Linear(dim, 4)

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if self.training:
                x = checkpoint(block, x, use_reentrant=bool(i % 2))
            else:
                x = block(x)
        x = checkpoint_sequential(self.tail, 2, x, use_reentrant=False)
        return self.head(x)


X = torch.randn(256, 16)
Y = (X[:, :4].abs()).argmax(1)
model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(4):
    model.train()
    running_loss = 0.0
    for xb, yb in torch.utils.data.DataLoader(list(zip(X, Y)), batch_size=16, shuffle=True):
        opt.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(xb.requires_grad_()), yb)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        running_loss += loss.item()
    model.eval()
    with torch.no_grad():
        acc = (model(X).argmax(-1) == Y).float().mean()
    print(f"epoch {epoch} | loss {running_loss / 16:.5f} | acc {acc:.4f}")
