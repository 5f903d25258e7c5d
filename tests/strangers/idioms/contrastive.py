"""SimCLR with a MoCo queue: two views from one transform, InfoNCE, negatives in a registered buffer with a pointer."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class TwoViews:
    def __init__(self, base):
        self.base = base

    def __call__(self, x):
        return [self.base(x), self.base(x)]


def augment(x):
    x = x.roll(random.randint(-2, 2))
    return x * random.uniform(0.8, 1.2) + 0.05 * torch.randn_like(x)


class Signals(Dataset):
    def __init__(self, n, transform):
        self.x = torch.randn(n, 12).cumsum(1)
        self.transform = transform

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.transform(self.x[i]), i


class MoCo(nn.Module):
    def __init__(self, dim=8, K=64, m=0.95):
        super().__init__()
        self.K, self.m = K, m
        self.encoder_q = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, dim))
        self.encoder_k = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, dim))
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _enqueue(self, keys):
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (ptr + keys.shape[0]) % self.K

    def forward(self, a, b):
        q = F.normalize(self.encoder_q(a), dim=1)
        with torch.no_grad():
            for pq, pk in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
                pk.data = pk.data * self.m + pq.data * (1.0 - self.m)
            k = F.normalize(self.encoder_k(b), dim=1)
        l_pos = (q * k).sum(1, keepdim=True)
        logits = torch.cat([l_pos, q @ self.queue.clone().detach()], dim=1) / 0.2
        self._enqueue(k)
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


random.seed(28)
torch.manual_seed(28)
loader = DataLoader(Signals(256, TwoViews(augment)), batch_size=16, shuffle=True, drop_last=True)
model = MoCo()
optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
for epoch in range(5):
    losses = top1 = 0
    for (a, b), _ in loader:
        output, target = model(a, b)
        loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += loss.item()
        top1 += (output.argmax(1) == 0).float().sum().item()
    print(f"epoch {epoch} loss {losses / len(loader):.6f} top1 {top1 / 256:.4f} ptr {model.queue_ptr.item()}")
