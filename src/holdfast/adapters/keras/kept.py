"""What a survivor needs to save a run of several workers: this rank's small state at its last boundaries, in memory
that outlives the process.

All workers hold the same weights, but each has running statistics, metrics and random numbers of its own, which a step
in flight changes before it fails for want of a peer. So at every boundary they are copied to a file in shared memory,
two boundaries in turn; beside it lies what changes only with a pass over the data.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from holdfast.adapters.keras import random as keras_random
from holdfast.adapters.keras import tensorflow as keras_tensorflow
from holdfast.adapters.keras.images import read_tree, write_tree
from holdfast.recorder.shared import lasting_map, leave, read_left, tell_of

EXCHANGED = "exchanged"
"""The variable that tells whether a step may have changed the weights."""
_HEADER = 4096
_MARKS = struct.Struct("@QQ")
_WORDS = 625
_NO_POSITION = 2**32 - 1
"""Instead of the position of NumPy's generator, where that is of another kind."""


class KeptState:
    """The last two steps of this rank, each as it was computed. :meth:`keep` is called once per step."""

    def __init__(self, path: str, variables: Mapping[str, Any]) -> None:
        self._path = path
        self._copies = _copies(variables)
        self._gather = _gatherer(list(self._copies.values()))
        self._layout = {name: (copy.dtype.as_numpy_dtype, tuple(copy.shape)) for name, copy in self._copies.items()}
        self._bytes = sum(_size(*kind) for kind in self._layout.values())
        self._slot = 4 * 2 * _WORDS + 32 + self._bytes
        self._memory = memoryview(lasting_map(f"{path}.kept", _HEADER + 2 * self._slot))
        self._marks = self._memory[: _MARKS.size].cast("Q")

    def keep(self, step: int) -> None:
        """``step`` is computed; the callbacks have not heard of it yet."""
        turn = step % 2
        self._marks[turn] = 0
        slot = self._memory[_HEADER + turn * self._slot : _HEADER + (turn + 1) * self._slot]
        _write_random(slot)
        slot[self._slot - self._bytes :] = self._gather()
        self._marks[turn] = step + 1  # last: until then it is no record

    def keep_random(self, step: int) -> None:
        """Callbacks may have drawn random numbers since."""
        turn = step % 2
        if self._marks[turn] == step + 1:
            self._marks[turn] = 0
            _write_random(self._memory[_HEADER + turn * self._slot :])
            self._marks[turn] = step + 1

    def keep_pass(self, tree: dict[str, Any]) -> None:
        """What does not change until the end of the pass."""
        try:
            leave(f"{self._path}.pass", write_tree(tree))
        except OSError as error:
            tell_of(error, self._path)

    def put_back(self, step: int) -> bool:
        """Make the variables and random numbers of this process those of the end of ``step`` again.

        False if that is not possible: it was not kept, or the weights, which are not, may have changed since.
        """
        found = read_kept(self._path, step, self._layout)
        if found is None:
            return False
        counted = f"{EXCHANGED}@0"
        if counted in self._copies and int(self._copies[counted].numpy()) != int(found["copies"][counted]):
            return False
        for name, copy in self._copies.items():
            copy.assign(found["copies"][name])
        keras_random.restore({**keras_random.capture(), **found["random"]})
        return True

    def of(self, path: str, step: int) -> dict[str, Any] | None:
        """What another rank of this machine, which trains the same model, has kept of ``step``."""
        found = read_kept(path, step, self._layout)
        try:
            base = read_tree(memoryview(bytearray(read_left(f"{path}.pass"))))
        except (OSError, ValueError, KeyError):
            return None
        if found is None:
            return None
        variables: dict[str, Any] = {}
        for name, value in found["copies"].items():
            variables.setdefault(name.rpartition("@")[0], []).append(value)
        plain = {name: values[0] if len(values) == 1 else values for name, values in variables.items()}
        return {**base, "random": found["random"], "variables": plain}

    def remove(self) -> None:
        for name in ("kept", "pass"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._path}.{name}")


def read_kept(path: str, step: int, layout: Mapping[str, tuple[Any, tuple[int, ...]]]) -> dict[str, Any] | None:
    """The record of ``step``; None if there is none."""
    try:
        data = memoryview(bytearray(read_left(f"{path}.kept")))
    except OSError:
        return None
    size = sum(_size(*kind) for kind in layout.values())
    slot = 4 * 2 * _WORDS + 32 + size
    if len(data) != _HEADER + 2 * slot or _MARKS.unpack_from(data)[step % 2] != step + 1:
        return None
    record = data[_HEADER + (step % 2) * slot : _HEADER + (step % 2 + 1) * slot]
    copies, offset = {}, slot - size
    for name, (dtype, shape) in layout.items():
        count = _size(dtype, shape)
        copies[name] = np.frombuffer(record[offset : offset + count], dtype=dtype).reshape(shape)
        offset += count
    return {"random": _read_random(record), "copies": copies}


def _size(dtype: Any, shape: tuple[int, ...]) -> int:
    return int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))


def _write_random(slot: memoryview) -> None:
    _, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    numbers = np.frombuffer(slot[: 4 * 2 * _WORDS], dtype=np.uint32)
    numbers[:_WORDS] = words
    known = legacy["bit_generator"] == "MT19937"
    if known:
        numbers[_WORDS : 2 * _WORDS - 1] = legacy["state"]["key"]
    numbers[2 * _WORDS - 1] = legacy["state"]["pos"] if known else _NO_POSITION
    spare = (float(legacy["gauss"]), float(legacy["has_gauss"])) if known else (0.0, 0.0)
    rest = (gauss or 0.0, float(gauss is not None), *spare)
    struct.pack_into("@dddd", slot, 4 * 2 * _WORDS, *rest)


def _read_random(record: memoryview) -> dict[str, Any]:
    numbers = np.frombuffer(record[: 4 * 2 * _WORDS], dtype=np.uint32)
    gauss, has_gauss, spare, has_spare = struct.unpack_from("@dddd", record, 4 * 2 * _WORDS)
    state: dict[str, Any] = {"python": {"version": 3, "words": numbers[:_WORDS], "gauss": gauss if has_gauss else None}}
    if numbers[-1] != _NO_POSITION:
        numpy = {"key": numbers[_WORDS : 2 * _WORDS - 1], "pos": int(numbers[-1]), "has_gauss": int(has_spare)}
        state["numpy"] = {**numpy, "gauss": spare}
    return state


def _copies(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Each copy of each variable in this process, as ``name@number``."""
    found = {}
    for name, variable in variables.items():
        for number, copy in enumerate(keras_tensorflow.replicas(variable) or [variable]):
            found[f"{name}@{number}"] = copy
    return dict(sorted(found.items(), key=lambda item: item[1].dtype.name))


def _gatherer(copies: list[Any]) -> Any:
    """Reads them all in one call; returns their bytes."""
    import tensorflow as tf

    def flat() -> Any:
        parts = []
        for dtype, group in itertools.groupby(copies, key=lambda copy: copy.dtype):
            values = tf.concat([tf.reshape(copy, [-1]) for copy in group], 0)
            parts.append(tf.cast(values, tf.uint8) if dtype == tf.bool else tf.bitcast(values, tf.uint8))
        return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)

    gather = tf.function(flat, autograph=False)
    return lambda: memoryview(gather().numpy())
