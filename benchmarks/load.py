"""A full restore, every byte checked, against a raw read of the same bytes.

Both read from the same cache state: the page cache is emptied of the files before each (*cold*), or holds
them (*warm*). Both read into memory that is fresh from the operating system.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

from bench import CHUNK, Bench, Row, Saves, compare, forget, in_turn, transformer

LIMIT = 1.3


def measure(bench: Bench) -> list[Row]:
    from holdfast.store.checkpoints import whole
    from holdfast.torch.restore import Contents, restore
    from holdfast.torch.state import Objects

    saves = Saves(bench.path("load"), *transformer(bench.size))
    saves.write()
    model, optimizer = transformer(bench.size)
    objects = Objects({"model": model, "optimizer": optimizer}, 0, incremental=False)
    folder = os.path.join(saves.backend.root, f"checkpoint-{saves.loop.step}")

    def load(cold: bool) -> Callable[[], float]:
        def read() -> float:
            _prepare(folder, cold)
            began = time.perf_counter()
            checkpoint = next(whole([saves.backend]))
            restore(Contents(checkpoint, 0, 1), objects)
            return time.perf_counter() - began

        return read

    def raw(cold: bool, direct: bool = False) -> Callable[[], float]:
        def read() -> float:
            _prepare(folder, cold)
            return _raw_read(folder, direct=direct)

        return read

    rounds = bench.rounds(7, 3)
    cold = in_turn(rounds, {"load": load(True), "raw": raw(True), "raw direct": raw(True, True)})
    warm = in_turn(rounds, {"load": load(False), "raw": raw(False)})
    return [
        compare("load, checked / raw read, cold cache", cold, "load", "raw", LIMIT),
        compare("load, checked / raw direct read", cold, "load", "raw direct", LIMIT),
        compare("load, checked / raw read, warm cache", warm, "load", "raw", LIMIT),
    ]


def _prepare(folder: str, cold: bool) -> None:
    if cold:
        forget(folder)
    else:
        _raw_read(folder, direct=False)


def _raw_read(folder: str, *, direct: bool) -> float:
    began = time.perf_counter()
    for name in sorted(os.listdir(folder)):
        fd = os.open(os.path.join(folder, name), os.O_RDONLY | (os.O_DIRECT if direct else 0))
        size = os.fstat(fd).st_size
        memory = mmap.mmap(-1, size + -size % mmap.PAGESIZE)
        view = memoryview(memory)
        done = 0
        while done < size:
            done += os.preadv(fd, [view[done : done + CHUNK]], done)
        os.close(fd)
    return time.perf_counter() - began
