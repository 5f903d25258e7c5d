"""How a run is going, from the outside: new lines of its journal, and the progress file."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast.base.small_files import open_regular
from holdfast.launch.runs import RunPlace
from holdfast.progress import parse_event

_MOST = 1 << 22


class Tail:
    """Lines that were added to a journal since the last look."""

    def __init__(self, path: str, *, from_start: bool = False) -> None:
        self.path = path
        self._offset = 0
        if not from_start:
            try:
                self._offset = os.stat(path).st_size
            except OSError:
                pass

    def new(self) -> list[dict[str, Any]]:
        """Whole lines alone: half of one is looked at again next time."""
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                file.seek(self._offset)
                data = file.read(_MOST)
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        if not end and len(data) == _MOST:  # no line is that long
            end = len(data)
        self._offset += end
        events = []
        for line in data[:end].splitlines():
            if (event := parse_event(line)) is not None:
                events.append(event)
        return events


@dataclass(slots=True)
class View:
    """What a person wants to see while a run goes on. None: not known."""

    state: str = "starting"
    attempt: int = 0
    step: int | None = None
    total: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    loss: str | None = None
    eta: str | None = None
    percent: float | None = None
    saved_step: int | None = None
    saved_at: float | None = None
    restarts: int = 0
    ranks: int = 0
    updated: float | None = None
    """When the run last said something, in seconds since the epoch."""

    def take_progress(self, progress: dict[str, Any]) -> None:
        """What the progress file says."""
        self.step = progress.get("step", self.step)
        self.total = progress.get("totalSteps")
        self.epoch, self.epochs = progress.get("epoch"), progress.get("totalEpochs")
        self.loss = progress.get("loss")
        self.eta = progress.get("estimatedTimeRemaining")
        percent = float(progress.get("percentComplete", "nan"))
        self.percent = percent if 0 <= percent <= 100 else None
        self.updated = seconds_of(progress.get("lastUpdateTime"))

    def take_event(self, event: dict[str, Any]) -> None:
        """What the journal says."""
        if event["event"] == "commit" and isinstance(event.get("step"), int):
            self.saved_step, self.saved_at = event["step"], event.get("t")
        elif event["event"] == "attempt" and self.saved_step is None and isinstance(event.get("resumed_from"), int):
            self.saved_step = event["resumed_from"]

    @property
    def saved_age_s(self) -> float | None:
        return None if self.saved_at is None else max(0.0, time.time() - self.saved_at)


def seconds_of(text: str | None) -> float | None:
    """Seconds since the epoch, from the time of a progress file or a manifest."""
    try:
        return None if text is None else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None


def view_of(run: RunPlace, events: list[dict[str, Any]]) -> View:
    """The view of someone who has just come."""
    view = View(state=run.state())
    attempt = run.attempt()
    if attempt is not None:
        view.attempt, view.ranks = attempt.number, len(attempt.ranks)
    view.take_progress(run.progress())
    for event in events:
        view.take_event(event)
    view.restarts = len({(event.get("run"), event.get("attempt")) for event in events if event["event"] == "attempt"})
    view.restarts = max(0, view.restarts - 1)
    return view
