"""What surrounds this process, for whichever adapter trains in it.

A worker of Ray hears of more than signals, and must not end its own process: Ray would take that for a
failure. Who knows that is the adapter of Ray; who trains may be another. So the one says it here, and the
host of the other asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.engine.engine import Engine
from holdfast.notice import NoticeSource


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a host takes from its surroundings. The default: a process of its own."""

    sources: Callable[[], Sequence[NoticeSource]] = tuple
    """Makes the sources of notices that every training in this process listens to."""
    leave: Callable[[int], None] | None = None
    """How this process is ended, with an exit code, where its training thread is stuck; None: at once."""
    started: Callable[[Engine], None] = lambda engine: None
    """Told of every training that begins in this process."""
    at_exit: Callable[[Callable[[], None]], object] | None = None
    """Takes what a training that outlives its function does when nothing trains here any more; None: the process ends
    then, and it is done at its exit."""
    replayed: Callable[[], None] = lambda: None
    """Told when a loop that was replayed is where it was saved: all ranks are then at their points of one step."""


_current = Surroundings()


def surroundings() -> Surroundings:
    return _current


def surround(new: Surroundings) -> None:
    """Say what surrounds this process, before anything trains in it."""
    global _current
    _current = new
