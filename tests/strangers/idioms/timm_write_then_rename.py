"""timm's train.py: a checkpoint is written beside and renamed, links to last and best, a CSV of the epochs."""

import csv
import glob
import os

import torch
import torch.nn as nn


class CheckpointSaver:
    def __init__(self, model, optimizer, folder, max_history=2):
        self.model, self.optimizer, self.folder, self.max_history = model, optimizer, folder, max_history
        self.files = []
        os.makedirs(folder, exist_ok=True)

    def save(self, epoch, metric):
        tmp = os.path.join(self.folder, "tmp.pth.tar")
        last = os.path.join(self.folder, "last.pth.tar")
        torch.save({"epoch": epoch, "model": self.model.state_dict(), "opt": self.optimizer.state_dict()}, tmp)
        if os.path.exists(last):
            os.unlink(last)
        os.rename(tmp, last)
        worst = self.files[-1] if self.files else None
        if len(self.files) < self.max_history or metric > worst[1]:
            while len(self.files) >= self.max_history:
                os.remove(self.files.pop()[0])
            path = os.path.join(self.folder, f"checkpoint-{epoch}.pth.tar")
            os.link(last, path)
            self.files.append((path, metric))
            self.files.sort(key=lambda each: each[1], reverse=True)
            if metric == self.files[0][1]:
                best = os.path.join(self.folder, "model_best.pth.tar")
                if os.path.exists(best):
                    os.unlink(best)
                os.link(last, best)
        return self.files[0]


def update_summary(epoch, train, evaluated, filename, write_header):
    row = {"epoch": epoch, "train_loss": train, "eval_top1": evaluated}
    with open(filename, mode="a") as f:
        writer = csv.DictWriter(f, fieldnames=row.keys())
        if write_header:
            writer.writeheader()
        writer.writerow(row)


torch.manual_seed(42)
x = torch.randn(256, 20)
y = (x[:, :5].sum(1) > x[:, 5:10].sum(1)).long()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 2))
decay = [parameter for parameter in model.parameters() if parameter.ndim > 1]
no_decay = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
optimizer = torch.optim.AdamW([{"params": no_decay, "weight_decay": 0.0}, {"params": decay}], lr=5e-3)
saver = CheckpointSaver(model, optimizer, "output/train")

for epoch in range(6):
    model.train()
    total = 0.0
    for inputs, target in loader:
        loss = nn.functional.cross_entropy(model(inputs), target, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    model.eval()
    with torch.no_grad():
        top1 = (model(x).argmax(1) == y).float().mean().item() - 0.02 * (epoch % 3)
    update_summary(epoch, total / len(loader), top1, "output/train/summary.csv", write_header=epoch == 0)
    best, metric = saver.save(epoch, top1)
    print(f"Train: {epoch} loss {total / len(loader):.6f}, top1 {top1:.4f}, best {os.path.basename(best)}")
print(f"*** Best metric: {metric:.6f}", sorted(os.path.basename(path) for path in glob.glob("output/train/*.tar")))
