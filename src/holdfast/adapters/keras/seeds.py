"""Data that is shuffled without a seed: TensorFlow draws one from the system, and tells nobody.

A script that sets no seed is not reproducible, but its resumed run must still go on in the order of the epoch that was
interrupted, else some samples would be seen twice and others not at all. So here the seeds are drawn instead of by
TensorFlow, just as random, and remembered: those of ``Dataset.shuffle`` in the order in which datasets are made, and
those with which Keras shuffles arrays as one more stream of random numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.adapters.keras import random as keras_random
from holdfast.adapters.keras.scopes import SHUFFLES
from holdfast.adapters.keras.tensorflow import RANDOM_OPS
from holdfast.base.patching import PatchSet


class Seeds:
    """The seeds of datasets that the script shuffles without one, in the order in which it makes them."""

    def __init__(self, earlier: Callable[[], list[int]]) -> None:
        """``earlier``: finds those of the attempt that is to be resumed."""
        self._earlier = earlier
        self._known: list[int] | None = None
        self._used = 0

    def next(self) -> int:
        if self._known is None:
            self._known = self._earlier()
        if self._used == len(self._known):
            self._known.append(secrets.randbits(62) + 1)
        self._used += 1
        return self._known[self._used - 1]

    @property
    def used(self) -> list[int]:
        """Those that were handed out."""
        return (self._known or [])[: self._used]


class DatasetSeeds:
    """Lets datasets take their seeds from ``seeds``, where ``wanted``."""

    def __init__(self, seeds: Seeds, wanted: Callable[[], bool]) -> None:
        self._seeds = seeds
        self._wanted = wanted

    def seed_datasets(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        from tensorflow.python.eager import context

        def get_seed(seed: Any) -> Any:
            if seed is None and context.executing_eagerly() and not _is_seeded() and self._wanted():
                seed = self._seeds.next()
            return original(seed)

        return get_seed


def _is_seeded() -> bool:
    """Whether the script has called ``tf.random.set_seed`` or ``keras.utils.set_random_seed``."""
    from tensorflow.python.eager import context

    return context.global_seed() is not None


class RememberedShuffles:
    """Shuffles with a generator whose state is saved and restored."""

    def __init__(self, tensorflow: Any) -> None:
        self._tensorflow = tensorflow

    def shuffle_again(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def shuffle(value: Any, seed: Any = None, name: Any = None) -> Any:
            if seed is not None:
                return original(value, seed=seed, name=name)
            drawn = keras_random.shuffle_generator().make_seeds(1)[:, 0]
            return self._tensorflow.random.experimental.stateless_shuffle(value, seed=drawn)

        return shuffle


@contextlib.contextmanager
def remembered_shuffles(table: PatchSet) -> Iterator[None]:
    """Inside, what shuffles an array without a seed draws from a stream that is saved and restored."""
    module = sys.modules.get("tensorflow")
    if module is None or _is_seeded() or module.distribute.get_strategy().num_replicas_in_sync > 1:
        yield
        return
    with table.applied(SHUFFLES, RememberedShuffles(module), thread=True):
        yield


def worker_number() -> int:
    """Which worker this is, before TensorFlow knows."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    return 0


def doubts_of(dataset: Any) -> list[str]:
    """What a dataset does that no other process can repeat, in words."""
    found, left, seen = [], [dataset], set()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if type(one).__name__ == "_ShuffleDataset" and int(one._seed) == 0 and int(one._seed2) == 0:
            found.append(
                "a dataset is shuffled without a seed, so that its order is another one then: some samples of an epoch "
                "are seen twice and others not; call keras.utils.set_random_seed() first, or set HOLDFAST_ENABLED=1"
            )
        function = getattr(getattr(one, "_map_func", None), "function", None)
        if "Parallel" in type(one).__name__ and function is not None:
            ops = {operation.type for operation in function.graph.get_operations()} & RANDOM_OPS
            if ops:
                found.append(
                    f"a dataset draws random numbers in parallel ({', '.join(sorted(ops))}), in an order that no run "
                    f"repeats; map without num_parallel_calls, or use operations such as tf.random.stateless_uniform"
                )
        left += one._inputs() if hasattr(one, "_inputs") else []
    return found
