"""torch.compile around the model and around the loss, the last batch of another shape."""

import os

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1)
backend = os.environ.get("BACKEND", "aot_eager")
batch_size = int(os.environ.get("BATCH_SIZE", 32))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(20, 40), nn.Linear(40, 5)
        self.bn = nn.BatchNorm1d(40)

    def forward(self, x):
        return self.fc2(F.dropout(F.relu(self.bn(self.fc1(x))), 0.1, self.training))


@torch.compile(backend=backend)
def loss_fn(logits, y, smoothing: float = 0.1):
    return F.cross_entropy(logits, y, label_smoothing=smoothing)


X = torch.randn(200, 20)
y = X[:, :5].argmax(dim=1)
model = torch.compile(MLP(), backend=backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
for epoch in range(5):
    model.train()
    perm = torch.randperm(200)
    for idx in perm.split(batch_size):
        optimizer.zero_grad()
        loss = loss_fn(model(X[idx]), y[idx])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val = loss_fn(model(X), y)
    print(f"{epoch}: {loss.item():.5f} {val.item():.5f}")
torch.save(model._orig_mod.state_dict(), "compiled.pt")
