"""A char-rnn whose hidden state is carried from chunk to chunk, detached, and that samples text with multinomial."""

import torch
import torch.nn as nn

text = "the quick brown fox jumps over the lazy dog and runs away from the angry bear " * 12
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])
torch.manual_seed(19)


class CharRNN(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.emb = nn.Embedding(vocab, hidden)
        self.lstm = nn.LSTM(hidden, hidden, 1)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, x, state):
        h, state = self.lstm(self.emb(x), state)
        return self.out(h), state


def sample(net, length=24):
    net.eval()
    x, state, out = torch.tensor([[stoi["t"]]]), None, "t"
    with torch.no_grad():
        for _ in range(length):
            logits, state = net(x, state)
            x = torch.multinomial(torch.softmax(logits[-1, 0] / 0.8, dim=0), 1).view(1, 1)
            out += chars[x.item()]
    net.train()
    return out


net = CharRNN(len(chars), 32)
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
streams = data[: len(data) // 4 * 4].view(4, -1).t().contiguous()
for epoch in range(5):
    state = (torch.zeros(1, 4, 32), torch.zeros(1, 4, 32))
    total, n = 0.0, 0
    for i in range(0, len(streams) - 1, 12):
        inputs, targets = streams[i : i + 12][:-1], streams[i + 1 : i + 12]
        if len(inputs) == 0:
            break
        state = tuple(s.detach() for s in state)
        logits, state = net(inputs, state)
        loss = nn.functional.cross_entropy(logits.reshape(-1, len(chars)), targets.reshape(-1))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 1.0)
        opt.step()
        total, n = total + loss.item(), n + 1
    print(f"epoch {epoch} loss {total / n:.6f} sample {sample(net)!r}")
