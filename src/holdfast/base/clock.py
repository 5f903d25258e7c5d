"""Time, so that tests can supply their own, and the arithmetic of a deadline.

Durations are measured on the monotonic clock: a wall clock that jumps, back or forth, changes no
decision. Wall time appears only in what people read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def monotonic(self) -> float:
        """Seconds that never go back."""

    def wall(self) -> float:
        """Seconds since the epoch, for people and files."""


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


SYSTEM_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Deadline:
    """When SIGKILL is expected: a point on the monotonic clock."""

    at: float
    clock: Clock = SYSTEM_CLOCK

    @classmethod
    def after(cls, seconds: float, clock: Clock = SYSTEM_CLOCK) -> Deadline:
        return cls(clock.monotonic() + seconds, clock)

    def remaining_s(self, reserve_s: float = 0.0) -> float:
        """Seconds left, less ``reserve_s``; never negative."""
        return max(0.0, self.at - reserve_s - self.clock.monotonic())

    def passed(self, reserve_s: float = 0.0) -> bool:
        return self.clock.monotonic() >= self.at - reserve_s

    def earlier(self, seconds: float) -> Deadline:
        """The same deadline, ``seconds`` sooner."""
        return Deadline(self.at - seconds, self.clock)
