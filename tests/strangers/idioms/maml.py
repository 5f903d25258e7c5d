"""Meta learning: inner steps by autograd.grad and functional_call, the outer loss through them, one outer Adam."""

import random

import torch
import torch.nn as nn
from torch.func import functional_call

random.seed(30)
torch.manual_seed(30)
net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
meta_opt = torch.optim.Adam(net.parameters(), lr=5e-3)


def task():
    amplitude, phase = random.uniform(0.5, 3), random.uniform(0, 3.14)

    def draw(n):
        x = 10 * torch.rand(n, 1) - 5
        return x, amplitude * torch.sin(x + phase)

    return draw


def adapt(draw, params, steps=2, lr=0.02):
    for _ in range(steps):
        x, y = draw(10)
        loss = nn.functional.mse_loss(functional_call(net, params, (x,)), y)
        grads = torch.autograd.grad(loss, params.values(), create_graph=True)
        params = {k: p - lr * g for (k, p), g in zip(params.items(), grads)}
    return params


for iteration in range(60):
    outer = 0
    for _ in range(3):
        draw = task()
        fast = adapt(draw, dict(net.named_parameters()))
        x, y = draw(10)
        outer = outer + nn.functional.mse_loss(functional_call(net, fast, (x,)), y)
    meta_opt.zero_grad()
    outer.backward()
    meta_opt.step()
    if iteration % 10 == 9:
        print(f"iteration {iteration} outer loss {outer.item() / 3:.6f}")
