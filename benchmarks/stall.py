"""For how long a periodic save stops training, against one memcpy of the same bytes.

Both copy from the same kind of memory into memory that has been written before. The first save of a run
also has to get that memory from the operating system, which is told apart.
"""

from __future__ import annotations

import ctypes
import time

from bench import Bench, Row, Saves, compare, in_turn, ratio, seconds, transformer


def measure(bench: Bench) -> list[Row]:
    import torch

    saves = Saves(bench.path("stall"), *transformer(bench.size))
    began = time.perf_counter()
    saves.stage()
    cold_s = time.perf_counter() - began
    size = saves.loop.size()
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)

    def memmove() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size)

    def torch_copy() -> None:
        target.copy_(source)

    def stage() -> None:
        saves.stage()

    contestants = {"torch copy_": torch_copy, "stall": stage, "memmove": memmove}
    times = in_turn(bench.rounds(15, 9), contestants)
    main = compare("stall of a save / one memcpy (torch copy_)", times, "stall", "torch copy_", 1.3)
    main.values.update(bytes=size, cold_s=cold_s, memmove=times["memmove"])
    return [
        main,
        Row("  the same / one memmove of libc in one thread", f"{ratio(times, 'stall', 'memmove'):.2f} ×"),
        Row("  the first save of a run, into fresh memory", seconds([cold_s])),
    ]
