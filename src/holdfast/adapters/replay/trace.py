"""What a loop did, as far as a replay must do it again: passes over loaders, fetches, optimizer steps.

The record does not grow with the steps: for each pass how many batches it gave, and one number that follows from
the order of all events. A replay that comes to the same number has gone the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import StateError

BEFORE, AFTER = 0, 1
"""Where a point is: before the event that comes next, or after the last one."""

OPEN, FETCH, END, STEP = 1, 2, 3, 4
_MASK = (1 << 61) - 1


@dataclass(frozen=True, slots=True)
class Point:
    """A moment at which a process can go on where another stopped."""

    side: int
    events: int
    """Events that came before it."""
    digest: int | None
    """Of those events; None: not known."""
    step: int


class Trace:
    """The events so far. Hot: a fetch and a step cost one small calculation each."""

    def __init__(self) -> None:
        self.events = 0
        self.digest = 0
        self.steps = 0
        """Optimizer steps, each optimizer's own."""
        self.table: list[list[int]] = []
        """For each pass: batches that it would give (-1: unknown), batches that it gave, whether it came to its end."""

    def add(self, kind: int, which: int) -> None:
        self.events += 1
        self.digest = (self.digest * 1_000_003 + kind * 65_537 + which) & _MASK

    def open(self, total: int) -> int:
        """A pass begins; returns its number."""
        self.add(OPEN, total)
        self.table.append([total, 0, 0])
        return len(self.table) - 1

    def fetch(self, number: int) -> None:
        self.events += 1
        self.digest = (self.digest * 1_000_003 + 131_074 + number) & _MASK
        self.table[number][1] += 1

    def end(self, number: int) -> None:
        self.add(END, number)
        self.table[number][2] = 1

    def step(self, optimizer: int) -> None:
        self.steps += 1
        self.events += 1
        self.digest = (self.digest * 1_000_003 + 262_148 + optimizer) & _MASK


class Recorded:
    """What an earlier process did up to a point, to be compared with what this one does."""

    def __init__(self, tree: dict[str, Any]) -> None:
        point = tree["point"]
        self.point = Point(point["side"], point["events"], point["digest"], point["step"])
        self.table: list[list[int]] = tree["table"].tolist()

    def check_open(self, number: int, total: int) -> None:
        if number >= len(self.table):
            raise astray(f"it begins pass {number + 1} over a loader, and the run had begun {len(self.table)} only")
        if self.table[number][0] != total:
            before, now = (count if count >= 0 else "an unknown number of" for count in (self.table[number][0], total))
            raise astray(f"pass {number + 1} over a loader has {now} batches, and had {before}")

    def check_fetch(self, number: int, delivered: int) -> bool:
        """Whether there is another batch in this pass; False: it ends here."""
        _, given, ended = self.table[number]
        if delivered < given:
            return True
        if ended:
            return False
        raise astray(f"it asks for batch {delivered + 1} of pass {number + 1}, and the run had asked for {given} only")

    def check_arrival(self, trace: Trace) -> None:
        point = self.point
        if trace.events != point.events or (point.digest is not None and trace.digest != point.digest):
            raise astray(
                f"it has made {trace.steps} optimizer steps and {len(trace.table)} passes in another order than the run"
            )

    def check_ahead(self, trace: Trace) -> None:
        if trace.events > self.point.events:
            raise astray(f"it has gone past step {self.point.step}, {trace.steps} optimizer steps after its start")


def table_of(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)


def astray(what: str) -> StateError:
    """The replay goes another way than the run did."""
    return StateError(
        f"the script does not go the way it went before: {what}. Nothing is lost, the checkpoint stays. Likely causes: "
        f"the script, its arguments or its data were changed; it goes on from a checkpoint of its own; it stops, or "
        f"skips, by the clock, by random numbers or by values that never were tensors. Such values become known to a "
        f"replay with `value = holdfast.track(value)`; holdfast.Run needs no replay at all; HOLDFAST_RESUME=never "
        f"starts anew"
    )
