"""What a notice is, and what brings one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Notice:
    """Word that this process, node or job will be stopped."""

    source: str
    """Who said it: ``signal``, ``file``, ``aws``, ``gcp``, ``azure``, ``peer``."""
    detail: str
    """What exactly was said, for people: ``SIGTERM``, a path, the cloud's answer."""
    at: float
    """When it came, on the monotonic clock."""
    wall: float
    """The same moment in seconds since the epoch."""
    grace_s: float | None = None
    """Seconds from ``at`` to the kill, where the source tells; None: the setting ``grace_period`` decides."""


Deliver = Callable[[Notice], None]


class NoticeSource(Protocol):
    """Listens for one kind of notice. ``deliver`` is called on a thread of the source, never in a signal handler."""

    def start(self, deliver: Deliver) -> None: ...

    def stop(self) -> None: ...
