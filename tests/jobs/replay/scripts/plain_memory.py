"""Variables that hold much, deep inside: a replay buffer, closures, slots, dataclasses, generators. Their tensors are
answers of modules, which a replay does not have."""

import hashlib
import os
import random
from collections import deque, namedtuple
from dataclasses import dataclass

import torch
import torch.nn as nn

COUNT = int(os.environ.get("COUNT", "6000"))
Transition = namedtuple("Transition", "state value")


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *content):
        self.memory.append(Transition(*content))

    def sample(self, count):
        return random.sample(self.memory, count)


class Slots:
    __slots__ = ("__secret", "mean")

    def __init__(self, mean):
        self.mean, self.__secret = mean, mean + 1

    def sum(self):
        return self.mean + self.__secret


@dataclass(slots=True)
class Deep:
    below: object


def averaging():
    total = torch.zeros(())

    def add(value):
        nonlocal total
        total = 0.9 * total + value
        return total

    return add


def running(model, x):
    kept = torch.zeros(())
    while True:
        kept = kept + model(x).detach().mean()
        yield kept


def main():
    torch.manual_seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    memory, average, by_key = ReplayMemory(COUNT), averaging(), {}
    means = running(model, torch.ones(3, 4))
    slots = Slots(torch.zeros(()))
    deep = None
    step = 0
    while step < 8:
        with torch.no_grad():
            for _ in range(COUNT // 6):
                state = torch.randn(4)
                memory.push(state, model(state))
        deep = Deep(model(torch.ones(4)).detach())
        for _ in range(30):
            deep = Deep({"below": [deep]})
        slots.mean = model(torch.zeros(4)).detach().mean()
        by_key[step, 1.5] = slots.sum()
        batch = memory.sample(16)
        states = torch.stack([one.state for one in batch])
        target = torch.stack([one.value for one in batch]) + next(means) + 0.1 * sum(by_key.values())
        inner = deep
        while isinstance(inner, Deep):
            inner = inner.below["below"][0] if isinstance(inner.below, dict) else inner.below
        loss = nn.functional.mse_loss(model(states), target + inner)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        seen = average(loss.detach())
        print(f"step {step} loss {loss.item():.8f} average {seen.item():.8f}", flush=True)
    content = [value.detach().numpy().tobytes() for value in (*model.parameters(), *(m.value for m in memory.memory))]
    print("end", hashlib.sha256(b"".join(content)).hexdigest())


if __name__ == "__main__":
    main()
