"""An incremental save of a state of which 90 % is frozen, against a full one: its bytes and its time.

Just in time: from live tensors to the commit. Periodic: with the copy that training waits for, and the
write behind it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bench import Bench, Row, Saves, compare, in_turn, ratio, seconds, sync_folder, transformer

FROZEN = 0.9
LIMIT = 0.2


def measure(bench: Bench) -> list[Row]:
    model, optimizer = transformer(bench.size, FROZEN)
    full = Saves(bench.path("full"), model, optimizer)
    incremental = Saves(bench.path("incremental"), model, optimizer, incremental=True)
    stalls: dict[str, list[float]] = {"full": [], "incremental": []}
    behind = ThreadPoolExecutor(1)

    def just_in_time(saves: Saves) -> Callable[[], float]:
        def save() -> float:
            began = time.perf_counter()
            saves.write()
            took = time.perf_counter() - began
            _forget_the_one_before(saves)
            return took

        return save

    def periodic(saves: Saves, name: str) -> Callable[[], float]:
        def save() -> float:
            began = time.perf_counter()
            files = saves.stage()
            written = behind.submit(saves.write, files)  # as the engine does it: training waits for the next line alone
            files.settle()
            stalls[name].append(time.perf_counter() - began)
            written.result()
            took = time.perf_counter() - began
            _forget_the_one_before(saves)
            return took

        return save

    for saves in (full, incremental):
        saves.write()
        saves.stage().settle()
    before = _bytes_on_disk(incremental.backend.root)
    size = incremental.write().size
    share = (_bytes_on_disk(incremental.backend.root) - before) / size
    times = in_turn(
        bench.rounds(7, 3),
        {
            "jit": just_in_time(incremental),
            "full jit": just_in_time(full),
            "periodic": periodic(incremental, "incremental"),
            "full periodic": periodic(full, "full"),
        },
    )
    stall = ratio(stalls, "incremental", "full")
    return [
        Row(
            f"incremental save, {FROZEN:.0%} frozen: bytes / full",
            f"{share:.2f} ×",
            f"≤ {LIMIT} ×",
            share <= LIMIT,
            {"ratio": share, "bytes": size},
        ),
        compare("  time just in time / full", times, "jit", "full jit", LIMIT),
        compare("  time of a periodic save / full", times, "periodic", "full periodic", LIMIT),
        Row("  stall of a periodic save / full", f"{stall:.2f} × ({seconds(stalls['incremental'])})", values=stalls),
    ]


def _forget_the_one_before(saves: Saves) -> None:
    saves.backend.discard(f"checkpoint-{saves.loop.step - 1}")
    sync_folder(saves.backend.root)


def _bytes_on_disk(root: str) -> int:
    """Files that lie in several checkpoints count once."""
    sizes = {}
    for parent, _, names in os.walk(root):
        for name in names:
            stat = os.stat(os.path.join(parent, name))
            sizes[stat.st_ino] = stat.st_blocks * 512
    return sum(sizes.values())
