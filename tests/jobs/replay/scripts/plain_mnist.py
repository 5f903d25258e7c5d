"""A classifier with an evaluation after each epoch, as tutorials have it."""

import argparse
import hashlib
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(4 * 6 * 6, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return F.log_softmax(self.head(torch.flatten(self.drop(x), 1)), dim=1)


def train(model, loader, optimizer, epoch):
    model.train()
    running = 0.0
    correct = torch.zeros(())
    for index, (data, target) in enumerate(loader):
        if epoch > 1 and index % 4 == 1:
            time.sleep(float(os.environ.get("PAUSE", "0")))
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        running += loss.item()
        correct += output.argmax(1).eq(target).sum()
        if index % 4 == 0:
            print(f"epoch {epoch} batch {index} loss {loss.item():.8f}")
        if epoch == 2 and index == 4:
            time.sleep(float(os.environ.get("TAIL", "0")))
    print(f"epoch {epoch} mean {running / len(loader):.8f} accuracy {correct / len(loader.dataset):.4f}")


def test(model, loader, epoch):
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for index, (data, target) in enumerate(loader):
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(dim=1) == target).sum().item()
            print(f"test {epoch} batch {index}")
    print(f"test {epoch} loss {loss / len(loader.dataset):.8f} correct {correct}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(1)
    images = torch.randn(100, 1, 8, 8)
    labels = (images.mean((1, 2, 3)) * 40).long().clamp(-5, 4) + 5
    data = TensorDataset(images, labels)
    train_loader = DataLoader(data, batch_size=8, shuffle=True)
    test_loader = DataLoader(data, batch_size=25)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        train(model, train_loader, optimizer, epoch)
        test(model, test_loader, epoch)
        scheduler.step()
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()
    print(f"end {digest}")


if __name__ == "__main__":
    main()
