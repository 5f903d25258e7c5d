"""The batches of a Trainer's loader, which another process can continue exactly.

accelerate's loader fetches one batch ahead of the one that it yields. So at a step boundary the batch after the last
one that was trained on has been loaded already, from the random state of that earlier moment. A pass is therefore
continued one fetch before the boundary: the random state of that fetch is put back for it, and then that of the
boundary. Between the two nothing else draws.

The Trainer skips batches by itself on resume, but that is exact only where nothing draws random numbers but the
training: not with a dataset that augments, in the process or in loader workers, and not with a sampler that draws its
order from the process's random state, such as ``group_by_length`` after the first epoch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.base.attached import attach, attached, detach
from holdfast.recorder.blackbox import BlackBox, read_box
from holdfast.recorder.boxes import BOUNDARY
from holdfast.torch import rng
from holdfast.torch.data.batches import Batches, Mark, position_after
from holdfast.torch.data.workers import loader_like

_OPEN = "_holdfast_open"
"""Attribute of a DataLoader: what opens a pass over it instead of its own ``__iter__``."""
AHEAD = 3
"""Fetches to remember besides those of a step: one ahead of the step, one that is under way, one to spare."""


class FetchLog:
    """The process's random state before each of the last fetches. Kept in shared memory, like the black box."""

    def __init__(self, path: str | None, rank: int, count: int) -> None:
        self._boxes = [BlackBox(None if path is None else _box(path, index), rank) for index in range(count)]

    def note(self, passes: int, delivered: int) -> None:
        self._boxes[delivered % len(self._boxes)].note(BOUNDARY, 0, 0, passes, delivered)

    def at(self, passes: int, delivered: int) -> dict[str, Any] | None:
        """The random state before the fetch of the batch after ``delivered``; None if it is not known any more."""
        return _find(self._boxes[delivered % len(self._boxes)].records(), passes, delivered)

    def remove(self) -> None:
        for box in self._boxes:
            box.remove()


def _box(path: str, index: int) -> str:
    return f"{path}.fetch-{index}"


def _find(records: Any, passes: int, delivered: int) -> dict[str, Any] | None:
    found = [record.random for record in records if (record.passes, record.delivered) == (passes, delivered)]
    return found[-1] if found else None


def fetch_of(path: str, passes: int, delivered: int) -> dict[str, Any] | None:
    """The same of another process, whose black box is at ``path``."""
    index = 0
    while os.path.exists(_box(path, index)):
        with contextlib.suppress(OSError, ValueError):
            if (found := _find(read_box(_box(path, index))[2], passes, delivered)) is not None:
                return found
        index += 1
    return None


class Feed:
    """One pass over the loader, from its start or from a position: what accelerate's loader iterates."""

    def __init__(self, batches: Batches, passes: int, log: FetchLog | None, remembered: int) -> None:
        self.delivered = batches.delivered
        """Batches that the training had used at the last step boundary, of the whole pass."""
        self._batches = batches
        self._passes = passes
        self._log = log
        self._marks: deque[Mark] = deque(maxlen=remembered)
        self._fetch = batches.__next__
        self._prime: tuple[dict[str, Any] | None, dict[str, Any]] | None = None

    def prime(self, before: dict[str, Any] | None, after: dict[str, Any]) -> None:
        """The random states to put back before, if known, and after the first fetch."""
        self._prime = (before, after)

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        self._marks.append(self._batches.mark())
        if self._prime is not None:
            return self._first()
        if self._log is not None:
            self._log.note(self._passes, self._batches.delivered)
        return self._fetch()

    def _first(self) -> Any:
        assert self._prime is not None
        (before, after), self._prime = self._prime, None
        try:
            if before is not None:
                rng.restore(before)
            if self._log is not None:
                self._log.note(self._passes, self._batches.delivered)
            return self._fetch()
        finally:
            rng.restore(after)

    def settle(self, used: int) -> Mark | None:
        """A step boundary, with ``used`` batches of the pass trained on: what :meth:`position` needs to tell it."""
        self.delivered = used
        for mark in reversed(self._marks):
            if mark[0] == used:
                return mark
        return self._batches.mark() if self._batches.delivered == used else None

    def position(self, mark: Mark) -> dict[str, Any]:
        """The boundary, and the random state of the fetch that comes first."""
        ahead = self._batches.delivered > mark[0]
        before = self._log.at(self._passes, mark[0]) if ahead and self._log is not None else None
        return {**self._batches.position(mark), "fetch_random": before}

    def pass_start(self) -> dict[str, Any]:
        return self._batches.pass_start()

    def close(self, *, keep_persistent: bool = False) -> None:
        self._batches.close(keep_persistent=keep_persistent)


class Feeder:
    """Stands between accelerate's loader and the DataLoader inside it. Feeds are opened by whoever iterates."""

    def __init__(self, loader: Any, on_open: Callable[[Feeder], Feed]) -> None:
        """``on_open(feeder)`` makes the :class:`Feed` of each pass."""
        self.plain: Any = _plain(loader)
        """The loader as holdfast iterates it: same dataset, same samplers."""
        self._on_open = on_open
        _settle_generators(self.plain)
        _divert(loader, self._open)

    @property
    def in_process(self) -> bool:
        """Whether batches are made by this process, from its random state."""
        return bool(self.plain.num_workers == 0)

    def _open(self) -> Iterator[Any]:
        feed: Iterator[Any] = self._on_open(self)
        return feed

    def after(self, count: int) -> dict[str, Any]:
        """The position after ``count`` batches of a pass that begins now."""
        return {**position_after(self.plain, count), "fetch_random": None}

    @staticmethod
    def fits(loader: Any) -> bool:
        """Whether the position in this loader can be told and taken up again here.

        accelerate's dispatching loader, for iterable datasets, completes the last batch with samples of the first one
        that it saw: it must skip by itself, as the Trainer lets it do.
        """
        base = getattr(loader, "base_dataloader", loader)
        if type(base) is not DataLoader or type(loader).__name__ == "DataLoaderDispatcher":
            return False
        return loader is not base or not isinstance(base.dataset, IterableDataset)


def iterate(original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """``DataLoader.__iter__`` while a Trainer trains; accelerate's loaders call it by name."""

    def __iter__(self: Any) -> Iterator[Any]:
        open_pass = attached(self, _OPEN)
        return original(self) if open_pass is None else open_pass()

    return __iter__


def _divert(loader: Any, open_pass: Callable[[], Iterator[Any]]) -> None:
    """Let whoever iterates ``loader``, or the loader that accelerate made of it, get what ``open_pass`` returns."""
    attach(getattr(loader, "base_dataloader", loader), _OPEN, open_pass)


def _plain(loader: Any) -> Any:
    """A loader like the one that the script made, which is not diverted."""
    plain = loader_like(getattr(loader, "base_dataloader", loader), DataLoader, {})
    detach(plain, _OPEN)
    return plain


def shield_workers(loader: Any) -> Any:
    """Let the worker processes of ``loader`` outlive a SIGTERM to the whole job.

    DataLoader raises in the main thread, wherever that is, when a worker dies: in the middle of a save, too.
    """
    base = getattr(loader, "base_dataloader", loader)
    if type(base) is DataLoader and base.num_workers > 0 and attached(base, _OPEN) is None:
        plain = _plain(loader)
        _divert(loader, lambda: Batches(plain))
    return loader


def calm() -> Any:
    """From here on this process leaves: that a child of it dies is no news any more. Returns the handler before."""
    if threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return None


def _settle_generators(loader: Any) -> None:
    """accelerate's sampler makes its generator when it is first used, and seeds it at each use: make it now.

    What the order of a pass follows from then has the same shape in every pass.
    """
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None:
        if type(sampler).__name__ == "SeedableRandomSampler" and sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(sampler.initial_seed)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
