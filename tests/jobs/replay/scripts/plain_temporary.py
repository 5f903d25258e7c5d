"""The best model is kept in a temporary folder, as in PyTorch's tutorial of transfer learning."""

import os
import tempfile

import torch
import torch.nn as nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
last = int(os.environ.get("LAST", "3"))
with tempfile.TemporaryDirectory() as folder:
    for step in range(1, 11):
        loss = (model(torch.randn(8, 4)) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step <= 3 or step == last:
            torch.save(model.state_dict(), os.path.join(folder, "best.pt"))
        print(f"step {step} loss {loss.item():.9f}", flush=True)
    model.load_state_dict(torch.load(os.path.join(folder, "best.pt")))
print("best", model.weight.tolist())
