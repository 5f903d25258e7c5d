"""The weights at the end of an epoch's batches, which callbacks may change before the next epoch begins.

Moving averages take their place for a validation, the best ones are put back, a learning rate is lowered. A stop in
a validation, or in an evaluation of a callback's own, must save what was there before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np


class Variables(Protocol):
    """The framework whose variables these are."""

    def in_weights(self, model: Any) -> list[Any]:
        """The variables that the weights file is written from."""

    def hold(self, variable: Any) -> Any:
        """The value of a variable now, as cheap as can be."""

    def read(self, variable: Any) -> Any: ...

    def write(self, variable: Any, value: Any) -> None: ...


class HeldWeights:
    """The values of a model's variables and of its optimizers', at one moment."""

    def __init__(self, framework: Variables, model: Any) -> None:
        self._framework = framework
        self._values = [(variable, framework.hold(variable)) for variable in framework.in_weights(model)]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While the block runs, the variables have these values."""
        now: list[tuple[Any, Any]] = []
        try:
            for variable, held in self._values:
                value, then = self._framework.read(variable), _plain(held)
                if not _same(value, then):
                    now.append((variable, value))
                    self._framework.write(variable, then)
            yield
        finally:
            for variable, value in now:
                self._framework.write(variable, value)


def _plain(held: Any) -> Any:
    if isinstance(held, list):
        return [_plain(one) for one in held]
    return held if isinstance(held, np.ndarray) else held.numpy()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return all(_same(*pair) for pair in zip(one, other, strict=True))
    return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
