"""The training of the demo: a small convolutional network learns to tell six shapes apart, with DDP on the CPU.

Everything that makes an exact resume hard is on: shuffling, augmentation and dropout that draw random numbers,
batch normalisation, AdamW, a schedule that changes with every step.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import holdfast

SIZE = 28
CLASSES = ("disc", "ring", "square", "frame", "cross", "triangle")


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images of shapes of any place, size and angle: the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=generator)

    labels = torch.randint(len(CLASSES), (count,), generator=generator)
    axis = torch.linspace(-1, 1, SIZE)
    x, y = axis - between(-0.25, 0.25), axis[:, None] - between(-0.25, 0.25)
    angle, radius = between(0, 2 * math.pi), between(0.35, 0.6)
    x, y = (x * angle.cos() + y * angle.sin()) / radius, (y * angle.cos() - x * angle.sin()) / radius
    far, box = torch.hypot(x, y), torch.maximum(x.abs(), y.abs())
    slopes = [x * math.cos(turn) + y * math.sin(turn) for turn in (0, 2 * math.pi / 3, 4 * math.pi / 3)]
    edge = torch.stack(
        [
            far - 1,
            (far - 0.8).abs() - 0.2,
            box - 0.85,
            (box - 0.7).abs() - 0.18,
            torch.maximum(torch.minimum(x.abs(), y.abs()) - 0.25, box - 1),
            torch.stack(slopes).amax(0) - 0.55,
        ]
    )
    images = torch.sigmoid(-12 * edge[labels, torch.arange(count)])
    images = images * between(0.5, 1) + 0.35 * torch.randn(count, SIZE, SIZE, generator=generator)
    return images[:, None], labels


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Mirrored at random and with fresh noise each time an image is asked for."""

    def __init__(self, count: int, seed: int) -> None:
        self.images, self.labels = draw(count, seed)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image + 0.05 * torch.randn(image.shape), self.labels[index]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for wide_in, wide_out in ((1, 16), (16, 32), (32, 48)):
        layers += [nn.Conv2d(wide_in, wide_out, 3, padding=1, bias=False), nn.BatchNorm2d(wide_out), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(48 * 9, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 6)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Tell shapes apart.")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--images", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--losses", required=True, help="rank 0 adds a line per step: step, loss, time")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weights = build()
    model = DistributedDataParallel(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    data = Shapes(arguments.images, seed=1)
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, arguments.batch_size, sampler=sampler, drop_last=True)
    total = arguments.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=total)
    torch.manual_seed(100 + rank)

    with (
        open(arguments.losses, "a", buffering=1) as losses,
        holdfast.Run(model=model, optimizer=optimizer, scheduler=scheduler, total_steps=total) as run,
    ):
        for epoch in run.epochs(arguments.epochs):
            sampler.set_epoch(epoch)
            for images, labels in run.batches(loader):
                loss = cross_entropy(model(images), labels)
                if rank == 0:  # before the step is complete: a rank that is killed leaves no gap
                    losses.write(f"{run.steps + 1} {loss.item().hex()} {time.time():.3f}\n")
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                run.step(loss=loss)

    if rank == 0:
        images, labels = draw(1000, seed=3)
        weights.eval()
        with torch.no_grad():
            right = (weights(images).argmax(1) == labels).float().mean().item()
        print(f"accuracy on 1000 new images: {right:.1%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
