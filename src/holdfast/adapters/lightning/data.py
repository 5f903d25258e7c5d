"""The data of a Lightning fit: passes over its loaders that another process can continue.

Lightning combines the loaders of a fit into one iterator and makes it anew for each epoch. Here the loaders inside it
are replaced by ones that are iterated through :class:`~holdfast.torch.data.batches.Batches`. The combination itself,
with its cycling and its limits, stays Lightning's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from holdfast.torch.data.batches import Batches
from holdfast.torch.data.workers import shield, workers_born_shielded

Spot = tuple[int, list[bool] | None, dict[str, Batches]]
"""Batches that were combined so far, which loaders had been used up by then, and what was open."""


class _Ahead(Batches):
    """Fetched one batch ahead, since the end of a pass of unknown length must be known in advance.

    The last batch that was fetched is not used yet at a step boundary: what came before it is.
    """

    def __next__(self) -> Any:
        super().mark()
        return super().__next__()

    def mark(self) -> Any:
        return self.last_mark


class Pass:
    """One pass over all loaders of a fit."""

    def __init__(self, combined: Any, modes: dict[str, Any], ahead: bool, position: dict[str, Any] | None) -> None:
        """``modes``: Lightning's table of iterators. ``ahead``: batches are fetched before they are needed."""
        self.mode = str(combined._mode)
        self.active: dict[str, Batches] = {}
        """By number, what is left of each loader."""
        self._ahead = ahead
        self._positions = dict(position["loaders"]) if position is not None else {}
        loaders = [_Loader(self, str(number), loader) for number, loader in enumerate(combined.flattened)]
        self.iterator = modes[self.mode]["iterator"](loaders, combined._limits)
        iter(self.iterator)
        if position is not None:
            self.iterator._idx = position["index"]
            if position["consumed"]:
                self.iterator._consumed = list(position["consumed"])
        self._positions.clear()

    def here(self) -> Spot:
        """Where the boundary is that was just marked. On the way of every step."""
        if len(self.active) == 1:
            return self.iterator._idx, None, self.active
        return self.iterator._idx, list(getattr(self.iterator, "_consumed", ())), dict(self.active)

    def position(self, spot: Spot) -> dict[str, Any]:
        """For :class:`Pass` of another process, which then begins at ``spot``, the last boundary that was marked."""
        index, consumed, active = spot
        return {
            "index": index - 1 if self._ahead and index else index,
            "consumed": consumed,
            "loaders": {name: batches.position() for name, batches in active.items()},
        }

    def open(self, name: str, loader: Any) -> Batches:
        """A loader is iterated from its start, or from where it was."""
        if name in self.active:
            self.active[name].close(keep_persistent=True)
        self.active[name] = (_Ahead if self._ahead else Batches)(loader, self._positions.pop(name, None))
        return self.active[name]

    def close(self, *, keep_persistent: bool = False) -> None:
        for batches in self.active.values():
            batches.close(keep_persistent=keep_persistent)


class _Loader:
    """A loader as Lightning's iterators see it."""

    def __init__(self, owner: Pass, name: str, loader: Any) -> None:
        self._owner = owner
        self._name = name
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self._owner.open(self._name, self._loader)

    def __len__(self) -> int:
        return len(self._loader)


class _ShieldedStart:
    """``worker_init_fn`` of workers that do not end by a SIGTERM that was sent to all processes of a job."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._owner = os.getpid()
        self._init = init

    def __call__(self, worker: int) -> None:
        shield(self._owner)
        if self._init is not None:
            self._init(worker)


@contextlib.contextmanager
def shielded(loaders: Sequence[Any]) -> Iterator[None]:
    """Workers that these loaders start inside do not die of a SIGTERM to the whole job: a validation needs them."""
    with contextlib.ExitStack() as stack:
        for loader in loaders:
            if type(loader) is DataLoader and loader.num_workers > 0:
                stack.enter_context(workers_born_shielded(loader))
                init = loader.worker_init_fn
                loader.worker_init_fn = _ShieldedStart(init)
                stack.callback(setattr, loader, "worker_init_fn", init)
        yield
