"""The data of a Keras 3 ``fit``: which batches are done, and how another process comes to the same place.

A dataset is read again rather than saved: the order of its batches follows from its seeds, from how many iterators
were made of it before, and from the random numbers that were there when the pass began. So a resumed run makes as many
iterators, begins the pass with the same random numbers, and drops the batches that are done.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.adapters.keras import random as keras_random
from holdfast.adapters.keras import repeats
from holdfast.adapters.keras.fit import Fit
from holdfast.adapters.keras.scopes import DATA, DATASET, EVALUATION
from holdfast.base.patching import PatchSet


class EpochData:
    """The iterator over training data of one call of ``fit``."""

    _make: Callable[[], Any]
    """The iterator's own ``_get_iterator``."""
    _enumerate: Callable[[], Iterator[Any]]

    def __init__(self, fit: Fit, iterator: Any, table: PatchSet, *, creates_seeds: bool) -> None:
        """``creates_seeds``: to make an iterator changes what the next one yields."""
        self.iterator = iterator
        self._fit = fit
        self._creates_seeds = creates_seeds
        self._created = 0
        self._consumed = 0
        """Batches taken from the iterator that was made last."""
        self._random = keras_random.capture()
        """When that iterator was made."""
        self._used = 0
        """Iterators before it of which anything was taken."""
        self._taken: list[int] = []
        """Batches taken from each of the iterators."""
        self._at_epoch: dict[str, Any] = {"created": 0, "used": 0, "carried": None, "random": self._random, "hooks": 0}
        if creates_seeds and self.users_dataset() is not None:
            repeats.settle(self.users_dataset())
        table.begin(DATA, self, to=iterator)
        self.hooks = EpochHooks(iterator.data_adapter, table)

    def follow_iterator(self, original: Callable[[], Any]) -> Callable[[], Any]:
        self._make = original
        return self._made

    def follow_steps(self, original: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
        self._enumerate = original
        return self._followed

    def total(self) -> int | None:
        batches: int | None = self.iterator.num_batches
        return batches

    def specification(self) -> Any:
        """The shapes and types of a batch, as TensorFlow knows them without reading one."""
        return self.iterator._distributed_dataset.element_spec

    def users_dataset(self) -> Any:
        """A dataset that the script has made; None if it was Keras."""
        adapter = self.iterator.data_adapter
        return adapter.get_tf_dataset() if type(adapter).__name__ == "TFDatasetAdapter" else None

    def position(self) -> dict[str, Any]:
        return {
            **self._at_epoch,
            "pass_random": self._random,
            "batches": self.iterator._num_batches,
            "closed": self.iterator._current_iterator is None,
            "created_in_all": self._created,
            "taken": list(self._taken),
            "hook_calls": self.hooks.calls,
        }

    def _made(self) -> Any:
        self._created += 1
        self._used += int(self._consumed > 0)
        self._consumed = 0
        self._taken.append(0)
        self._random = keras_random.capture()
        return self._make()

    def _take(self, count: int) -> None:
        self._consumed += count
        self._taken[-1] += count

    # ------------------------------------------------------------------ training

    def _followed(self) -> Iterator[Any]:
        """The batches of an epoch, with the boundary between each two."""
        fit, run = self._fit, self._fit.run
        if not fit.began:
            for item in self._enumerate():  # Keras looks at a batch to build the model
                self._taken[-1] += 1
                yield item
            return
        if fit.position is not None:
            items = self._gone_on(fit.position)
            fit.position = None
        else:
            self._note_epoch()
            items = self._enumerate()
        engine, report_every = run.engine, run.settings.progress_every
        count = 0
        for begin, end, batches in items:
            if report_every and run.step % report_every < count:
                run.host.poke()
            count = self._count(begin, end)
            fit.in_flight = count
            run.pending = False
            if run.step >= engine.next_stop:
                run.at_boundary()
            fit.told = fit.fetched = False
            run.in_step = True
            if run.frozen:
                run.wait_while_frozen()
            yield begin, end, batches
            run.in_step = False
            self._take(count)
            fit.complete(count)
        if run.step >= engine.next_stop:
            run.at_boundary()
        fit.end_pass()

    def _count(self, begin: int, end: int) -> int:
        total = self.total()
        return end - begin + 1 if total is None else min(end + 1, max(total, begin + 1)) - begin

    def end_epoch(self) -> None:
        """From here on the position is the beginning of the next epoch."""
        self._note_epoch()

    def _note_epoch(self) -> None:
        iterator = self.iterator
        carried = iterator.steps_per_epoch is not None and iterator._current_iterator is not None
        self._at_epoch = {
            "created": self._created,
            "used": self._used + int(self._consumed > 0 and not carried),
            "carried": self._consumed if carried else None,
            "random": self._random,
            "hooks": len(self.hooks.calls),
        }

    # ------------------------------------------------------------------ going on

    def _gone_on(self, position: dict[str, Any]) -> Iterator[Any]:
        """What is left of the epoch that was interrupted."""
        iterator, saved, done = self.iterator, position["data"], position["batch"]
        now = keras_random.capture()
        iterator._num_batches = saved["batches"]
        self.hooks.repeat(saved["hook_calls"], saved["hooks"])
        if self._make_again(saved["created"], saved["used"], saved["carried"], saved["random"], saved.get("taken", [])):
            iterator._steps_seen = saved["carried"]
        elif done:
            keras_random.restore(saved["pass_random"])
        self._at_epoch = {name: saved[name] for name in self._at_epoch}
        inner, left = self._enumerate(), done
        while left:
            begin, end, batches = next(inner)
            count = min(end - begin + 1, left)
            self._drop(batches, count)
            left -= count
        streams = self._drawn() if done or saved["carried"] else frozenset()
        if position["over"] and not saved["closed"]:
            for _ in inner:  # to the end of the epoch, of which nothing is left
                pass
        if done:
            self._fit.apply(random_streams=streams)
        else:
            keras_random.restore({name: value for name, value in now.items() if name not in streams})
        yield from inner

    def _make_again(self, created: int, used: int, carried: int | None, random: Any, taken: list[int]) -> bool:
        """As many iterators as there were when the epoch began; True if the last of them is in use still."""
        iterator = self.iterator
        current = None
        self._use_again(used)
        draws = self._creates_seeds and repeats.draws_while_read(self.users_dataset())
        while self._created < created:
            last = self._created == created - 1
            if last and carried is not None:
                keras_random.restore(random)
            if self._creates_seeds or (last and carried is not None):
                current = iter(iterator._get_iterator())
                if draws and not (last and carried is not None):
                    self._drop(current, taken[self._created - 1] if len(taken) >= self._created else 0)
            else:
                self._created += 1
        if carried is None:
            return False
        iterator._current_iterator = current
        self._drop(current, carried)
        return True

    def _use_again(self, used: int) -> None:
        """Other backends than TensorFlow make an iterator of its datasets only when something is taken from it."""
        dataset = getattr(self.iterator.data_adapter, "_dataset", None)
        while not self._creates_seeds and dataset is not None and self._used < used:
            self._used += 1
            iter(dataset)

    def _drop(self, batches: Any, count: int) -> None:
        for _ in itertools.islice(batches, count):
            pass
        self._take(count)

    def _drawn(self) -> frozenset[str]:
        """The random streams that the data draws from while it is read, in TensorFlow's own threads.

        Those are as far as the data is: what was saved of them is how far another reader had read ahead.
        """
        if not self._creates_seeds:
            return frozenset()
        adapter, shuffled = self.iterator.data_adapter, 0
        if getattr(adapter, "py_dataset", None) is not None and adapter.shuffle and adapter.enqueuer is None:
            shuffled = adapter.num_batches or 0  # Keras' own shuffle comes once, when the pass begins
        return keras_random.drawn_since(self._random, shuffled)

    def repeat_all(self, saved: dict[str, Any]) -> None:
        """All of a fit that is not trained again has been read: the next one finds the data as it left it."""
        self.hooks.repeat(saved["hook_calls"], len(saved["hook_calls"]))
        self._use_again(saved["used"])
        if self._creates_seeds and repeats.draws_while_read(self.users_dataset()):
            repeats.owe(self.users_dataset(), saved.get("taken", [])[self._created :])
            return
        while self._created < saved["created_in_all"]:
            if self._creates_seeds:
                iter(self.iterator._get_iterator())
            else:
                self._created += 1


class EpochHooks:
    """What a dataset of the user's own does between epochs, such as to shuffle its indices: it is done again on resume.

    The random numbers before each call are kept, so that it does the same.
    """

    def __init__(self, adapter: Any, table: PatchSet) -> None:
        self.calls: list[dict[str, Any]] = []
        self._again: list[dict[str, Any]] = []
        self._adapter = adapter
        self._dataset = getattr(adapter, "py_dataset", None) or getattr(adapter, "_keras_sequence", None)
        if self._dataset is not None:
            table.begin(DATASET, self, to=adapter)

    def on_epoch_begin(self, original: Callable[[], None]) -> Callable[[], None]:
        return self._noted("on_epoch_begin", original)

    def on_epoch_end(self, original: Callable[[], None]) -> Callable[[], None]:
        return self._noted("on_epoch_end", original)

    def _noted(self, name: str, original: Callable[[], None]) -> Callable[[], None]:
        if not _overridden(self._dataset, name):
            return original

        def hook() -> None:
            number = len(self.calls)
            if number < len(self._again):
                keras_random.restore(self._again[number]["random"])
            self.calls.append({"hook": name, "random": keras_random.capture()})
            original()

        return hook

    def repeat(self, calls: list[dict[str, Any]], until: int) -> None:
        """Make the calls of an earlier attempt up to the given one; those after it, when they come, draw the same."""
        self._again = calls
        while len(self.calls) < until:
            getattr(self._adapter, calls[len(self.calls)]["hook"])()


def _overridden(dataset: Any, name: str) -> bool:
    for base in type(dataset).__mro__:
        if name in vars(base):
            return not base.__module__.startswith(("keras.", "tf_keras."))
    return False


class Evaluation:
    """Validation: a notice need not wait for its end, and its data is read in the same order on resume."""

    def __init__(self, fit: Fit, iterator: Any, table: PatchSet, *, creates_seeds: bool) -> None:
        self._fit = fit
        self._iterator = iterator
        self._creates_seeds = creates_seeds
        self._made_any = False
        table.begin(EVALUATION, self, to=iterator)

    def follow_iterator(self, original: Callable[[], Any]) -> Callable[[], Any]:
        fit = self._fit

        def made() -> Any:
            if getattr(fit.model, "_eval_epoch_iterator", None) is self._iterator:
                for _ in range(fit.evaluations if self._creates_seeds and not self._made_any else 0):
                    iter(original())
                self._made_any = True
                fit.evaluations += 1
            return original()

        return made

    def follow_steps(self, original: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
        def followed() -> Iterator[Any]:
            for item in original():
                self._fit.check_in_between()
                yield item

        return followed
