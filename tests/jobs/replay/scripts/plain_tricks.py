"""What longer scripts do: workers, accumulation, clipping, OneCycle, an average of the weights, its own checkpoints."""

import hashlib
import os
import random

import numpy as np
import torch
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

ACCUMULATE = 3


class Points(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        x = torch.sin(torch.arange(8) * float(index + 1))
        return {"x": x + 0.1 * torch.randn(8) + 0.1 * float(np.random.rand()), "y": int(index % 3), "name": str(index)}


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 12)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(12, 3)
        self.calls = 0

    def forward(self, x, hidden):
        self.calls += 1
        hidden = self.cell(x, hidden)
        return {"logits": self.head(self.drop(hidden)) / (1 + 0.01 * self.calls), "hidden": hidden}


def main():
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = Memory()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True)
    loader = DataLoader(Points(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True, drop_last=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
    total = torch.zeros(())
    history = []
    step = 0
    for epoch in range(4):
        hidden = torch.zeros(4, 12)
        for index, batch in enumerate(loader):
            if random.random() < 0.2:
                hidden = hidden.flip(0)
            output = model(batch["x"], hidden)
            hidden = output["hidden"].detach()
            loss = criterion(output["logits"], batch["y"]) / ACCUMULATE
            loss.backward()
            total.add_(loss.detach())
            if (index + 1) % ACCUMULATE:
                continue
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=False)
            average.update_parameters(model)
            step += 1
            history.append(total.item())
            print(f"step {step} loss {history[-1]:.8f} norm {norm:.8f} lr {scheduler.get_last_lr()[0]:.8f}", flush=True)
            total.zero_()
        optimizer.zero_grad()
        torch.save(model.state_dict(), os.path.join(os.environ.get("OUT", "."), f"tricks-{epoch}.pt"))
        print(f"epoch {epoch} {np.mean(history):.8f} {hidden.sum().item():.8f}", flush=True)
    values = [*model.state_dict().values(), *average.state_dict().values()]
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()
    print(f"end {digest} {model.calls}")


if __name__ == "__main__":
    main()
