"""torch.distributed.checkpoint in one process: saved each epoch, read back, the one before removed."""

import shutil

import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(128, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

for epoch in range(4):
    for inputs, targets in loader:
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"checkpoints/{epoch}")
    if epoch:
        shutil.rmtree(f"checkpoints/{epoch - 1}")
    dcp.load({"model": model.state_dict()}, checkpoint_id=f"checkpoints/{epoch}")
    print(f"epoch {epoch}: {loss.item():.6f}")
