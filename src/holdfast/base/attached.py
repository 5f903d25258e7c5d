"""Attributes of holdfast's own on objects of the user, which copies and pickles of these do not have.

An attribute lives as long as its owner, even where it refers back to it, which no dictionary keyed by the owner offers.
"""

from __future__ import annotations

import weakref
from types import NoneType
from typing import Any


class _Attached:
    """The value of one attribute. A copy of it, or what a pickle of it is read as, is None."""

    __slots__ = ("owner", "value")

    def __init__(self, owner: Any, value: Any) -> None:
        self.owner = weakref.ref(owner)
        self.value = value

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return NoneType, ()


def attach(owner: Any, name: str, value: Any) -> None:
    vars(owner)[name] = _Attached(owner, value)


def detach(owner: Any, name: str) -> None:
    vars(owner).pop(name, None)


def attached(owner: Any, name: str) -> Any:
    """The value that was attached to this very object, or None: a shallow copy shares the attributes of its model."""
    one = getattr(owner, "__dict__", {}).get(name)
    return one.value if isinstance(one, _Attached) and one.owner() is owner else None
