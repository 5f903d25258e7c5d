"""PyTorch's multigpu tutorial: a Trainer that loads its snapshot where one exists, and saves one every few epochs."""

import os
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.model, self.train_data, self.optimizer, self.save_every = model, train_data, optimizer, save_every
        self.epochs_run = 0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            print("Loading snapshot", file=sys.stderr)
            self._load_snapshot(snapshot_path)

    def _load_snapshot(self, snapshot_path):
        snapshot = torch.load(snapshot_path)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        size = len(next(iter(self.train_data))[0])
        print(f"[GPU0] Epoch {epoch} | Batchsize: {size} | Steps: {len(self.train_data)}")
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def _save_snapshot(self, epoch):
        snapshot = {"MODEL_STATE": self.model.state_dict(), "EPOCHS_RUN": epoch + 1}
        torch.save(snapshot, self.snapshot_path)
        print(f"Epoch {epoch} | Training snapshot saved at {self.snapshot_path}")

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if epoch % self.save_every == 0:
                self._save_snapshot(epoch)


def main():
    torch.manual_seed(7)
    data = TensorDataset(torch.rand(512, 20), torch.randint(0, 3, (512,)))
    model = torch.nn.Linear(20, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    trainer = Trainer(model, DataLoader(data, batch_size=32, shuffle=True), optimizer, 2, "snapshot.pt")
    trainer.train(6)
    print("weights", [round(value, 6) for value in model.weight.flatten().tolist()[:6]])


if __name__ == "__main__":
    main()
