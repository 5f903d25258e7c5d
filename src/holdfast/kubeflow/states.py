"""How jobs are doing, and what can be done to them, wherever they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.errors import HoldfastError

CREATED, RUNNING, PAUSING, PAUSED, COMPLETE, FAILED = "Created", "Running", "Pausing", "Paused", "Complete", "Failed"


class UnreachableError(HoldfastError, ConnectionError):
    """The cluster does not answer, or not now: try again."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How a job is doing. What nobody knows is None."""

    name: str
    state: str
    """``Created``, ``Running``, ``Pausing``, ``Paused``, ``Complete`` or ``Failed``."""
    file: dict[str, Any] = field(default_factory=dict)
    """``status.trainingProgress`` of the TrainJob, or the progress file."""

    @property
    def step(self) -> int | None:
        return self.file.get("step")

    @property
    def total_steps(self) -> int | None:
        return self.file.get("totalSteps")

    @property
    def percent(self) -> float | None:
        return _number(self.file.get("percentComplete"))

    @property
    def eta(self) -> str | None:
        return self.file.get("estimatedTimeRemaining")

    @property
    def epoch(self) -> int | None:
        return self.file.get("epoch")

    @property
    def learning_rate(self) -> float | None:
        return _number(self.file.get("learningRate"))

    @property
    def loss(self) -> float | None:
        return _number(self.file.get("loss"))

    @property
    def resumed_from(self) -> str | None:
        return self.file.get("resumedFrom")

    @property
    def latest_checkpoint(self) -> str | None:
        return (self.file.get("checkpointing") or {}).get("latestCheckpoint")

    def __str__(self) -> str:
        words = [self.name, self.state]
        if self.step is not None:
            words.append(f"step {self.step}" + (f" of {self.total_steps}" if self.total_steps else ""))
        if self.percent is not None:
            words.append(f"{self.percent:.1f} %")
        if self.eta and self.state == RUNNING:
            words.append(f"ETA {self.eta}")
        if self.file.get("loss"):
            words.append(f"loss {self.file['loss']}")
        if self.resumed_from:
            words.append(f"resumed from {self.resumed_from}")
        return " · ".join(words)


def _number(text: Any) -> float | None:
    """A progress that makes no sense is none."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


class Jobs(Protocol):
    """Where jobs are."""

    def names(self) -> list[str]: ...

    def pause(self, name: str) -> None:
        """Tell it to save and stop; does not wait for it."""

    def grace_s(self, name: str) -> float: ...

    def resume(self, name: str) -> None: ...

    def progress(self, name: str) -> Progress: ...

    def checkpoints(self, name: str) -> list[dict[str, Any]]: ...

    def delete(self, name: str) -> None: ...

    def logs(self, name: str, follow: bool) -> Any: ...
