"""What all benchmarks share: rows of the table, interleaved timing, raw disk access, and a state to save.

Every number is a ratio of times that were taken in one run, in turn (A B A B …), so that a machine that
is busy or slow for a while is so for all. Each benchmark is a module with ``measure(bench)``.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

CHUNK = 8 << 20


@dataclass
class Bench:
    """What a run of the benchmarks was asked for."""

    folder: str
    """An empty folder on the disk that is measured."""
    quick: bool = False
    size: int = 3 << 29
    """Bytes of the states that are saved and loaded."""
    smoke: bool = False
    """One round of everything, to see that it runs; its numbers mean nothing."""

    def rounds(self, full: int, quick: int) -> int:
        return 1 if self.smoke else quick if self.quick else full

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)


@dataclass
class Row:
    """A line of the table."""

    what: str
    measured: str
    target: str = ""
    met: bool | None = None
    """None: told for comparison; it has no target."""
    values: dict[str, Any] = field(default_factory=dict)
    """The numbers behind it, for ``--json``."""


Times = dict[str, list[float]]


def in_turn(rounds: int, contestants: dict[str, Callable[[], float | None]]) -> Times:
    """Call all contestants in each round; seconds by name. One that returns a number has timed itself."""
    times: Times = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            began = time.perf_counter()
            own = contestant()
            times[name].append(time.perf_counter() - began if own is None else own)
    return times


def ratio(times: Times, name: str, against: str) -> float:
    """How many times as long: the median over the rounds, each compared within itself."""
    return statistics.median(one / other for one, other in zip(times[name], times[against], strict=True))


def compare(what: str, times: Times, name: str, against: str, limit: float, note: str = "") -> Row:
    """A row with a limit on the ratio of two contestants."""
    found = ratio(times, name, against)
    return Row(
        what,
        f"{found:.2f} × ({_seconds(times[name])} / {_seconds(times[against])}{', ' + note if note else ''})",
        f"≤ {limit:g} ×",
        found <= limit,
        {"ratio": found, "limit": limit, name: times[name], against: times[against]},
    )


def _seconds(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    if middle >= 1:
        return f"{middle:.2f} s"
    return f"{middle * 1e3:.3g} ms" if middle >= 1e-3 else f"{middle * 1e6:.3g} µs"


seconds = _seconds


def spread(values: Sequence[float]) -> float:
    """Half of the range that holds the middle half of the values."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2


@dataclass
class Pairs:
    """Times with something and without it, taken in turn."""

    on: list[float] = field(default_factory=list)
    off: list[float] = field(default_factory=list)

    def add(self, on: float, off: float) -> None:
        self.on.append(on)
        self.off.append(off)

    def __str__(self) -> str:
        """The median of the ratios; and the ratio of the fastest, which a machine of changing speed blurs less."""
        ratios = [on / off for on, off in zip(self.on, self.off, strict=True)]
        middle = f"{statistics.median(ratios):.3f} ± {spread(ratios):.3f}"
        return f"{middle} (fastest of each: {min(self.on) / min(self.off):.3f}; {len(ratios)} pairs)"


def plain(value: Any) -> Any:
    """What JSON has no form for."""
    return sorted(value) if isinstance(value, set) else vars(value)


def job_store() -> Any:
    """The key-value store of a job, kept outside of its ranks, as a launcher does."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def place_in_job(rank: int, world: int, port: int) -> dict[str, str]:
    """The environment of a rank of the job whose store listens on ``port``."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**place, "LOCAL_RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"}


# ---------------------------------------------------------------------- the disk, without anything in between


def settle(path: str) -> None:
    """Remove what a round has left, and wait for the disk: the next one must not pay for it."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.unlink(path)
    sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def fsync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


_buffer: mmap.mmap | None = None


def buffer() -> memoryview:
    """One page-aligned chunk of memory, always the same, that does not compress to nothing."""
    global _buffer
    if _buffer is None:
        _buffer = mmap.mmap(-1, CHUNK)
        _buffer[:] = os.urandom(CHUNK)
    return memoryview(_buffer)


def raw_write(path: str, size: int, *, direct: bool) -> float:
    """Seconds of a sequential write and fsync of ``size`` bytes to a new file."""
    chunk = buffer()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    size -= size % mmap.PAGESIZE
    began = time.perf_counter()
    fd = os.open(path, flags, 0o600)
    done = 0
    while done < size:
        done += os.write(fd, chunk[: min(CHUNK, size - done)])
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - began


def forget(path: str) -> None:
    """Drop a file, or the files of a folder, from the page cache."""
    paths = [path]
    if os.path.isdir(path):
        paths = [os.path.join(parent, name) for parent, _, names in os.walk(path) for name in names]
    for one in paths:
        fd = os.open(one, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


# ---------------------------------------------------------------------- a state


def transformer(size: int, frozen: float = 0.0) -> tuple[Any, Any]:
    """A transformer and its Adam: about ``size`` bytes in fp32, of which the share ``frozen`` never changes."""
    import torch

    width = 1024 if size * (1 - frozen) >= 128 << 20 else 256

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = torch.nn.LayerNorm(width)
            self.attention = torch.nn.Linear(width, 3 * width)
            self.out = torch.nn.Linear(width, width)
            self.between = torch.nn.LayerNorm(width)
            self.up = torch.nn.Linear(width, 4 * width)
            self.down = torch.nn.Linear(4 * width, width)

    a_block = 4 * (12 * width * width + 13 * width)
    trained = max(1, round(size * (1 - frozen) / (3 * a_block)))
    still = round(size * frozen / a_block)
    model = torch.nn.Sequential(*(Block() for _ in range(trained + still)))
    for block in model[trained:]:
        block.requires_grad_(False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class NoJournal:
    def record(self, event: str, /, **fields: Any) -> None:
        pass


class Saves:
    """The save of a run of one process: what the engine does at a boundary, without the engine."""

    def __init__(self, folder: str, model: Any, optimizer: Any, *, incremental: bool = False) -> None:
        from holdfast.engine.saving import Saver
        from holdfast.recorder.blackbox import BlackBox
        from holdfast.store.local import LocalBackend
        from holdfast.torch.loop import Loop
        from holdfast.torch.state import Objects

        self.backend = LocalBackend(folder)
        self.saver = Saver(
            backends=[self.backend], rank=0, world=1, run="bench", attempt=1, token="", keep=1000, journal=NoJournal()
        )
        objects = Objects({"model": model, "optimizer": optimizer}, 0, incremental=incremental)
        self.loop = Loop(objects, BlackBox(None, 0), 0, rescue=False)
        self.loop.saver = self.saver

    def stage(self) -> Any:
        """What training waits for at a periodic save."""
        return self.loop.files(live=False, at_boundary=True)

    def write(self, files: Any | None = None) -> Any:
        """Commit the next step: from live tensors, as just in time, or from staged files."""
        from holdfast.engine.saving import Save

        self.loop.step += 1
        save = Save(step=self.loop.step, reason="jit" if files is None else "periodic")
        files = files or self.loop.files(live=True, at_boundary=True)
        return self.saver.write(save, files, self.loop.size())
