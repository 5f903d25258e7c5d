"""Who looks after the training in this process. Adapters may nest (a framework's loop is a PyTorch loop too): the
outermost one that knows what a step is has claimed it, and the others keep still."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_claims: list[str] = []


def claimed_by() -> str | None:
    """The adapter in charge, or None."""
    return _claims[0] if _claims else None


@contextlib.contextmanager
def claim(name: str) -> Iterator[bool]:
    """While the block runs, ``name`` asks to be in charge. Yields whether it is."""
    _claims.append(name)
    try:
        yield len(_claims) == 1
    finally:
        _claims.remove(name)
