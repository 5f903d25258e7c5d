"""pytorch/examples' word_language_model: the best model by open('wb'), loaded again at the end."""

import argparse
import math
import os
import time

import torch
import torch.nn as nn

parser = argparse.ArgumentParser(description="language model")
parser.add_argument("--lr", type=float, default=5.0)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--bptt", type=int, default=12)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--log-interval", type=int, default=10)
parser.add_argument("--save", type=str, default="model.pt")
args = parser.parse_args()

torch.manual_seed(args.seed)


def batchify(data, size):
    count = data.size(0) // size
    return data[: count * size].view(size, -1).t().contiguous()


def make_corpus(length):
    generator = torch.Generator().manual_seed(length)
    noise = torch.randint(0, 5, (length,), generator=generator)
    return (torch.arange(length) * 3 + noise) % 30


train_data = batchify(make_corpus(4000), 10)
val_data = batchify(make_corpus(800), 5)


class RNNModel(nn.Module):
    def __init__(self, tokens=30, width=24, dropout=0.2):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(tokens, width)
        self.rnn = nn.LSTM(width, width, 1)
        self.decoder = nn.Linear(width, tokens)
        self.width = width

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output))
        return nn.functional.log_softmax(decoded.view(-1, decoded.size(-1)), dim=1), hidden

    def init_hidden(self, size):
        weight = next(self.parameters())
        return weight.new_zeros(1, size, self.width), weight.new_zeros(1, size, self.width)


model = RNNModel()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
criterion = nn.NLLLoss()


def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    length = min(args.bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].reshape(-1)


def evaluate(source):
    model.eval()
    total = 0.0
    hidden = model.init_hidden(5)
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, args.bptt):
            data, targets = get_batch(source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total += len(data) * criterion(output, targets).item()
    return total / (len(source) - 1)


def train(lr):
    model.train()
    total = 0.0
    start = time.time()
    hidden = model.init_hidden(10)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        total += loss.item()
        if batch % args.log_interval == 0 and batch > 0:
            ms = (time.time() - start) * 1000 / args.log_interval
            mean = total / args.log_interval
            print(f"| epoch {epoch:3d} | {batch:5d} batches | lr {lr:02.2f} | {ms:5.2f} ms | loss {mean:5.4f}")
            total = 0
            start = time.time()


lr = args.lr
best_val_loss = None
try:
    for epoch in range(1, args.epochs + 1):
        train(lr)
        val_loss = evaluate(val_data)
        print(f"| end of epoch {epoch:3d} | valid loss {val_loss:.6f} | valid ppl {math.exp(val_loss):8.4f}")
        if not best_val_loss or val_loss < best_val_loss:
            with open(args.save, "wb") as f:
                torch.save(model, f)
            best_val_loss = val_loss
        else:
            lr /= 4.0
            for group in optimizer.param_groups:
                group["lr"] = lr
except KeyboardInterrupt:
    print("Exiting from training early")

with open(args.save, "rb") as f:
    model = torch.load(f, weights_only=False)
    model.rnn.flatten_parameters()

test_loss = evaluate(batchify(make_corpus(600), 5))
print(f"| End of training | test loss {test_loss:.6f} | {os.path.getsize(args.save)} bytes")
