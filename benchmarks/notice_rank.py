"""One rank of the run that :mod:`notice` preempts: short steps, and a state that takes time to write."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import holdfast


def main(folder: str, kill_wait_s: float, size: int) -> None:
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo")
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model.register_buffer("table", torch.rand(size // 4))
    if world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters())
    loader = [torch.randn(32, 64) for _ in range(100_000)]
    settings = {"kill_wait": kill_wait_s}
    with holdfast.Run(folder, model=model, optimizer=optimizer, settings=settings) as run:
        for batch in run.batches(loader):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
