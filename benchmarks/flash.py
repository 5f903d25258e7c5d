"""DLRover's flash checkpoint, as a contestant of :mod:`durable`; absent unless it is installed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from bench import settle

INSTALL = "pip install 'dlrover[k8s]'"
LIMIT_S = 120.0


@contextlib.contextmanager
def flash(folder: str, state: Callable[[], dict[str, object]]) -> Iterator[Callable[[], float] | None]:
    """A function that saves and returns the seconds until the checkpoint is persisted; None if it is not installed."""
    os.environ.setdefault("DLROVER_LOG_LEVEL", "ERROR")
    try:
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
    except ImportError:
        yield None
        return
    checkpointer = DdpCheckpointer(folder)
    engine = checkpointer._engine
    step = 0

    def save() -> float:
        nonlocal step
        step += 1
        path = os.path.join(folder, f"{step}.pt")
        began = time.perf_counter()
        checkpointer.save_checkpoint(step, state(), path, storage_type=StorageType.DISK)
        while _latest(folder) != step:
            if time.perf_counter() - began > LIMIT_S:
                raise TimeoutError(f"the flash checkpoint of step {step} was not persisted in {LIMIT_S:.0f} s")
            time.sleep(0.002)
        took = time.perf_counter() - began
        settle(path)
        return took

    try:
        yield save
    finally:
        if engine.saver_proc is not None:
            engine.saver_proc.kill()
            engine.saver_proc.join()
        engine._shm_handler.unlink()
        engine.close()


def _latest(folder: str) -> int:
    """The step that its tracker file names: written after the data is."""
    try:
        with open(os.path.join(folder, "dlrover_latest.txt"), encoding="ascii") as file:
            return int(file.read() or 0)
    except FileNotFoundError:
        return 0
