"""Which rank this process is, in a job that torch.distributed runs."""

from __future__ import annotations

import os

import torch.distributed as dist

from holdfast.agree import LocalBoard
from holdfast.errors import ConfigError
from holdfast.runtime.session import Place

_runs = 0


def torch_rank() -> tuple[int, int]:
    """Rank and number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world = int(os.environ.get("WORLD_SIZE", "1") or 1)
    if world > 1:
        raise ConfigError(
            f"WORLD_SIZE={world}, but torch.distributed is not initialised; call "
            f"torch.distributed.init_process_group() before holdfast.Run"
        )
    return 0, 1


def torch_place() -> Place:
    """This process's place, with a board that is new for each run of a process."""
    global _runs
    _runs += 1
    rank, world = torch_rank()
    if world == 1:
        return Place(rank, world, LocalBoard())
    from holdfast.agree.torch_board import TorchBoard, job_store

    return Place(rank, world, TorchBoard(job_store(), f"holdfast/{_runs}/"))
