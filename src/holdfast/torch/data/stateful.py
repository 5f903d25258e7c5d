"""What torchdata's StatefulDataLoader leaves out of its state, put into it.

Its ``state_dict`` holds the samplers' state, the seed of the workers and the states of dataset and
iterator in each worker, but not the workers' random streams: a worker of a resumed run would draw
again from its seed on. For iterables without a state of their own it counts batches to fetch again,
and counts them twice when it is resumed a second time.

So a copy of the loader is iterated, whose dataset is wrapped: the wrapper tells torchdata a state that
holds the dataset's own together with the random state of the process it is in, and takes it back.
Without workers the process's random state is the caller's to save, and is left out. States are copied:
torchdata sends on only what differs from the state before, and finds a list that was changed in place
equal to itself.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from holdfast.torch.data.workers import (
    MapShell,
    RandomState,
    WorkerSide,
    discard,
    keep,
    kept,
    loader_like,
    random_state,
    restore_random_state,
    shut_down,
    workers_born_shielded,
)


def has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_stateful_dataloader(loader: Any) -> bool:
    """Whether it is torchdata's class itself, over a dataset proper: a subclass may do anything with its dataset."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    if torchdata is None or type(loader) is not torchdata.StatefulDataLoader:
        return False
    return not isinstance(loader.dataset, IterDataPipe | MapDataPipe)


class StandIn:
    """What is iterated for a loader with a state: a copy if it is a StatefulDataLoader, else the loader itself."""

    def __init__(self, loader: Any) -> None:
        self.exact = is_stateful_dataloader(loader)
        """Whether the state holds all there is, and can be asked for after the end of the pass."""
        self.loader = loader
        self._iterator: Any = None
        if not self.exact:
            return
        changes: dict[str, Any] = {"_iterator": None, "in_order": True}
        workers: int = loader.num_workers
        if isinstance(loader.dataset, IterableDataset):
            shell = StatefulIterableShell if has_state(loader.dataset) else StreamShell
            changes["dataset"] = shell(loader.dataset, in_worker=workers > 0)
        elif workers > 0:
            changes["dataset"] = StatefulMapShell(loader.dataset)
        if workers > 0:
            changes["worker_init_fn"] = WorkerSide(loader, [None] * workers, stamps=False).start
        self.loader = loader_like(loader, type(loader), changes)

    @classmethod
    def of(cls, loader: Any, anew: bool) -> StandIn:
        """The one that keeps the persistent workers of ``loader``, unless ``anew``."""
        if not is_stateful_dataloader(loader) or not loader.persistent_workers:
            return cls(loader)
        found: StandIn | None = kept(loader)
        if found is not None:
            if not anew:
                return found
            found.close()
        stand_in = cls(loader)
        keep(loader, stand_in)
        return stand_in

    def iterate(self) -> Iterator[Any]:
        with workers_born_shielded(self.loader) if self.exact else contextlib.nullcontext():
            self._iterator = iter(self.loader)
        iterator: Iterator[Any] = self._iterator
        return iterator

    def state(self) -> Any:
        state = self.loader.state_dict()
        if self.exact:
            # A finished iterator's state begins the next pass. This pass, at its end, is what is continued.
            state = {**state, "_iterator_finished": False}
        return state

    def close(self) -> None:
        shut_down(self._iterator)


class StatefulMapShell(MapShell):
    """A map-style dataset in a worker, whose state includes the worker's random streams."""

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": copy.deepcopy(self.dataset.state_dict()), "random": random_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state["dataset"])
        restore_random_state(state["random"])


class StreamShell:
    """An iterable dataset whose iterators have a state."""

    def __init__(self, dataset: Any, in_worker: bool) -> None:
        self.dataset = dataset
        self.is_its_own_iterator = False
        self.in_worker = in_worker

    def __iter__(self) -> Stream:
        return Stream(self)


class StatefulIterableShell(StreamShell):
    """The same for a dataset that has a state; one that is its own iterator tells it there, once."""

    def state_dict(self) -> dict[str, Any]:
        return {} if self.is_its_own_iterator else {"dataset": copy.deepcopy(self.dataset.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "dataset" in state:
            self.dataset.load_state_dict(state["dataset"])


class Stream:
    """One pass over an iterable dataset: continued by its iterator's state, by its dataset's, or by skipping items."""

    def __init__(self, shell: StreamShell) -> None:
        self._shell = shell
        self._taken = 0
        self._begun: RandomState | None = random_state() if shell.in_worker else None
        self._items = self._begin()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self._taken += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"taken": self._taken}
        if has_state(self._items):
            state["items"] = copy.deepcopy(self._items.state_dict())  # type: ignore[attr-defined]
        if self._begun is not None:
            state["begun"] = self._begun
            state["random"] = random_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "items" in state:
            self._items.load_state_dict(state["items"])  # type: ignore[attr-defined]
        elif not has_state(self._shell.dataset):
            if self._begun is not None:
                restore_random_state(state["begun"])
                self._items = self._begin()
            discard(self._items, state["taken"])
        self._taken = state["taken"]
        if self._begun is not None:
            self._begun = state["begun"]
            restore_random_state(state["random"])

    def _begin(self) -> Iterator[Any]:
        items: Iterator[Any] = iter(self._shell.dataset)
        self._shell.is_its_own_iterator = items is self._shell.dataset
        return items
