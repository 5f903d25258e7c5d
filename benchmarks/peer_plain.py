"""What following an unchanged PyTorch loop costs, and how fast its replay is: ``python benchmarks/peer_plain.py``.

Blocks of the same training in turn, bare, followed, bare again; the two bare ones tell how much is noise. Then the
last followed run is started again: its loop is replayed to the end.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

from holdfast.adapters.replay.follower import Follower
from holdfast.config import Settings


def train(steps: int, width: int) -> float:
    """As a script would: shuffling, dropout, clipping, a scheduler, a mean of the losses. Seconds that it took."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(3200, 32), torch.randn(3200, 1))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    layers = (torch.nn.Linear(32, width), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    done, total = 0, 0.0
    began = time.perf_counter()
    while done < steps:
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total += loss.item()
            done += 1
            if done == steps:
                break
    return time.perf_counter() - began


def followed(folder: str, work: Callable[[], float]) -> float:
    follower = Follower(Settings.load(dir=folder))
    follower.start()
    try:
        seconds = work()
        follower.finish()
    finally:
        follower.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--replay", type=int, default=10_000, help="steps of the loop that is replayed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)

    def work() -> float:
        return train(options.steps, options.width)

    work()
    ratios, noise, bare = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            before = work()
            held = followed(f"{folder}/{number}", work)
            after = work()
            ratios.append(held / ((before + after) / 2))
            noise.append(after / before)
            bare.append(before / options.steps * 1e6)
        followed(f"{folder}/long", lambda: train(options.replay, options.width))
        replayed = followed(f"{folder}/long", lambda: train(options.replay, options.width))
    print(f"a bare step                        {statistics.median(bare):8.1f} µs")
    print(f"followed, times as long            {statistics.median(ratios):8.3f}   ± {_spread(ratios):.3f}")
    print(f"bare again, times as long (noise)  {statistics.median(noise):8.3f}   ± {_spread(noise):.3f}")
    print(f"a replayed step                    {replayed / options.replay * 1e6:8.1f} µs")
    print(f"replay of {options.replay:,} steps              {replayed:8.1f} s")


def _spread(values: list[float]) -> float:
    """Half of the range between the quartiles."""
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2


if __name__ == "__main__":
    main()
