"""A curriculum: each epoch a new DataLoader with harder samples, longer sequences and a larger batch."""

import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

random.seed(5)
torch.manual_seed(5)


def make_sample(max_len):
    n = random.randint(2, max_len)
    seq = [random.randint(0, 9) for _ in range(n)]
    return torch.tensor(seq), sum(seq) % 2


def collate(batch):
    batch = sorted(batch, key=lambda b: -len(b[0]))
    seqs, labels = zip(*batch)
    return pad_sequence(seqs, batch_first=True), torch.tensor([len(s) for s in seqs]), torch.tensor(labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 8)
        self.rnn = nn.GRU(8, 16, batch_first=True)
        self.fc = nn.Linear(16, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.emb(x), lengths, batch_first=True)
        _, h = self.rnn(packed)
        return self.fc(h[-1])


net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for stage, (max_len, bs) in enumerate([(3, 8), (4, 8), (6, 16), (9, 16)]):
    samples = [make_sample(max_len) for _ in range(160)]
    loader = torch.utils.data.DataLoader(samples, batch_size=bs, shuffle=True, collate_fn=collate)
    hits, total = 0, 0.0
    for x, lengths, labels in loader:
        logits = net(x, lengths)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hits += int((logits.argmax(1) == labels).sum())
        total += loss.item()
    print(f"stage {stage} len<={max_len}: loss {total / len(loader):.6f} acc {hits / 160:.3f}")
