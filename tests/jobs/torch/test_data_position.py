"""A pass over a loader can be stopped at any batch and continued elsewhere, with the same batches and random numbers.

Every test trains: after each batch it draws from the process's random state, as dropout would, and
what it draws is compared too.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data._utils.pin_memory import pin_memory
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from holdfast.errors import StateError
from holdfast.torch import rng
from holdfast.torch.data.batches import Batches
from holdfast.torch.data.workers import Stamped

SIZE = 22
BATCHES = 11

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


# -- data -------------------------------------------------------------------------------------------


def draws() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(numpy.random.standard_normal())]


class Augmented(Dataset):
    """Each item holds random numbers of all three kinds, and the seed of the worker that made it."""

    def __init__(self) -> None:
        self.loaded = torch.zeros(SIZE, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded[index] += 1
        info = get_worker_info()
        seed = 0 if info is None else info.seed % 2**40
        return torch.tensor([index, seed, *draws()], dtype=torch.float64)


class Sometimes(Augmented):
    """Draws for one item in five, so that most batches carry no random state."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) if index % 5 == 0 else torch.full((5,), float(index), dtype=torch.float64)


class Together(Augmented):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] + 1000 for index in indices]


class Faulty(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        item = super().__getitem__(index)
        if index == 6:
            raise ValueError("item 6 cannot be read")
        return item


class Slow(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index > 0:
            threading.Event().wait(300)
        return super().__getitem__(index)


class Remembering(Augmented):
    """A map-style dataset with a state: how many items this copy of it has loaded."""

    count = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        return torch.cat([super().__getitem__(index), torch.tensor([float(self.count)])])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Stream(IterableDataset):
    """Items in an order drawn at the start of the pass, divided among the workers."""

    def order(self) -> list[int]:
        info = get_worker_info()
        mine = list(range(SIZE)) if info is None else list(range(info.id, SIZE, info.num_workers))
        random.shuffle(mine)
        return mine

    def item(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        numbers = draws() if info is not None else [0.0]
        return torch.tensor([index, *numbers], dtype=torch.float64)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in self.order():
            yield self.item(index)
        draws()  # after the last item: no batch tells


class StreamOfOwn(Stream):
    """Its own iterator, with a state."""

    def __iter__(self) -> StreamOfOwn:
        self.left = self.order()
        return self

    def __next__(self) -> torch.Tensor:
        if not self.left:
            raise StopIteration
        return self.item(self.left.pop())

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = list(state["left"])


class Cursor:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.left = stream, stream.order()

    def __iter__(self) -> Cursor:
        return self

    def __next__(self) -> torch.Tensor:
        if not self.left:
            raise StopIteration
        return self.stream.item(self.left.pop())

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = list(state["left"])


class StreamOfCursors(Stream):
    """Its iterators have a state."""

    def __iter__(self) -> Cursor:
        return Cursor(self)


class StreamWithBookmark(Stream):
    """The dataset has the state, its iterators are generators."""

    left: list[int] | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.left is None:
            self.left = self.order()
        while self.left:
            yield self.item(self.left.pop())
        self.left = None

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"] if state["left"] is None else list(state["left"])


class EagerShuffle(Sampler):
    """Draws its order in ``__iter__`` itself, from the process's random state."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE).tolist())

    def __len__(self) -> int:
        return SIZE


class PassCounter(Sampler):
    """Its order depends on a count that it keeps over the passes and tells as its state."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        first = 3 * self.passes
        for index in range(SIZE):
            yield (first + index) % SIZE
        self.passes += 1

    def __len__(self) -> int:
        return SIZE

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


class Subclass(DataLoader):
    pass


class StatefulSubclass(StatefulDataLoader):
    pass


class Shuffled:
    """A user's own iterable."""

    def __iter__(self) -> Iterator[int]:
        items = list(range(BATCHES))
        random.shuffle(items)
        return iter(items)


class Counting:
    """A user's own iterable with a state."""

    asked = 0

    def __init__(self) -> None:
        self.left: list[int] = []
        self.resumed = False

    def __iter__(self) -> Counting:
        if not self.resumed:
            self.left = list(range(BATCHES))
            random.shuffle(self.left)
        self.resumed = False
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop()

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left, self.resumed = list(state["left"]), True


def noisy_collate(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(items) + torch.rand(())


def reseeding(worker: int) -> None:
    info = get_worker_info()
    assert type(info.dataset) is Augmented
    info.dataset.note = worker
    random.seed(worker)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_own_generator(kind: type = DataLoader, **options: Any) -> Any:
    return kind(Augmented(), batch_size=2, shuffle=True, generator=seeded(5), **options)


def with_lazy_generator(**options: Any) -> Any:
    dataset = Augmented()
    sampler = RandomSampler(dataset, replacement=True, num_samples=100, generator=seeded(6))
    return DataLoader(dataset, batch_size=9, sampler=sampler, **options)


def with_batch_sampler(**options: Any) -> Any:
    sampler = BatchSampler(SubsetRandomSampler(range(SIZE), generator=seeded(7)), 2, drop_last=False)
    return DataLoader(Augmented(), batch_sampler=sampler, **options)


def distributed(sampler: type = DistributedSampler, kind: type = DataLoader, **options: Any) -> Any:
    dataset = Augmented()
    return kind(dataset, batch_size=1, sampler=sampler(dataset, num_replicas=2, rank=1), **options)


def sampled_by(sampler: Callable[[], Any], **options: Any) -> Any:
    return DataLoader(Augmented(), batch_size=2, sampler=sampler(), **options)


def augmented(kind: type = DataLoader, dataset: type = Augmented, **options: Any) -> Any:
    return kind(dataset(), **{"batch_size": 2, **options})


# -- training ---------------------------------------------------------------------------------------


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def begin_epoch(loader: Any, epoch: int) -> None:
    if hasattr(getattr(loader, "sampler", None), "set_epoch"):
        loader.sampler.set_epoch(epoch)


def train(batches: Any, steps: int | None = None, save: Callable[[Batches], None] | None = None) -> list[Any]:
    trace = []
    while steps is None or len(trace) < steps:
        if save is not None:
            save(batches)
        try:
            batch = next(batches)
        except StopIteration:
            break
        trace.append((plain(batch), draws()))
        if isinstance(batches, Batches):
            batches.mark()
    return trace


@functools.cache
def alone(make: Callable[[], Any], epochs: int) -> list[list[Any]]:
    """What a run sees in each epoch without holdfast."""
    seed_all(1)
    loader = make()
    traces = []
    for epoch in range(epochs):
        begin_epoch(loader, epoch)
        traces.append([*train(iter(loader)), draws()])
    return traces


@functools.cache
def whole_run(make: Callable[[], Any], epochs: int) -> tuple[list[list[Any]], dict[tuple[int, int], bytes]]:
    """What a run that is never stopped sees in each epoch, and the checkpoints it could be continued from."""
    seed_all(1)
    loader = make()
    traces, checkpoints = [], {}
    for epoch in range(epochs):
        begin_epoch(loader, epoch)

        def save(batches: Batches, epoch: int = epoch) -> None:
            checkpoints[epoch, batches.delivered] = dumped((batches.position(), rng.capture()))

        traces.append([*train(Batches(loader), save=save), draws()])
    return traces, checkpoints


def dumped(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    """By a reader that runs no code: only plain values and tensors come back."""
    return torch.load(io.BytesIO(data), weights_only=True)


def saved_and_loaded(value: Any) -> Any:
    return loaded(dumped(value))


def stop(make: Callable[[], Any], epoch: int, step: int, ahead: int = 0) -> tuple[Any, Any]:
    """Train until step ``step`` of epoch ``epoch``; what a checkpoint would hold of it."""
    seed_all(1)
    loader = make()
    for earlier in range(epoch):
        begin_epoch(loader, earlier)
        train(Batches(loader))
        draws()
    begin_epoch(loader, epoch)
    batches = Batches(loader)
    train(batches, step)
    state = rng.capture()
    for _ in range(ahead):
        next(batches, None)
    position = batches.position()
    batches.close()
    return saved_and_loaded(position), saved_and_loaded(state)


def continue_from(
    make: Callable[[], Any], epoch: int, epochs: int, position: Any, state: Any
) -> tuple[list[list[Any]], Any]:
    seed_all(77)
    draws()
    loader = make()
    traces = []
    for now in range(epoch, epochs):
        begin_epoch(loader, now)
        if now == epoch:
            batches = Batches(loader, position)
            rng.restore(state)
            assert batches.delivered == position["delivered"]
        else:
            batches = Batches(loader)
        traces.append([*train(batches), draws()])
    return traces, loader


def assert_continues(make: Callable[[], Any], epoch: int, step: int, epochs: int = 2) -> None:
    expected, checkpoints = whole_run(make, epochs)
    traces, _ = continue_from(make, epoch, epochs, *loaded(checkpoints[epoch, step]))
    assert traces == [expected[epoch][step:], *expected[epoch + 1 :]]


def workers_of(pid: int | None = None) -> list[psutil.Process]:
    trackers = ("resource_tracker", "forkserver")
    children = [child for child in psutil.Process(pid).children(recursive=True) if child not in _others]
    return [child for child in children if not any(word in " ".join(child.cmdline()) for word in trackers)]


_others: list[psutil.Process] = []
"""What other tests of this session have running."""


@pytest.fixture(autouse=True)
def _no_worker_is_left_behind() -> Iterator[None]:
    _others[:] = psutil.Process().children(recursive=True)
    yield
    if multiprocessing.active_children():  # those of a loader that the garbage collector has yet to find
        gc.collect()
    for process in multiprocessing.active_children():
        process.join(timeout=60)
    assert multiprocessing.active_children() == []


# -- tests ------------------------------------------------------------------------------------------

LOADERS: dict[str, Callable[[], Any]] = {
    "in order": partial(augmented, num_workers=2),
    "no workers": partial(augmented, shuffle=True),
    "three workers": partial(augmented, shuffle=True, num_workers=3),
    "few draws": partial(augmented, dataset=Sometimes, shuffle=True, num_workers=2),
    "persistent": partial(augmented, shuffle=True, num_workers=2, persistent_workers=True),
    "generator": partial(with_own_generator, num_workers=2),
    "generator, no workers": with_own_generator,
    "generator, persistent": partial(with_own_generator, num_workers=2, persistent_workers=True),
    "generator drawn along the way": with_lazy_generator,
    "generator drawn along the way, workers": partial(with_lazy_generator, num_workers=3),
    "weighted": partial(sampled_by, partial(WeightedRandomSampler, [1.0] * SIZE, SIZE), num_workers=2),
    "order drawn at once": partial(sampled_by, EagerShuffle, num_workers=2),
    "order drawn at once, persistent": partial(sampled_by, EagerShuffle, num_workers=2, persistent_workers=True),
    "order drawn at once, no workers": partial(sampled_by, EagerShuffle),
    "sampler with a state": partial(sampled_by, PassCounter, num_workers=2),
    "list as sampler": partial(sampled_by, partial(list, range(SIZE)), num_workers=2),
    "batch sampler": partial(with_batch_sampler, num_workers=2),
    "batch sampler, no workers": with_batch_sampler,
    "distributed": partial(distributed, num_workers=2),
    "distributed, no workers": distributed,
    "torchdata's distributed sampler": partial(distributed, StatefulDistributedSampler, num_workers=2),
    "no batches": partial(augmented, batch_size=None, shuffle=True, num_workers=3),
    "no batches, no workers": partial(augmented, batch_size=None, shuffle=True),
    "drop last": partial(augmented, batch_size=4, drop_last=True, shuffle=True, num_workers=2),
    "prefetch": partial(augmented, shuffle=True, num_workers=2, prefetch_factor=4),
    "pinned": partial(augmented, shuffle=True, num_workers=2, pin_memory=True),
    "any order": partial(augmented, shuffle=True, num_workers=2, in_order=False),
    "items together": partial(augmented, dataset=Together, shuffle=True, num_workers=2),
    "random collate": partial(augmented, shuffle=True, num_workers=2, collate_fn=noisy_collate),
    "seeds of its own": partial(augmented, shuffle=True, num_workers=2, worker_init_fn=reseeding),
    "stream": partial(augmented, dataset=Stream, num_workers=2),
    "stream, no workers": partial(augmented, dataset=Stream),
    "stream, persistent": partial(augmented, dataset=Stream, num_workers=2, persistent_workers=True),
    "stream, no batches": partial(augmented, dataset=Stream, num_workers=2, batch_size=None, persistent_workers=True),
    "stateful": partial(augmented, StatefulDataLoader, shuffle=True, num_workers=2),
    "stateful, no workers": partial(augmented, StatefulDataLoader, shuffle=True),
    "stateful, generator": partial(with_own_generator, StatefulDataLoader, num_workers=2, persistent_workers=True),
    "stateful, distributed": partial(distributed, StatefulDistributedSampler, StatefulDataLoader, num_workers=2),
    "stateful map": partial(augmented, StatefulDataLoader, Remembering, shuffle=True, num_workers=2),
    "stateful map, no workers": partial(augmented, StatefulDataLoader, Remembering, shuffle=True),
    "stateful map, persistent": partial(
        augmented, StatefulDataLoader, Remembering, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "stateful map, generator": lambda: StatefulDataLoader(
        Remembering(), batch_size=2, shuffle=True, generator=seeded(8)
    ),
    "stateful map, rare snapshots": partial(
        augmented, StatefulDataLoader, Remembering, shuffle=True, num_workers=2, snapshot_every_n_steps=4
    ),
    "stateful map, torch's sampler": lambda: StatefulDataLoader(
        Remembering(), batch_size=2, sampler=RandomSampler(range(SIZE)), num_workers=2
    ),
    "stateful stream": partial(augmented, StatefulDataLoader, StreamOfCursors, num_workers=2),
    "stateful stream, no workers": partial(augmented, StatefulDataLoader, StreamOfCursors),
    "stateful stream of its own": partial(augmented, StatefulDataLoader, StreamOfOwn, num_workers=2),
    "stateful stream with bookmark": partial(augmented, StatefulDataLoader, StreamWithBookmark, num_workers=2),
    "stateful stream, persistent": partial(
        augmented, StatefulDataLoader, StreamOfCursors, num_workers=2, persistent_workers=True
    ),
    "stateful loader, plain stream": partial(augmented, StatefulDataLoader, Stream, num_workers=2),
    "stateful loader, plain stream, persistent": partial(
        augmented, StatefulDataLoader, Stream, num_workers=2, persistent_workers=True
    ),
    "stateful loader, plain stream, no workers": partial(augmented, StatefulDataLoader, Stream),
    "subclass": partial(augmented, Subclass, shuffle=True, num_workers=2),
    "list": lambda: [torch.tensor([float(i)]) for i in range(BATCHES)],
    "own iterable": Shuffled,
    "own iterable with a state": Counting,
}
OUTLIVING = [name for name in LOADERS if "generator" in name or "persistent" in name]
"""Those with something that lives longer than one pass."""

AUGMENTED = {
    (shuffle, workers): partial(augmented, shuffle=shuffle, num_workers=workers)
    for shuffle in (False, True)
    for workers in (0, 1, 2, 3)
}


@pytest.mark.parametrize("name", sorted(LOADERS.keys() - {"any order"}))  # whose order is left to chance
def test_a_pass_delivers_what_the_loader_alone_delivers(name: str) -> None:
    epochs = 2 if name in OUTLIVING else 1
    assert whole_run(LOADERS[name], 2)[0][:epochs] == alone(LOADERS[name], epochs)


@pytest.mark.parametrize("step", [0, 1, 5, 10, 11])
@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pass_stopped_at_any_batch_continues_with_the_same_batches(shuffle: bool, workers: int, step: int) -> None:
    assert_continues(AUGMENTED[shuffle, workers], epoch=0, step=step, epochs=1)


@pytest.mark.parametrize("name", LOADERS)
def test_a_second_pass_that_is_stopped_continues(name: str) -> None:
    assert_continues(LOADERS[name], epoch=1, step=5)


@pytest.mark.parametrize("name", OUTLIVING)
def test_what_outlives_a_pass_is_in_its_place_for_the_pass_after_the_resume(name: str) -> None:
    assert_continues(LOADERS[name], epoch=0, step=4, epochs=2)


@pytest.mark.parametrize("step", [0, 1, 11])
@pytest.mark.parametrize(
    "name", ["persistent", "stream, persistent", "stateful map, persistent", "stateful stream, persistent"]
)
def test_workers_kept_from_an_earlier_pass_are_continued_wherever_the_stop_is(name: str, step: int) -> None:
    assert_continues(LOADERS[name], epoch=1, step=step)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_any_start_method_are_continued(method: str) -> None:
    make = partial(augmented, shuffle=True, num_workers=1, multiprocessing_context=method)
    expected, checkpoints = whole_run(AUGMENTED[True, 1], 1)
    traces, _ = continue_from(make, 0, 1, *loaded(checkpoints[0, 5]))
    assert traces == [expected[0][5:]]


@pytest.mark.parametrize(
    "name",
    [
        "no workers",
        "three workers",
        "persistent",
        "stream, persistent",
        "stateful map",
        "stateful stream",
        "stateful loader, plain stream",
        "stateful loader, plain stream, no workers",
        "own iterable with a state",
        "list",
    ],
)
def test_a_run_can_be_stopped_again_and_again(name: str) -> None:
    make = LOADERS[name]
    expected, checkpoints = whole_run(make, 2)
    position, state = loaded(checkpoints[1, 2])
    trace = []
    for steps in (3, 0, 20):
        seed_all(3)
        batches = Batches(make(), position)
        rng.restore(state)
        trace += train(batches, steps)
        position, state = saved_and_loaded((batches.position(), rng.capture()))
        batches.close()
    assert trace == expected[1][2:-1]


@pytest.mark.parametrize(
    "name",
    [
        "no workers",
        "three workers",
        "stream",
        "stateful map",
        "stateful map, no workers",
        "stateful stream, persistent",
        "own iterable with a state",
        "list",
    ],
)
@pytest.mark.parametrize("ahead", [1, 20])
def test_a_position_asked_for_late_is_that_of_the_marked_boundary(name: str, ahead: int) -> None:
    make = LOADERS[name]
    position, state = stop(make, epoch=1, step=4, ahead=ahead)
    traces, _ = continue_from(make, 1, 2, position, state)
    assert traces == [whole_run(make, 2)[0][1][4:]]


@pytest.mark.parametrize(
    "name",
    [
        "no workers",
        "persistent",
        "stream, persistent",
        "stateful map",
        "stateful stream, no workers",
        "stateful stream, persistent",
        "own iterable with a state",
        "list",
    ],
)
def test_a_position_asked_for_after_the_end_is_that_of_the_last_boundary(name: str) -> None:
    make = LOADERS[name]
    seed_all(1)
    batches = Batches(make())
    train(batches)
    position, state = saved_and_loaded((batches.position(), rng.capture()))
    batches.close()
    expected = whole_run(make, 2)[0]
    traces, _ = continue_from(make, 0, 2, position, state)
    assert traces == [expected[0][-1:], expected[1]]


@pytest.mark.parametrize(
    "name", ["no workers", "three workers", "persistent", "stream, persistent", "subclass", "list"]
)
def test_the_position_does_not_change_as_further_batches_are_fetched(name: str) -> None:
    batches = Batches(LOADERS[name]())
    train(batches, 3)
    before = dumped(batches.position())
    next(batches)
    from_thread: list[bytes] = []
    thread = threading.Thread(target=lambda: from_thread.append(dumped(batches.position())))
    thread.start()
    thread.join()
    for _ in batches:
        pass
    after = dumped(batches.position())
    batches.close()
    assert before == from_thread[0] == after == dumped(batches.position())


def test_a_state_is_asked_for_once_at_the_start_and_then_only_with_the_position() -> None:
    loader = Counting()
    batches = Batches(loader)
    train(batches)
    assert loader.asked == 1
    assert batches.position()["skip"] == BATCHES  # the pass is over: its own state would begin the next
    batches = Batches(loader)
    train(batches, 3)
    assert batches.position()["skip"] == 0
    next(batches)
    assert batches.position()["skip"] == 0
    assert batches.position()["delivered"] == 3
    batches.mark()
    next(batches)
    assert batches.position()["skip"] == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [2, None])
def test_batches_before_the_stop_are_not_loaded_again(workers: int, batch_size: int | None) -> None:
    make = partial(augmented, batch_size=batch_size, num_workers=workers, shuffle=True)
    step = 5
    position, state = stop(make, 0, step)
    traces, loader = continue_from(make, 0, 1, position, state)
    assert len(traces[0]) - 1 == len(loader) - step
    assert loader.dataset.loaded.sum().item() == SIZE - step * (batch_size or 1)


@pytest.mark.parametrize("name", ["persistent", "stream, persistent", "stateful map, persistent"])
@pytest.mark.parametrize("step", [0, 1, 4])
def test_workers_kept_from_a_pass_that_was_left_early_are_continued(name: str, step: int) -> None:
    make = LOADERS[name]

    def left_early(through: Callable[[Any], Any]) -> tuple[Any, Any]:
        seed_all(1)
        loader = make()
        train(through(loader), 3)
        return loader, through(loader)

    loader, iterator = left_early(iter)
    expected = [*train(iterator), draws()]
    del loader, iterator
    loader, batches = left_early(Batches)
    assert train(batches, step) == expected[:step]
    position, state = saved_and_loaded((batches.position(), rng.capture()))
    batches.close()
    del loader
    traces, _ = continue_from(make, 0, 1, position, state)
    assert traces[0] == expected[step:]


@pytest.mark.parametrize("name", ["persistent", "stream, persistent", "stateful map, persistent"])
def test_persistent_workers_stay_the_same_processes_over_the_passes(name: str) -> None:
    loader = LOADERS[name]()
    seen = []
    for steps in (None, 3, None):
        batches = Batches(loader)
        train(batches, steps)
        batches.close(keep_persistent=True)
        assert list(batches) == []
        seen.append({worker.pid for worker in workers_of()})
    assert len(seen[0]) == 2
    assert seen[0] == seen[1] == seen[2]
    batches.close()
    assert workers_of() == []


@pytest.mark.parametrize(
    "name", ["three workers", "persistent", "stream", "stateful map", "stateful stream, persistent"]
)
def test_close_in_the_middle_of_a_pass_leaves_no_worker(name: str) -> None:
    loader = LOADERS[name]()
    batches = Batches(loader)
    train(batches, 2)
    assert len(workers_of()) >= 2
    batches.close()
    assert workers_of() == []
    assert list(batches) == []


def test_close_does_not_wait_for_a_worker_that_is_busy() -> None:
    batches = Batches(augmented(dataset=Slow, batch_size=1, num_workers=2))
    next(batches)
    batches.close()
    assert workers_of() == []


def test_a_batch_that_cannot_be_loaded_counts_as_delivered() -> None:
    for workers in (0, 2):
        make = partial(augmented, dataset=Faulty, num_workers=workers)

        def past_the_fault(batches: Batches, steps: int) -> list[Any]:
            trace = train(batches, steps)
            with pytest.raises(ValueError, match="item 6"):
                next(batches)
            return trace

        seed_all(1)
        whole = Batches(make())
        expected = [past_the_fault(whole, 3), train(whole)][1]
        seed_all(1)
        batches = Batches(make())
        past_the_fault(batches, 3)
        train(batches, 2)
        assert batches.delivered == 6
        position, state = batches.position(), rng.capture()
        batches.close()
        assert continue_from(make, 0, 1, position, state)[0][0][:-1] == expected[2:]


def test_random_numbers_drawn_between_the_start_and_the_first_batch_are_no_matter() -> None:
    make = partial(augmented, shuffle=True)
    seed_all(1)
    batches = Batches(make())
    draws()
    trace = train(batches, 4)
    position, state = batches.position(), rng.capture()
    trace += train(batches)
    assert continue_from(make, 0, 1, position, state)[0][0][:-1] == trace[4:]


def test_pinning_reaches_the_batch_that_carries_a_random_state() -> None:
    class Pinnable:
        def pin_memory(self) -> str:
            return "pinned"

    stamped = pin_memory(Stamped(Pinnable(), 1, {"torch": b""}))
    assert (stamped.batch, stamped.worker, stamped.state) == ("pinned", 1, {"torch": b""})


def test_worker_code_finds_the_users_own_dataset() -> None:
    batches = Batches(augmented(num_workers=2, worker_init_fn=reseeding))  # which asserts it
    assert len(train(batches)) == len(batches) == BATCHES


def test_epoch_of_the_sampler_is_restored_with_the_position() -> None:
    loader = distributed()
    begin_epoch(loader, 3)
    batches = Batches(loader)
    train(batches, 2)
    other = distributed()
    Batches(other, batches.position())
    assert other.sampler.epoch == 3


def test_a_position_is_refused_by_a_loader_of_another_kind() -> None:
    position, _ = stop(LOADERS["list"], 0, 2)
    with pytest.raises(StateError, match="continued as 'replayed'"):
        Batches(augmented(), position)


def test_a_position_is_refused_by_a_loader_with_other_generators() -> None:
    position, _ = stop(with_own_generator, 0, 2)
    with pytest.raises(StateError, match="give generator="):
        Batches(augmented(shuffle=True), position)


def test_a_position_beyond_the_data_is_refused() -> None:
    position, _ = stop(LOADERS["list"], 0, 9)
    with pytest.raises(StateError, match="ends after 2 of the 9"):
        Batches([1, 2], position)


def test_another_number_of_workers_keeps_the_order_and_says_what_it_cannot_keep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    two, three = AUGMENTED[True, 2], AUGMENTED[True, 3]
    traces, checkpoints = whole_run(two, 1)
    position, state = loaded(checkpoints[0, 5])
    expected = traces[0][5:]
    with caplog.at_level(logging.WARNING, "holdfast"):
        traces, _ = continue_from(three, 0, 1, position, state)
    assert "num_workers was 2 when the position was saved and is 3" in caplog.text
    assert [[row[0] for row in batch] for batch, _ in traces[0][:-1]] == [
        [row[0] for row in batch] for batch, _ in expected[:-1]
    ]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("stream", "StatefulDataLoader avoids this"),
        ("list", "load_state_dict avoids this"),
        ("subclass", "a DataLoader"),
    ],
)
def test_a_replay_is_told_in_one_line(name: str, advice: str, caplog: pytest.LogCaptureFixture) -> None:
    position, _ = stop(LOADERS[name], 0, 2)
    with caplog.at_level(logging.INFO, "holdfast"):
        Batches(LOADERS[name](), position)
    assert len(caplog.records) == 1
    assert "discarding the batches before" in caplog.text
    assert advice in caplog.text


def test_what_cannot_be_exact_is_said_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class DrawsAlongTheWay(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            return (random.randrange(SIZE) for _ in range(SIZE))

    for workers in (0, 2):
        make = partial(sampled_by, partial(DrawsAlongTheWay, range(SIZE)), num_workers=workers)
        position, _ = stop(make, 0, 3)
        caplog.clear()
        Batches(make(), position)
        assert "the sampler draws from the process's random state" in caplog.text

    make = partial(augmented, StatefulSubclass, StreamOfCursors, num_workers=2)
    position, _ = stop(make, 0, 3)
    caplog.clear()
    Batches(make(), position)
    assert "leaves out the random state of its workers" in caplog.text


# -- processes --------------------------------------------------------------------------------------


@pytest.fixture
def start_script() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start this file as a program, in a process group of its own, of which nothing outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", __file__, *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_process_killed_in_its_second_pass_is_continued_by_another(
    start_script: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    name = "persistent"
    file = tmp_path / "position.pt"
    killed = start_script("until-killed", name, str(file))
    assert killed.stdout is not None
    assert killed.stdout.readline() == "saved\n"
    left = workers_of(killed.pid)
    killed.kill()
    killed.wait()
    position, state = torch.load(file, weights_only=True)
    traces, _ = continue_from(LOADERS[name], 1, 3, position, state)
    expected = alone(LOADERS[name], 3)
    assert traces == [expected[1][5:], expected[2]]
    _, alive = psutil.wait_procs(left, timeout=30)
    assert alive == []


def test_sigterm_to_every_process_leaves_the_workers_to_the_trainer(
    start_script: Callable[..., subprocess.Popen[str]],
) -> None:
    trainer = start_script("through-sigterm")
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "ready\n"
    workers = workers_of(trainer.pid)
    assert len(workers) == 2
    os.killpg(trainer.pid, signal.SIGTERM)
    rest = trainer.communicate(timeout=60)[0]
    assert rest == f"{BATCHES} batches after SIGTERM\n"
    # It exits with the workers of a second pass alive, whom multiprocessing then terminates.
    assert trainer.returncode == 0
    assert not any(worker.is_running() for worker in workers)


def test_overhead_per_batch_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    count = 100_000
    items = [None] * count

    def bare() -> None:
        for _ in iter(items):
            pass

    def marked() -> None:
        batches = Batches(items)
        for _ in batches:
            batches.mark()

    def unmarked() -> None:
        for _ in Batches(items):
            pass

    bare_s, fetched_s, marked_s = (
        min(timeit.repeat(run, number=1, repeat=5)) / count for run in (bare, unmarked, marked)
    )
    fetch, mark = (fetched_s - bare_s) * 1e6, (marked_s - fetched_s) * 1e6
    with capsys.disabled():
        print(f"\nnext: +{fetch:.3f} µs, mark: +{mark:.3f} µs over the loader's own")


def until_killed(name: str, file: str) -> None:
    position, state = stop(LOADERS[name], 1, 5)
    torch.save((position, state), file)
    batches = Batches(LOADERS[name]())
    train(batches, 5)
    print("saved", flush=True)
    signal.pause()


def through_sigterm() -> None:
    noticed = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: noticed.set())
    loader = LOADERS["persistent"]()
    batches = Batches(loader)
    print("ready", flush=True)
    while not noticed.wait(0.05):
        pass
    print(len(train(batches)), "batches after SIGTERM", flush=True)
    globals()["kept_alive"] = Batches(loader)


if __name__ == "__main__":
    {"until-killed": until_killed, "through-sigterm": through_sigterm}[sys.argv[1]](*sys.argv[2:])
