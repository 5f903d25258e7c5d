"""A deque of more than 4096 transitions, each a tuple of tensors, prioritised by numpy, for a small Q network."""

import random
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F

random.seed(0)
np.random.seed(0)
torch.manual_seed(0)


class Buffer:
    def __init__(self, capacity):
        self.buffer = deque(maxlen=capacity)
        self.priorities = np.zeros((capacity,), dtype=np.float32)
        self.pos = 0

    def push(self, *transition):
        self.priorities[self.pos] = self.priorities.max() if self.buffer else 1.0
        if len(self.buffer) == self.buffer.maxlen:
            self.buffer.popleft()
        self.buffer.append(transition)
        self.pos = (self.pos + 1) % self.buffer.maxlen

    def sample(self, n):
        prios = self.priorities[: len(self.buffer)] ** 0.6
        indices = np.random.choice(len(self.buffer), n, p=prios / prios.sum())
        batch = [self.buffer[i] for i in indices]
        return indices, *(torch.stack(part) for part in zip(*batch))

    def update(self, indices, errors):
        for idx, error in zip(indices, errors):
            self.priorities[idx] = abs(error) + 1e-5


q = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
target = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
target.load_state_dict(q.state_dict())
optimizer = torch.optim.Adam(q.parameters(), lr=1e-3)
memory = Buffer(6000)
state = torch.zeros(4)
reward_sum = 0.0
for frame in range(5200):
    if random.random() < max(0.1, 1 - frame / 3000):
        action = random.randrange(2)
    else:
        with torch.no_grad():
            action = q(state).argmax().item()
    next_state = (0.9 * state + torch.tensor([1.0, -1.0, 0.5, 0.0]) * (2 * action - 1) + 0.1 * torch.randn(4)).clamp(
        -3, 3
    )
    reward = -next_state.abs().sum()
    reward_sum += reward.item()
    memory.push(state, torch.tensor(action), reward, next_state)
    state = next_state
    if frame >= 4300 and frame % 10 == 0:
        idx, s, a, r, s2 = memory.sample(32)
        with torch.no_grad():
            expected = r + 0.9 * target(s2).max(1).values
        predicted = q(s).gather(1, a.unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(predicted, expected)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory.update(idx, (predicted - expected).detach().numpy())
        if frame % 100 == 0:
            print(f"frame {frame} loss {loss.item():.5f} reward {reward_sum:.3f} buffer {len(memory.buffer)}")
    if frame % 500 == 0:
        target.load_state_dict(q.state_dict())
