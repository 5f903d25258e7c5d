"""Early stopping, the best model kept and loaded at the end, a learning rate that follows the validation loss."""

import hashlib
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Trainer:
    def __init__(self, out):
        torch.manual_seed(21)
        x = torch.randn(90, 6)
        data = TensorDataset(x, x @ torch.randn(6, 1) + 0.5 * torch.randn(90, 1))
        train, valid = random_split(data, [66, 24])
        self.train_loader = DataLoader(train, batch_size=8, shuffle=True)
        self.valid_loader = DataLoader(valid, batch_size=8)
        self.model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=1)
        self.best, self.bad, self.path = float("inf"), 0, os.path.join(out, "best.pt")

    def epoch(self, number):
        self.model.train()
        losses = []
        for x, y in self.train_loader:
            loss = nn.functional.mse_loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(float(loss))
            print(f"epoch {number} batch {len(losses)}", flush=True)
        return sum(losses) / len(losses)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        total = sum(nn.functional.mse_loss(self.model(x), y, reduction="sum") for x, y in self.valid_loader)
        return total / len(self.valid_loader.dataset)

    def fit(self):
        for number in range(40):
            loss = self.epoch(number)
            valid = self.validate()
            self.scheduler.step(valid)
            better = valid < self.best
            if better:
                self.best, self.bad = valid.item(), 0
                torch.save(self.model.state_dict(), self.path)
            else:
                self.bad += 1
            rate = self.optimizer.param_groups[0]["lr"]
            print(f"epoch {number} loss {loss:.8f} valid {valid:.8f} best {self.best:.8f} bad {self.bad} lr {rate}")
            if self.bad == 3:
                print(f"stopped after epoch {number}", flush=True)
                break
        self.model.load_state_dict(torch.load(self.path))


if __name__ == "__main__":
    trainer = Trainer(os.environ.get("OUT", "."))
    trainer.fit()
    values = trainer.model.state_dict().values()
    print(f"end {hashlib.sha256(b''.join(value.numpy().tobytes() for value in values)).hexdigest()}")
