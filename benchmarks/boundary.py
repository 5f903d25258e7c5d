"""What a step boundary costs while nothing happens, and whether a real model's steps per second show it.

The cost of a boundary is that of ``run.step()`` and of fetching through ``run.batches()``, less that of the
bare loop over the same loader. The body of the loop is empty, so nothing else is in the difference.
"""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from bench import Bench, Row, job_store, place_in_job, spread

LIMIT_US = 2.0
ITERATIONS = 20_000
FIRST_STEPS = 8
"""Steps of a block that are not timed: a run's start is not its steady state."""


def measure(bench: Bench) -> list[Row]:
    rows = []
    for world in (1, 2):
        store = job_store()
        with ProcessPoolExecutor(world, mp_context=get_context("spawn")) as pool:
            folder, blocks = bench.path(f"world-{world}"), bench.rounds(15, 7)
            ranks = [pool.submit(_boundaries, folder, rank, world, store.port, blocks) for rank in range(world)]
            costs = [rank.result() for rank in ranks]
        cost = max(statistics.median(of_rank) for of_rank in costs)
        rows.append(
            Row(
                f"a step boundary, {world} rank{'s' if world > 1 else ''}",
                f"{cost:.2f} µs (± {max(map(spread, costs)):.2f})",
                f"≤ {LIMIT_US:g} µs",
                cost <= LIMIT_US,
                {"us": costs},
            )
        )
    return [*rows, _steps(bench)]


def _boundaries(folder: str, rank: int, world: int, port: int, blocks: int) -> list[float]:
    """Microseconds per boundary, one number for each block of iterations."""
    import torch

    import holdfast

    torch.set_num_threads(1)
    _join(rank, world, port)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    loader = list(range(ITERATIONS))
    costs = []
    with holdfast.Run(folder, model=model, optimizer=optimizer) as run:
        for _ in range(blocks):
            began = time.perf_counter()
            for _ in loader:
                pass
            between = time.perf_counter()
            for _ in run.batches(loader):
                run.step()
            bare, held = between - began, time.perf_counter() - between
            costs.append((held - bare) / ITERATIONS * 1e6)
    if world > 1:
        torch.distributed.destroy_process_group()
    return costs


def _join(rank: int, world: int, port: int) -> None:
    if world > 1:
        import torch.distributed

        os.environ.update(place_in_job(rank, world, port))
        torch.distributed.init_process_group("gloo")


def _steps(bench: Bench) -> Row:
    """Blocks of training in turn: bare, with holdfast, bare again. The two bare ones tell how much is noise."""
    import torch

    import holdfast

    torch.set_num_threads(1)
    data = torch.utils.data.TensorDataset(torch.randn(128 * 32, 64), torch.randint(10, (128 * 32,)))
    loader = torch.utils.data.DataLoader(data, batch_size=32)
    differences, noise, rates = [], [], []
    for number in range(bench.rounds(40, 12)):
        first = _train(loader, None)
        with holdfast.Run(bench.path(f"steps-{number}"), **(objects := _model())) as run:
            held = _train(loader, run, objects)
        second = _train(loader, None)
        differences.append(held / ((first + second) / 2) - 1)
        noise.append(second / first - 1)
        rates.append((len(loader) - FIRST_STEPS) / held)
    difference = statistics.median(differences)
    # The median of n values is known to about the spread of one over the root of n.
    uncertainty = 1.25 * spread(noise + differences) / 0.67 / len(differences) ** 0.5
    return Row(
        f"time of a step of {1e3 / statistics.median(rates):.2f} ms, with holdfast / without",
        f"{1 + difference:.3f} × (± {uncertainty:.3f})",
        "no measurable difference",
        difference <= max(2 * uncertainty, 0.003),
        {"difference": differences, "noise": noise},
    )


def _model() -> dict[str, Any]:
    import torch

    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    )
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}


def _train(loader: Any, run: Any, objects: dict[str, Any] | None = None) -> float:
    """Seconds of one pass, without its first steps."""
    import torch

    objects = objects or _model()
    model, optimizer = objects["model"], objects["optimizer"]
    for number, (x, y) in enumerate(run.batches(loader) if run is not None else loader):
        if number == FIRST_STEPS:
            began = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.step(loss=loss)
    return time.perf_counter() - began
