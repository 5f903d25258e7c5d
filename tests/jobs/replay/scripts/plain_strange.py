"""Scripts that cannot be followed, or not from their own checkpoint on."""

import os
import queue
import sys
import threading

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(40, 3)
model = nn.Linear(3, 1)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)


class Secretive(nn.Linear):
    def get_extra_state(self):
        return object()

    def set_extra_state(self, state):
        pass


def secretive():
    """A state that no file can hold."""
    own = Secretive(3, 1)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(own(a), b).backward()
        optimizer.step()
    print(f"end {own.weight.sum().item():.8f}")


def background():
    """Batches that a thread fetches ahead, as some loaders of other packages do."""
    own = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    ready = queue.Queue(2)
    batches = iter(loader)
    threading.Thread(target=lambda: [ready.put(batch) for batch in [*batches, None]]).start()
    for a, b in iter(ready.get, None):
        optimizer.zero_grad()
        nn.functional.mse_loss(own(a), b).backward()
        optimizer.step()
    print(f"end {own.weight.sum().item():.8f}")


def elsewhere():
    """A thread trains, with batches that this one fetches."""
    own = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)

    def train(a, b):
        optimizer.zero_grad()
        nn.functional.mse_loss(own(a), b).backward()
        optimizer.step()

    for batch in loader:
        thread = threading.Thread(target=train, args=batch)
        thread.start()
        thread.join()
    print(f"end {own.weight.sum().item():.8f}")


def own_checkpoints():
    """A script that saves after each epoch, and goes on from there."""
    path = os.path.join(os.environ["OUT"], "own.pt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin = 0
    if os.path.exists(path) and "--anew" not in sys.argv:
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        begin = saved["epoch"] + 1
    for epoch in range(begin, 4):
        for step, (a, b) in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
            print(f"epoch {epoch} step {step}", flush=True)
        torch.save({"model": model.state_dict(), "epoch": epoch}, path)
    print(f"end {model.weight.sum().item():.8f}")


def with_run():
    """A loop that says itself what a step is."""
    import holdfast

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x[:1])
    with holdfast.Run(model=model, optimizer=optimizer) as run:
        for epoch in run.epochs(3):
            for a, b in run.batches(loader):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(a), b).backward()
                optimizer.step()
                run.step()
                print(f"epoch {epoch} step {run.steps}", flush=True)
    print(f"end {model.weight.sum().item():.8f}")


globals()[sys.argv[1]]()
