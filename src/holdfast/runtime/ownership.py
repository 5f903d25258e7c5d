"""Who looks after the training in this process. Adapters may nest (a framework's loop is a PyTorch loop too): the
outermost one that knows what a step is has claimed it, and the others keep still."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FrameType

_claims: list[str] = []
_left_alone: list[str] = []
_told: list[Callable[[], None]] = []


def claimed_by() -> str | None:
    """The adapter in charge, or None."""
    return _claims[0] if _claims else None


def tell_of_claims(callback: Callable[[], None]) -> None:
    """``callback`` is called when somebody asks to be in charge: whoever only waits for a loop to begin can let go."""
    _told.append(callback)


def tell_no_more(callback: Callable[[], None]) -> None:
    if callback in _told:
        _told.remove(callback)


def leave_alone(module: str) -> None:
    """Nobody protects a loop that a function of this module runs: its own adapter is inactive, and has said so."""
    _left_alone.append(module)


def is_left_alone(frame: FrameType | None) -> bool:
    """True if ``frame``, or one that has called it, runs code of a module that is left alone."""
    while _left_alone and frame is not None:
        if frame.f_globals.get("__name__") in _left_alone:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def claim(name: str) -> Iterator[bool]:
    """While the block runs, ``name`` asks to be in charge. Yields whether it is."""
    _claims.append(name)
    try:
        for callback in list(_told):
            callback()
        yield len(_claims) == 1
    finally:
        _claims.remove(name)
