"""Datasets that are repeated after they are shuffled: each pass over what is shuffled draws a seed when it begins.

So to make as many iterators as an earlier attempt is not enough for the next one to yield the same: as much must be
read from them. Of a call of ``fit`` that was finished, that is put off until another one trains on the same data.
"""

from __future__ import annotations

import itertools
from typing import Any

_owed: list[tuple[Any, list[int]]] = []
"""Datasets of finished calls, and how many batches each iterator over them has yielded."""


def draws_while_read(dataset: Any) -> bool:
    """Whether something is repeated that is shuffled in another order each time."""
    return any("Repeat" in type(one).__name__ and _shuffles(one) for one in _chain(dataset))


def owe(dataset: Any, taken: list[int]) -> None:
    """What ``dataset`` has drawn in an earlier attempt is still to be drawn."""
    _owed.append((dataset, taken))


def settle(dataset: Any) -> None:
    """``dataset`` is about to be read: draw what others that shuffle the same have drawn before."""
    shuffles = {id(one) for one in _shuffles(dataset)}
    for debt in [debt for debt in _owed if any(id(one) in shuffles for one in _shuffles(debt[0]))]:
        _owed.remove(debt)
        earlier, taken = debt
        for count in taken:
            for _ in itertools.islice(iter(earlier), count):
                pass


def _shuffles(dataset: Any) -> list[Any]:
    return [one for one in _chain(dataset) if type(one).__name__ == "_ShuffleDataset"]


def _chain(dataset: Any) -> list[Any]:
    """The dataset and all that it is made of."""
    found, left = dict[int, Any](), [dataset]
    while left:
        one = left.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            left += one._inputs() if hasattr(one, "_inputs") else []
    return list(found.values())
