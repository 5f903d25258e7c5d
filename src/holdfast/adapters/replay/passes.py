"""The iterators that a script gets from its loaders: real ones that are watched, or those of a replay."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.utils.data import DataLoader

from holdfast.adapters.replay.loaders import kind_of
from holdfast.adapters.replay.loop import Followed, Pass
from holdfast.adapters.replay.nested import clone_batch
from holdfast.adapters.replay.trace import Trace
from holdfast.adapters.replay.views import plain_view
from holdfast.torch.data.batches import Batches
from holdfast.torch.data.workers import loader_like


class Guide(Protocol):
    """Who is told of the fetches of a script."""

    loop: Followed
    trace: Trace
    replaying: bool
    busy: bool
    fetched: bool

    def before_fetch(self, one: Pass) -> None: ...
    def after_end(self, one: Pass) -> None: ...
    def replayed_fetch(self, one: Watched) -> Any: ...


class Watched(Pass):
    """One pass over a loader, in the hands of the script."""

    def __init__(self, guide: Guide, loader: Any, number: int) -> None:
        super().__init__(loader, number)
        self.delivered = 0
        """Batches that a replay has handed out."""
        self._guide = guide
        self.reference: weakref.ref[Pass] = weakref.ref(self)

    def __del__(self) -> None:
        if not self.ended:
            self._guide.loop.forget(self)

    def __iter__(self) -> Watched:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def open(self, position: dict[str, Any] | None = None) -> None:
        """From now on batches are real."""
        guide = self._guide
        busy, guide.busy = guide.busy, True
        try:
            kind = kind_of(self.loader)
            self.batches = kind.batches(self.loader, position) if kind else Batches(plain_view(self.loader), position)
        finally:
            guide.busy = busy

    def __next__(self) -> Any:
        guide = self._guide
        if guide.replaying:
            batch = guide.replayed_fetch(self)
            if guide.replaying:
                return batch
        loop = guide.loop
        if loop.pending:
            guide.before_fetch(self)
        batches = self.batches
        assert batches is not None
        guide.busy = True
        try:
            batch = next(batches)
        except StopIteration:
            guide.after_end(self)
            raise
        finally:
            guide.busy = False
        guide.trace.fetch(self.number)
        self.last = batch
        loop.latest = self.reference
        if not loop.resting:
            guide.fetched = self.fresh = True
        if batches.delivered == 1:
            loop.leave_base()
        return batch


class Samples:
    """One batch of each loader, for a replay that only needs its shape."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._kept: list[Any] = []

    def of(self, loader: Any) -> Any:
        key = (id(loader.dataset), loader.batch_size, id(loader.collate_fn), id(type(loader)))
        if key not in self._known:
            self._kept.append((loader.dataset, loader.collate_fn))  # so that their ids stay theirs
            kind, batch = kind_of(loader), _first_batch(loader)
            self._known[key] = kind.batches.adapt(loader, batch) if kind else batch
        return clone_batch(self._known[key])


def _first_batch(loader: Any) -> Any:
    view = plain_view(loader)
    if type(view) is DataLoader and view.num_workers:
        # In a worker, since what it changes is the worker's, but in one alone, whose pass ends at once.
        alone = loader_like(view, DataLoader, {"num_workers": 1, "persistent_workers": False, "_iterator": None})
        batches = Batches(alone)
        try:
            return next(batches)
        except Exception:  # a dataset that wants all of its workers
            pass
        finally:
            batches.close()
    return next(iter(loader))
