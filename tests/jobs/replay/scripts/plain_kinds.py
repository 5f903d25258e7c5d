"""Loops of many kinds, one each."""

import argparse
import hashlib
import random

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

F = nn.functional


def made(seed=2):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 1))
    x = torch.randn(60, 6)
    return model, x, x.sum(1, keepdim=True).sin()


def scaler():
    """Mixed precision's scaler, which skips a step now and then."""
    model, x, y = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=5)
    loader = DataLoader(TensorDataset(x, y), 6, shuffle=True)
    for epoch in range(3):
        for index, (a, b) in enumerate(loader):
            loss = F.mse_loss(model(a), b) * (float("inf") if (epoch, index) == (0, 3) else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            print(f"step {epoch * 10 + index} loss {loss.item():.8f} scale {scaler.get_scale()}")
    return model


def lbfgs():
    """A closure that is called as often as the optimizer likes."""
    model, x, y = made()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for step in range(8):

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        print(f"step {step} loss {loss.item():.8f}")
    return model


def loose():
    """Tensors that are trained and belong to no module, two optimizers that step together, data permuted by hand."""
    _, x, y = made()
    weight, bias = torch.zeros(6, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizers = [torch.optim.SGD([weight], lr=0.1, momentum=0.9), torch.optim.Adam([bias], lr=0.1)]
    step = 0
    for epoch in range(3):
        order = torch.randperm(60)
        shuffled = np.random.RandomState(epoch).permutation(60)
        for begin in range(0, 60, 12):
            rows = order[begin : begin + 12]
            noise = 0.01 * torch.randn(12, 1)
            loss = F.mse_loss(x[rows] @ weight + bias + noise, y[rows])
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            step += 1
            print(f"step {step} loss {loss.item():.8f} {int(shuffled[begin])}")
    return nn.ParameterList([weight, bias])


def compiled():
    """A compiled model."""
    model, x, y = made()
    fast = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(fast.parameters(), lr=1e-2)
    for epoch in range(3):
        for step, (a, b) in enumerate(DataLoader(TensorDataset(x, y), 10, shuffle=True)):
            loss = F.mse_loss(fast(a), b)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {epoch * 6 + step} loss {loss.item():.8f}")
    return model


def sampler():
    """Batches of a sampler that the script iterates itself, as in reinforcement learning."""
    model, x, y = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = 0
    for _ in range(3):
        for rows in BatchSampler(SubsetRandomSampler(range(60)), 12, drop_last=False):
            loss = F.mse_loss(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            print(f"step {step} loss {loss.item():.8f}")
    return model


def mixed():
    """Values of several kinds that one line reads, and steps that end with an error."""
    model, x, y = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    right, total, skipped = 0, 0.0, 0
    for epoch in range(3):
        for step, (a, b) in enumerate(DataLoader(TensorDataset(x, y), 6, shuffle=True)):

            def closure(a=a, b=b, step=step):
                optimizer.zero_grad()
                loss = F.mse_loss(model(a), b)
                if step == 4:
                    raise ValueError("not this one")
                loss.backward()
                return loss

            try:
                loss = optimizer.step(closure)
            except ValueError:
                skipped += 1
                continue
            values = [value.item() for value in (loss, (model(a) > b).sum(), loss > 1)]
            total, right = total + values[0], right + values[1]
            print(f"step {epoch * 10 + step} total {total:.8f} right {right} {values[2]} skipped {skipped}")
    return model


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(4)
        for _ in range(40):
            x = torch.randn(6, generator=generator)
            yield x, x.sum().sin()


def endless():
    """An iterator that is kept and asked for more, a stream of data, an evaluation in the middle of an epoch."""
    model, x, y = made()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    loader = DataLoader(Stream(), batch_size=5)
    held_out = DataLoader(TensorDataset(x, y), 20, shuffle=True)
    batches = iter(loader)
    best = float("inf")
    for step in range(20):
        try:
            a, b = next(batches)
        except StopIteration:
            batches = iter(loader)
            a, b = next(batches)
        loss = F.mse_loss(model(a).squeeze(1), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.8f}")
        if step % 4 == 3:
            model.eval()
            with torch.no_grad():
                scores = [F.mse_loss(model(c), d) for c, d in held_out]
            model.train()
            best = min(best, torch.stack(scores).mean().item())
            print(f"best {best:.8f} after {step}")
    return model


def stateful():
    """torchdata's loader, with workers that draw random numbers."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    model, _, _ = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = StatefulDataLoader(Noisy(), 6, shuffle=True, num_workers=2)
    for epoch in range(2):
        for step, (a, b) in enumerate(loader):
            loss = F.mse_loss(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {epoch * 8 + step} loss {loss.item():.8f}")
    return model


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        x = torch.full((6,), float(index)).sin() + 0.1 * torch.randn(6) + random.random()
        return x, x.sum(0, keepdim=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    trained = globals()[parser.parse_args().kind]()
    values = trained.state_dict().values()
    print(f"end {hashlib.sha256(b''.join(value.numpy().tobytes() for value in values)).hexdigest()}")
