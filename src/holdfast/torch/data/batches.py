"""One pass over a loader that another process can continue at batch k, exactly.

:class:`Batches` delivers what the loader alone would, bit for bit, and after a stop the batches that
were still to come:

===========================================  ==============================================================
loader                                       how the pass is continued
===========================================  ==============================================================
``DataLoader``, map-style dataset            index lists are redrawn and the first k dropped: nothing is
                                             loaded twice; workers continue their random streams
``DataLoader``, ``IterableDataset``          the pass is replayed: k batches are loaded and discarded
``StatefulDataLoader`` (torchdata)           map-style without a state of its own: as ``DataLoader``; else
                                             by its ``state_dict``, with the workers' random state in it
other objects with ``state_dict`` and        by that state; if batches were fetched after the marked
``load_state_dict``                          boundary, by an earlier state and a replay from there
other ``DataLoader`` classes and iterables   the pass is replayed
===========================================  ==============================================================

Why redraw instead of saving indices: the order of a pass follows from the random state at its start,
which is small, and samplers need not cooperate.

Not exact, because no one can see the state in question:

- a sampler, or a dataset without workers, that draws from the process's random state *during* the
  pass to decide what comes next (a shuffle buffer, say): its draws alternate with the training's. A
  warning is logged. Give it a generator of its own, or a ``state_dict``.
- generators that a dataset keeps for itself in worker processes, instead of ``torch``, ``random`` and
  ``numpy.random``; a ``StatefulDataLoader`` and a ``state_dict`` of the dataset carry these.
- random numbers drawn in workers of a subclass of ``StatefulDataLoader``: its state leaves them out,
  and they restart from their seeds. A warning is logged.
- random numbers drawn in workers if ``num_workers`` changes. A warning is logged.
- what a worker drew for a batch that raised, until it delivers its next one.

``in_order=False`` is not followed: batches come in order, or there would be no k to continue at. Workers
of ``DataLoader`` and ``StatefulDataLoader`` themselves are shielded from SIGTERM; those of subclasses are not.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from holdfast.errors import StateError
from holdfast.torch import rng
from holdfast.torch.data.stateful import StandIn, has_state, is_stateful_dataloader
from holdfast.torch.data.workers import Line, RandomState, Stamped, discard, keep, kept, replaced, shut_down

logger = logging.getLogger(__name__)

_MOST_SAMPLERS = 16
"""Where the search for samplers within samplers ends: an object may make up every attribute it is asked for."""

Mark = tuple[int, list[RandomState | None]]
"""Batches delivered, and the random states of the workers after them."""


class Batches:
    """Iterates one pass of ``loader``, from its start or from ``position``.

    The iterator of the loader, with its workers, is made here and not at the first batch. To resume,
    construct with the position and *then* restore the random state that the process had at the step
    boundary: making the iterator, and skipping, draws random numbers, and nothing later does that an
    uninterrupted run would not.
    """

    delivered: int
    """Batches handed out in this pass, those before the resume included. One whose loading raised counts."""

    def __init__(self, loader: Iterable[Any], position: dict[str, Any] | None = None) -> None:
        self._loader = loader
        self._source = _open(loader, position)
        self.delivered = position["delivered"] if position else 0
        self._first: dict[str, Any] | None = position["first"] if position else None
        self.worker_rng = self._source.worker_rng
        self.last_mark: Mark = (self.delivered, self.worker_rng)
        self._intact = True
        self.fetch: Callable[[], Any] = self._source.next if self.delivered else self._fetch_first
        """The next batch, for a loop that has no time for :meth:`__next__`; then count it, and :meth:`unwrap` it."""

    def __iter__(self) -> Batches:
        return self

    def __len__(self) -> int:
        """Batches of the whole pass, where the loader knows."""
        return len(self._loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            batch = self.fetch()
        except StopIteration:
            self.end()
            raise
        except Exception:
            self.skip()
            raise
        self.delivered += 1
        return self.unwrap(batch) if type(batch) is Stamped else batch

    def _fetch_first(self) -> Any:
        # A loader without workers draws its order here, from the random state of this moment.
        self._first = rng.capture()
        self.fetch = self._source.next
        return self.fetch()

    def unwrap(self, batch: Stamped) -> Any:
        """The batch, and with it the random state of the worker that made it."""
        self.worker_rng = replaced(self.worker_rng, batch.worker, batch.state)
        return batch.batch

    def skip(self) -> None:
        """Loading a batch has raised: the loader is past it, and a caller that goes on gets the one after it."""
        self._intact = False
        self.delivered += 1

    def end(self) -> None:
        """There is no batch left."""
        self.fetch = _nothing
        if self._intact:
            self._intact = False
            self._source.ended(self.worker_rng)

    def mark(self) -> Mark:
        """This moment is a step boundary: :meth:`position` describes it until the next call."""
        self.last_mark = (self.delivered, self.worker_rng)
        return self.last_mark

    def position(self, mark: Mark | None = None) -> dict[str, Any]:
        """Where a mark, else the last one, or the start, is in this pass. Any thread may ask, at any time."""
        delivered, worker_rng = mark or self.last_mark
        return self._source.position(delivered, worker_rng, self._first if delivered else None)

    def pass_start(self) -> dict[str, Any]:
        """What :meth:`position` says of this pass, but for ``delivered``. To be called after the first batch."""
        delivered, worker_rng = self.last_mark
        return self._source.position(delivered, worker_rng, self._first)

    def close(self, *, keep_persistent: bool = False) -> None:
        """End the pass and its worker processes. :meth:`position` still answers.

        ``keep_persistent``: persistent workers stay for the loader's next pass, as DataLoader itself would keep them.
        """
        self.fetch = _nothing
        if not (keep_persistent and getattr(self._loader, "persistent_workers", False)):
            self._source.close()


def _nothing() -> NoReturn:
    raise StopIteration


def position_after(loader: Any, count: int) -> dict[str, Any]:
    """Where a pass of a ``DataLoader`` that begins now will be after ``count`` batches, of which none is loaded yet."""
    workers: list[RandomState | None] = [None] * loader.num_workers
    length = _length(loader.batch_sampler) if not isinstance(loader.dataset, IterableDataset) else None
    return {
        "kind": _Lined.kind,
        "delivered": count,
        "total": length,
        "start": _Start.capture(loader),
        "first": rng.capture(),
        "seed": None,
        "workers": workers,
    }


def _open(loader: Any, position: dict[str, Any] | None) -> _Lined | _Stateful | _Replayed:
    """The way to iterate this kind of loader."""
    plain = type(loader) is DataLoader and not isinstance(loader.dataset, IterDataPipe | MapDataPipe)
    if is_stateful_dataloader(loader):
        plain = not isinstance(loader.dataset, IterableDataset) and not has_state(loader.dataset)
    kind: type[_Lined] | type[_Stateful] | type[_Replayed] = _Replayed
    if plain:
        kind = _Lined
    elif has_state(loader):
        kind = _Stateful
    if position is not None and position["kind"] != kind.kind:
        raise StateError(
            f"the position was saved from a loader that is continued as {position['kind']!r}, but this one, a "
            f"{type(loader).__qualname__}, is continued as {kind.kind!r}: resume with the loader that was saved"
        )
    return kind(loader, position)


class _Start:
    """What the order of a pass follows from: the random states, and the samplers', before its iterator is made."""

    @staticmethod
    def capture(loader: Any) -> dict[str, Any]:
        return {
            "rng": rng.capture(),
            "generators": [generator.get_state() for generator in _generators(loader)],
            "samplers": [
                {
                    "epoch": sampler.epoch if _counts_epochs(sampler) else None,
                    "state": copy.deepcopy(sampler.state_dict()) if _tells_its_start(sampler) else None,
                }
                for sampler in _samplers(loader)
            ],
        }

    @staticmethod
    def restore(loader: Any, start: dict[str, Any], sampler_states: bool = True) -> None:
        samplers = _samplers(loader)
        if len(samplers) != len(start["samplers"]):
            raise StateError(
                f"the loader has {len(samplers)} samplers and had {len(start['samplers'])} when its position was "
                f"saved: resume with the same samplers"
            )
        for sampler, saved in zip(samplers, start["samplers"], strict=True):
            if saved["epoch"] is not None and _counts_epochs(sampler):
                sampler.set_epoch(saved["epoch"])
            if sampler_states and saved["state"] is not None:
                sampler.load_state_dict(copy.deepcopy(saved["state"]))
        _set_generators(loader, start["generators"])
        rng.restore(start["rng"])


def _samplers(loader: Any) -> list[Any]:
    """The samplers of ``loader``, outermost first, each once."""
    found: list[Any] = []
    pending = [loader]
    while pending and len(found) < _MOST_SAMPLERS:
        holder = pending.pop(0)
        for name in ("batch_sampler", "sampler"):
            sampler = getattr(holder, name, None)
            if sampler is not None and not any(sampler is known for known in found):
                found.append(sampler)
                pending.append(sampler)
    return found


def _generators(loader: Any) -> list[torch.Generator]:
    """The torch generators that ``loader`` and its samplers hold, each once."""
    found: dict[int, torch.Generator] = {}
    for holder in (loader, *_samplers(loader)):
        for value in getattr(holder, "__dict__", {}).values():
            if isinstance(value, torch.Generator):
                found[id(value)] = value
    return list(found.values())


def _set_generators(loader: Any, states: list[torch.Tensor]) -> None:
    generators = _generators(loader)
    if len(generators) != len(states):
        raise StateError(
            f"the loader and its samplers hold {len(generators)} generators and held {len(states)} when the position "
            f"was saved: give generator= as before"
        )
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _counts_epochs(sampler: Any) -> bool:
    return callable(getattr(sampler, "set_epoch", None)) and type(getattr(sampler, "epoch", None)) is int


def _tells_its_start(sampler: Any) -> bool:
    """Whether ``state_dict()``, before a pass, describes that pass: torchdata's sampler tells the end of the last."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader.sampler")
    return has_state(sampler) and not (
        torchdata is not None and isinstance(sampler, torchdata.StatefulDistributedSampler)
    )


def _say_replay(loader: Any, count: int, advice: str) -> None:
    if count:
        logger.info(
            "%s: continuing after batch %d by loading and discarding the batches before; %s avoids this",
            type(loader).__qualname__,
            count,
            advice,
        )


def _warn_if_moved(moved: bool, what: str) -> None:
    if moved:
        logger.warning(
            "%s draws from the process's random state during the pass. If these draws decide which items come next, "
            "the batches from here differ from those of an uninterrupted run: give it a generator of its own",
            what,
        )


class _Lined:
    """A DataLoader, iterated through a :class:`Line`."""

    kind = "loader"

    def __init__(self, loader: Any, position: dict[str, Any] | None) -> None:
        workers: int = loader.num_workers
        if workers > 0 and not getattr(loader, "in_order", True):
            logger.info("in_order=False is not followed: batches come in order, so that the pass can be continued")
        line: Line | None = kept(loader)
        seed: torch.Tensor | None = None
        delivered = 0
        if position is None:
            self._start = _Start.capture(loader)
            if line is None:
                line = Line(loader, [None] * workers)
            else:
                seed = line.indices.seed
        else:
            if line is not None:
                line.close()
            delivered, seed, self._start = position["delivered"], position["seed"], position["start"]
            line = Line(loader, _worker_states(position["workers"], workers))
            if seed is not None:
                line.reuse(seed)
            _Start.restore(loader, self._start)
        if line.persistent:
            keep(loader, line)
        self._loader = loader
        self._line = line
        self._seed = seed
        self._total = _length(line.indices) if line.by_index else None
        if position is not None and self._total != position["total"]:
            logger.warning(
                "the loader had %s batches when its position was saved and has %s: other data, or divided otherwise",
                position["total"],
                self._total,
            )

        iterator = line.iterate(skip=delivered)
        if delivered and (workers == 0 or not line.by_index):
            rng.restore(position["first"])  # type: ignore[index]
            if line.by_index:
                line.indices.moved = discard(line.indices.latest, delivered)
            else:
                _say_replay(loader, delivered, "torchdata's StatefulDataLoader")
                _warn_if_moved(discard(iterator, delivered) and workers == 0, "the dataset")
        _warn_if_moved(line.indices.moved, "the sampler")
        self.worker_rng = line.states
        self.next: Callable[[], Any] = iterator.__next__

    def position(
        self, delivered: int, worker_rng: list[RandomState | None], first: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "delivered": delivered,
            "total": self._total,
            "start": self._start,
            "first": first,
            "seed": self._seed,
            "workers": worker_rng,
        }

    def ended(self, worker_rng: list[RandomState | None]) -> None:
        self._line.settle(worker_rng)

    def close(self) -> None:
        if kept(self._loader) is self._line:
            keep(self._loader, None)
        self._line.close()


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _worker_states(saved: list[RandomState | None], workers: int) -> list[RandomState | None]:
    if len(saved) == workers:
        return saved
    if any(state is not None for state in saved):
        logger.warning(
            "num_workers was %d when the position was saved and is %d: the batches come in the same order, but random "
            "numbers drawn in workers are others",
            len(saved),
            workers,
        )
    return [None] * workers


class _Stateful:
    """A loader that tells and takes its own state, which may be too slow to ask for at every boundary."""

    kind = "stateful"
    worker_rng: list[RandomState | None]

    def __init__(self, loader: Any, position: dict[str, Any] | None) -> None:
        self._loader = loader
        self._stand_in = StandIn.of(loader, anew=position is not None)
        self._lock = threading.Lock()
        self._over = False
        self.worker_rng = []
        if position is None:
            self._fetched = 0
            self._start = _Start.capture(loader)
            self._iterator = self._stand_in.iterate()
            self._known = self._state_now()
            return
        self._fetched = position["delivered"]
        self._start = position["start"]
        skip = position["skip"]
        _Start.restore(loader, self._start, sampler_states=False)
        self._stand_in.loader.load_state_dict(copy.deepcopy(position["state"]))
        self._iterator = self._stand_in.iterate()
        _set_generators(loader, position["generators"])
        self._known = (self._fetched - skip, position["state"], position["generators"])
        if not self._stand_in.exact and getattr(loader, "num_workers", 0) > 0:
            logger.warning(
                "%s: its state leaves out the random state of its workers: numbers drawn there restart from their "
                "seeds. torchdata's StatefulDataLoader itself, or a DataLoader, is continued exactly",
                type(loader).__qualname__,
            )
        if skip:
            if position["first"] is not None:
                rng.restore(position["first"])
            _say_replay(loader, skip, "asking for its position at a step boundary")
            _warn_if_moved(discard(self._iterator, skip) and getattr(loader, "num_workers", 0) == 0, "the loader")

    def next(self) -> Any:
        with self._lock:
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._over = True
                raise
            except Exception:
                self._fetched += 1
                raise
            self._fetched += 1
            return batch

    def position(
        self, delivered: int, worker_rng: list[RandomState | None], first: dict[str, Any] | None
    ) -> dict[str, Any]:
        # The lock is not waited for: who holds it is fetching a further batch, perhaps for long, and
        # perhaps below us on this very thread, if a signal handler asks.
        if self._lock.acquire(blocking=False):
            try:
                if self._fetched == delivered and (not self._over or self._stand_in.exact):
                    self._known = self._state_now()
            finally:
                self._lock.release()
        known_at, state, generators = self._known
        return {
            "kind": self.kind,
            "delivered": max(delivered, known_at),
            "start": self._start,
            "first": first,
            "state": state,
            "generators": generators,
            "skip": max(delivered - known_at, 0),
        }

    def ended(self, worker_rng: list[RandomState | None]) -> None:
        pass

    def close(self) -> None:
        if kept(self._loader) is self._stand_in:
            keep(self._loader, None)
        self._stand_in.close()

    def _state_now(self) -> tuple[int, Any, list[torch.Tensor]]:
        state = copy.deepcopy(self._stand_in.state())
        return self._fetched, state, [generator.get_state() for generator in _generators(self._loader)]


class _Replayed:
    """Anything else that can be iterated."""

    kind = "replayed"
    worker_rng: list[RandomState | None]

    def __init__(self, loader: Any, position: dict[str, Any] | None) -> None:
        self.worker_rng = []
        self._start = position["start"] if position else _Start.capture(loader)
        if position is not None:
            _Start.restore(loader, self._start)
        iterator: Iterator[Any] = iter(loader)
        self._iterator = iterator
        if position is not None and position["delivered"]:
            rng.restore(position["first"])
            _say_replay(loader, position["delivered"], "a DataLoader, or a state_dict and load_state_dict")
            moved = discard(iterator, position["delivered"])
            _warn_if_moved(moved and getattr(loader, "num_workers", 0) == 0, "the loader")
        self.next: Callable[[], Any] = iterator.__next__

    def position(
        self, delivered: int, worker_rng: list[RandomState | None], first: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {"kind": self.kind, "delivered": delivered, "start": self._start, "first": first}

    def ended(self, worker_rng: list[RandomState | None]) -> None:
        pass

    def close(self) -> None:
        shut_down(self._iterator)
