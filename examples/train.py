"""A complete training script that survives preemption.

One process, or several under torchrun or ``holdfast run -n``::

    python examples/train.py
    holdfast run -n 2 examples/train.py --epochs 50

Interrupt it in any way and start the same command again: it goes on at the next step, and its last line is the
same as if nothing had happened.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import holdfast


def spirals(count: int, arms: int = 3) -> TensorDataset:
    """Points on intertwined spirals, to be told apart; the same ones on every rank and in every attempt."""
    generator = torch.Generator().manual_seed(1)
    label = torch.randint(arms, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 4 * radius + 2 * math.pi * label / arms + 0.15 * torch.randn(count, generator=generator)
    return TensorDataset(torch.stack([radius * angle.sin(), radius * angle.cos()], dim=1), label)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Linear(2, 128), nn.ReLU(), *hidden, nn.Linear(128, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description="Tell points on spirals apart.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    weights = build()
    model = DistributedDataParallel(weights) if world > 1 else weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=500, gamma=0.5)
    data = spirals(4_000)
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, arguments.batch_size, sampler=sampler)
    torch.manual_seed(rank)  # each rank drops other units

    with holdfast.Run(model=model, optimizer=optimizer, scheduler=scheduler, save_every="1 epoch") as run:
        for epoch in run.epochs(arguments.epochs):
            sampler.set_epoch(epoch)
            for points, labels in run.batches(loader):
                loss = cross_entropy(model(points), labels)
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                run.step(loss=loss)

    if rank == 0:
        weights.eval()
        points, labels = data.tensors
        correct = (weights(points).argmax(1) == labels).float().mean()
        content = b"".join(value.numpy().tobytes() for value in weights.state_dict().values())
        digest = hashlib.sha256(content).hexdigest()[:16]
        print(f"{run.steps} steps, accuracy {correct:.1%}, parameters {digest}", flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
