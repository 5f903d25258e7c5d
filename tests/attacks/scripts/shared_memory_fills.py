"""A loop with running statistics, beside a neighbour that fills /dev/shm at a step."""

import subprocess
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

fill_at = int(sys.argv[1])
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
step = 0
for _ in range(3):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        if step == fill_at:
            # A process of its own: what the script itself writes in a replay goes to a layer elsewhere.
            command = ["dd", "if=/dev/zero", "of=/dev/shm/neighbour", "bs=4096"]
            subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        step += 1
        print("step", step, flush=True)
print("sum", sum(value.double().sum().item() for value in model.state_dict().values()))
