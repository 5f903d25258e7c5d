# A script without functions and without a loader, in the manner of nanoGPT: batches are drawn by hand, one ahead.

import hashlib
import math
import time

import torch
import torch.nn as nn

torch.manual_seed(1337)
text = torch.randint(0, 16, (400,), generator=torch.Generator().manual_seed(1))
block, batch = 8, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 12)
        self.mix = nn.Linear(12, 12)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(12, 16, bias=False)
        self.head.weight.requires_grad_(True)

    def forward(self, x, y=None):
        logits = self.head(self.drop(torch.tanh(self.mix(self.embedding(x)).cumsum(1))))
        loss = None if y is None else nn.functional.cross_entropy(logits.view(-1, 16), y.view(-1))
        return logits, loss


def get_batch():
    places = torch.randint(len(text) - block, (batch,))
    return (
        torch.stack([text[i : i + block] for i in places]),
        torch.stack([text[i + 1 : i + 1 + block] for i in places]),
    )


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(5)
    for k in range(5):
        X, Y = get_batch()
        losses[k] = model(X, Y)[1].item()
        print(f"estimate {k}", flush=True)
    model.train()
    return losses.mean()


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), fused=False)
X, Y = get_batch()
t0 = time.time()
best = 1e9
iteration = 0
order = torch.randperm(24)
while True:
    rate = 1e-2 * 0.5 * (1 + math.cos(math.pi * iteration / 24))
    for group in optimizer.param_groups:
        group["lr"] = rate
    if iteration % 6 == 0:
        estimate = estimate_loss()
        if estimate < best:
            best = estimate
        print(f"iteration {iteration} estimate {estimate:.8f} best {best:.8f}", flush=True)
    for _ in range(2):
        logits, loss = model(X, Y)
        loss = loss / 2
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    elapsed, t0 = t1 - t0, t1
    print(f"iteration {iteration} loss {loss.item() * 2:.8f} {order[iteration].item()}", flush=True)
    iteration += 1
    if iteration >= 24:
        break
    if iteration == 12:
        order = torch.randperm(24)
digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()
print(f"end {digest}")
