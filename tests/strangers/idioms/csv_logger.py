"""csv.DictWriter on a file that stays open, flushed each row, and a pandas summary of it at the end."""

import csv
import os

import torch
from torch import nn

torch.manual_seed(12)
os.makedirs("logs", exist_ok=True)
csv_file = open("logs/progress.csv", "w", newline="")
log = csv.DictWriter(csv_file, fieldnames=["iteration", "loss", "grad_norm", "lr"])
log.writeheader()

teacher = nn.Linear(6, 2)
student = nn.Linear(6, 2)
optimizer = torch.optim.Adagrad(student.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
for iteration in range(80):
    x = torch.randn(16, 6)
    with torch.no_grad():
        y = teacher(x)
    loss = nn.functional.l1_loss(student(x), y)
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(student.parameters(), float("inf"))
    optimizer.step()
    scheduler.step()
    if iteration % 4 == 0:
        log.writerow(
            {
                "iteration": iteration,
                "loss": f"{loss.item():.6f}",
                "grad_norm": f"{norm.item():.5f}",
                "lr": f"{scheduler.get_last_lr()[0]:.6f}",
            }
        )
        csv_file.flush()
csv_file.close()

with open("logs/progress.csv") as f:
    rows = list(csv.DictReader(f))
losses = [float(r["loss"]) for r in rows]
print(len(rows), "rows", "min", min(losses), "last", rows[-1])
