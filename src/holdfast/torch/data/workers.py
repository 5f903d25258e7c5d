"""What a DataLoader's worker processes run, so that another process can continue them at batch k.

Guarantees, for the copy of a loader that :class:`Line` makes and iterates instead of the user's:

- Its batches are those of the user's loader, bit for bit: same seeds, same batch on the same worker.
- The random stream of each worker (torch, ``random``, NumPy's legacy generator) is known as of every
  batch that was delivered: a worker whose stream moved sends the state along with the batch. What was
  prefetched and not delivered does not count.
- SIGTERM does not end a worker, unless the process that owns it sent it. A scheduler signals every
  process of a job; a worker that died of it would raise in the trainer, in the middle of its save.
- A worker ends when its owner does, even when it was killed.

Why a copy: the index lists to skip must never reach a worker, and the workers' side of the user's
loader has no place for a random state. Only the dataset, ``collate_fn``, ``worker_init_fn`` and the
index sampler of the copy are ours; DataLoader's own code does the rest.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import repeat
from multiprocessing import forkserver, resource_tracker
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from holdfast.base.attached import attach, attached, detach
from holdfast.errors import StateError

_ORPHAN_CHECK_S = 5.0
"""How often a worker looks whether its parent is alive, and how long it then leaves to DataLoader's own watchdog."""

_SETTLE_S = 0.01
"""How long threads of torch may take to leave Python after a collective."""

_CLOSE_GRACE_S = 1.0
"""How long a worker may take to finish its batch once the pass is closed."""

_KEPT = "_holdfast_kept"

RandomState = dict[str, Any]


def random_state() -> RandomState:
    """The process's random streams on the CPU, as plain values and bytes that are cheap to compare and to send."""
    version, words, gauss = random.getstate()
    state: RandomState = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": array("I", words).tobytes(),
        "python_version": version,
        "python_gauss": gauss,
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        legacy = numpy.random.get_state(legacy=False)
        if legacy["bit_generator"] == "MT19937":
            state["numpy"] = legacy["state"]["key"].tobytes()
            state["numpy_pos"] = int(legacy["state"]["pos"])
            state["numpy_has_gauss"] = int(legacy["has_gauss"])
            state["numpy_gauss"] = float(legacy["gauss"])
    return state


def restore_random_state(state: RandomState) -> None:
    """Continue the streams of :func:`random_state`."""
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    words = array("I", state["python"])
    random.setstate((state["python_version"], tuple(words), state["python_gauss"]))
    if "numpy" in state:
        import numpy

        numpy.random.set_state(
            {
                "bit_generator": "MT19937",
                "state": {"key": numpy.frombuffer(state["numpy"], dtype="uint32"), "pos": state["numpy_pos"]},
                "has_gauss": state["numpy_has_gauss"],
                "gauss": state["numpy_gauss"],
            }
        )


class Stamped:
    """A batch together with the random state of the worker that made it, right after it was made."""

    __slots__ = ("batch", "state", "worker")

    def __init__(self, batch: Any, worker: int, state: RandomState) -> None:
        self.batch = batch
        self.worker = worker
        self.state = state

    def pin_memory(self) -> Stamped:
        from torch.utils.data._utils.pin_memory import pin_memory

        return Stamped(pin_memory(self.batch), self.worker, self.state)


class Report:
    """Stands in place of an index list: the worker loads nothing and answers with its random state."""


class WorkerSide:
    """``worker_init_fn`` and ``collate_fn`` of the copy. One object per loader, a copy of it in each worker."""

    def __init__(self, loader: Any, states: list[RandomState | None], stamps: bool) -> None:
        self.dataset = loader.dataset
        self.states = states
        self.reporting = False
        self._owner = os.getpid()
        self._user_init: Callable[[int], None] | None = loader.worker_init_fn
        self._user_collate: Callable[[Any], Any] = loader.collate_fn
        self._stamps = stamps
        self._worker = -1
        self._sent: RandomState = {}

    def start(self, worker: int) -> None:
        shield(self._owner)
        # The user's code finds its own dataset here, to read and to set attributes of, not our shell.
        object.__setattr__(get_worker_info(), "dataset", self.dataset)
        if self._user_init is not None:
            self._user_init(worker)
        state = self.states[worker]
        if state is not None:
            restore_random_state(state)
        self._worker = worker
        self._sent = random_state()

    def collate(self, data: Any) -> Any:
        first = data[0] if type(data) is list and data else data
        if type(first) is Report:
            self.reporting = False
            self._sent = random_state()
            return Stamped(None, self._worker, self._sent)
        batch = self._user_collate(data)
        if not self._stamps:
            return batch
        state = random_state()
        if state == self._sent:
            return batch
        self._sent = state
        return Stamped(batch, self._worker, state)


class MapShell:
    """A map-style dataset that answers :class:`Report` without loading anything."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return index if type(index) is Report else self.dataset[index]

    def __getitems__(self, indices: Any) -> Any:
        if type(indices) is Report:
            return indices
        together = getattr(self.dataset, "__getitems__", None)
        if together:
            return together(indices)
        dataset = self.dataset
        return [dataset[index] for index in indices]


class IterableShell:
    """An iterable dataset whose workers, before each pass but their first, answer once with their random state.

    Workers that are kept between passes begin a pass with the random state that the last one left,
    and how far that went is known to the worker alone: what it draws after its last batch, or for
    batches that are prefetched and thrown away, never reaches the owner.
    """

    def __init__(self, dataset: Any, side: WorkerSide) -> None:
        self.dataset = dataset
        self.first_pass_is_empty = False
        self._side = side
        self._passes = 0

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        if self._passes > 1:
            self._side.reporting = True
            return self._reported()
        return iter(()) if self.first_pass_is_empty else iter(self.dataset)

    def _reported(self) -> Iterator[Any]:
        while self._side.reporting:  # one fetch asks batch_size times; collate, which ends it, clears the flag
            yield Report()
        yield from self.dataset


def shield(owner: int) -> None:
    """Take SIGTERM from ``owner`` alone, and die with the parent.

    The signal stays blocked and a thread waits for it, as only a waiter learns who sent it. From the
    owner it is DataLoader's or multiprocessing's own ``terminate``, which waits for the end and would
    wait forever were it ignored. Programs that the dataset starts inherit the blocked signal: end those
    with ``kill``. Python's fork server is not shielded, and its workers go with it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_guard, args=(owner, os.getppid()), name="holdfast-shield", daemon=True).start()


def _guard(owner: int, parent: int) -> None:
    while True:
        received = signal.sigtimedwait({signal.SIGTERM}, _ORPHAN_CHECK_S)
        if received is not None and received.si_pid == owner:
            os._exit(0)
        if os.getppid() != parent:
            # DataLoader's watchdog ends the worker too, but then waits until the queue is flushed into a
            # pipe that nobody reads, and whose reading end the workers themselves hold open.
            time.sleep(_ORPHAN_CHECK_S)
            os._exit(1)


@contextlib.contextmanager
def workers_born_shielded(loader: Any) -> Iterator[None]:
    """Workers started inside have SIGTERM blocked from birth, until :func:`shield` waits for it.

    Where none is to be started, the signal is let through. The helpers of ``spawn`` and ``forkserver``
    are started before: the tracker would unblock the signal for us, and the server would hand the
    blocked mask on to processes that are not ours.
    """
    if loader.num_workers == 0 or (loader.persistent_workers and loader._iterator is not None):
        yield
        return
    method = (loader.multiprocessing_context or torch.multiprocessing).get_start_method()
    if method != "fork":
        resource_tracker.ensure_running()
    elif sys.version_info < (3, 12) and torch.distributed.is_available() and torch.distributed.is_initialized():
        # A thread from outside of Python that just enters it, as torch's may after a collective, holds the lock of the
        # list of threads for an instant. A child that is forked then waits for it forever: Python renews it too late.
        time.sleep(_SETTLE_S)
    if method == "forkserver":
        forkserver.ensure_running()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


class Indices:
    """The copy's index sampler: the user's, less the first ``skip`` lists, after ``reports`` times :class:`Report`."""

    def __init__(self, inner: Any, generator: Any) -> None:
        self.inner = inner
        self.skip = 0
        self.reports = 0
        self.empty = False
        self.seed: torch.Tensor | None = None
        """State of the generator at the moment when DataLoader drew the seed of its workers."""
        self.latest: Iterator[Any] = iter(())
        self.moved = False
        """Whether index lists after the first drew from the process's random state as they were skipped."""
        self._generator = torch.default_generator if generator is None else generator

    def __iter__(self) -> Iterator[Any]:
        if self.empty:
            return iter(())
        self.latest = iter(self.inner)
        if self.seed is None:
            # DataLoader asks for this iterator first and draws the seed next.
            self.seed = self._generator.get_state()
        return self._continued(self.latest) if self.skip or self.reports else self.latest

    def __len__(self) -> int:
        return len(self.inner)

    def _continued(self, lists: Iterator[Any]) -> Iterator[Any]:
        yield from repeat(Report(), self.reports)
        self.moved = discard(lists, self.skip)
        yield from lists


def discard(items: Iterator[Any], count: int) -> bool:
    """Take ``count`` items; True if those after the first drew from the process's random state.

    The first is left out because what is drawn once, as a pass begins, is drawn again identically;
    later draws alternate with the training's own, which are not repeated here.
    """
    before: RandomState | None = None
    for taken in range(count):
        try:
            next(items)
        except StopIteration:
            raise StateError(
                f"the data ends after {taken} of the {count} batches or items that were delivered before the stop: the "
                f"dataset is another one, or a sampler's state_dict() at the start of a pass is not that of its start"
            ) from None
        before = before or random_state()
    return before is not None and random_state() != before


class Line:
    """A copy of a user's DataLoader, with its workers, for one pass or, where those are persistent, for several."""

    def __init__(self, loader: Any, states: list[RandomState | None]) -> None:
        self.workers: int = loader.num_workers
        self.persistent: bool = loader.persistent_workers and loader.num_workers > 0
        self.states = states
        """Each worker's random state as the pass begins; None: that of a worker just started."""
        self.by_index = not isinstance(loader.dataset, IterableDataset)
        self.indices = Indices(
            loader.batch_sampler if loader.batch_sampler is not None else loader.sampler, loader.generator
        )
        self.settled = True
        """Whether ``states`` is what the workers have, so that they need not report it."""
        self.begun = False
        self._iterator: Any = None
        self._user_generator = loader.generator
        self._shell: IterableShell | None = None

        changes: dict[str, Any] = {"_iterator": None}
        changes["sampler" if loader.batch_sampler is None else "batch_sampler"] = self.indices
        if self.workers > 0:
            side = WorkerSide(loader, states, stamps=self.by_index)
            changes.update(collate_fn=side.collate, worker_init_fn=side.start, in_order=True)
            if self.by_index:
                changes["dataset"] = MapShell(loader.dataset)
            else:
                changes["dataset"] = self._shell = IterableShell(loader.dataset, side)
        self._loader = loader_like(loader, DataLoader, changes)

    def reuse(self, seed: torch.Tensor) -> None:
        """Make the workers those of an earlier pass: seeded then, from ``seed``, and taking no draw from this one."""
        vars(self._loader)["generator"] = torch.Generator()
        self._loader.generator.set_state(seed)
        if self.persistent:
            self.indices.empty = True
            if self._shell is not None:
                self._shell.first_pass_is_empty = True
            self._iterate()
            self.indices.empty = False
            vars(self._loader)["generator"] = self._user_generator
            self.begun = True
        self.indices.seed = seed

    def iterate(self, skip: int = 0) -> Iterator[Any]:
        """Begin a pass, without its first ``skip`` batches where index lists decide what these are."""
        # Batch i belongs to worker i % workers, and reports keep it so: a whole round where the workers
        # must tell their states, and then one for each worker before that of batch `skip`. They are
        # consumed here, so that the sampler is as many lists ahead as in a run that never stopped.
        reports = 0
        if self.workers > 0 and self.by_index:
            reports = skip % self.workers + (0 if self.settled else self.workers)
            self.indices.skip = skip
            self.indices.reports = reports
        elif self.workers > 0 and self.begun:
            reports = self.workers
        self.begun = True
        self.settled = False
        iterator = self._iterate()
        for _ in range(reports):
            answer = next(iterator)
            self.states = replaced(self.states, answer.worker, answer.state)
        return iterator

    def settle(self, states: list[RandomState | None]) -> None:
        """The pass went to its end without an error, and these are the workers' states."""
        if self.by_index:
            self.states = states
            self.settled = True

    def close(self) -> None:
        shut_down(self._iterator)
        self._iterator = None
        vars(self._loader)["_iterator"] = None

    def _iterate(self) -> Iterator[Any]:
        with workers_born_shielded(self._loader):
            self._iterator = iter(self._loader)
        iterator: Iterator[Any] = self._iterator
        return iterator


def shut_down(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator, if it has any, also those that are busy.

    DataLoader waits five seconds for each before it terminates them, too long within a grace period;
    yet none may die before its pinning thread has left the queue, where half a message would hold it
    forever. So it begins, and the slow ones are terminated a moment later.
    """
    workers = getattr(iterator, "_workers", ())
    if not workers:
        return
    slow = threading.Timer(_CLOSE_GRACE_S, lambda: [worker.terminate() for worker in workers])
    slow.start()
    try:
        iterator._shutdown_workers()
    finally:
        slow.cancel()
    for worker in workers:
        worker.join(_CLOSE_GRACE_S)


def replaced(states: list[RandomState | None], worker: int, state: RandomState) -> list[RandomState | None]:
    """A new list, so that whoever remembered the old one, at a step boundary, keeps the old states."""
    return [*states[:worker], state, *states[worker + 1 :]]


def kept(loader: Any) -> Any:
    """What :func:`keep` left, or None."""
    return attached(loader, _KEPT)


def keep(loader: Any, holder: Any) -> None:
    """Let ``holder``, with its persistent workers, live as long as the user's loader, and be found by its next pass.

    An attribute, as DataLoader keeps its own: a dictionary keyed by the loader would hold it forever
    if ``collate_fn`` or the dataset refers to it.
    """
    if holder is None:
        detach(loader, _KEPT)
    else:
        attach(loader, _KEPT, holder)


def loader_like(loader: Any, kind: type, changes: dict[str, Any]) -> Any:
    """A ``kind`` of loader with the attributes of ``loader`` and ``changes``, which DataLoader would refuse to set."""
    like: Any = object.__new__(kind)
    vars(like).update(vars(loader), **changes)
    detach(like, _KEPT)
    return like
