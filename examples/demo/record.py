"""What a training of the demo left behind: its losses, its journal, its last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from holdfast.progress import Goodput, goodput, read_journal, timeline

Tensors = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step, as rank 0 wrote it down."""

    loss: float
    at: float
    """Seconds since the epoch."""


def read_steps(path: Path) -> dict[int, Step]:
    """By number; a step that was trained twice counts as it was trained last."""
    steps = {}
    if path.exists():
        for line in path.read_text(encoding="ascii").splitlines():
            words = line.split()
            if len(words) == 3:  # the last line may be cut off where the process was killed
                steps[int(words[0])] = Step(float.fromhex(words[1]), float(words[2]))
    return steps


@dataclass(frozen=True)
class Record:
    folder: Path
    steps: dict[int, Step]

    def events(self) -> list[dict[str, Any]]:
        return list(read_journal(self.folder / ".holdfast" / "journal.jsonl"))

    def interruptions(self) -> list[dict[str, Any]]:
        return timeline(self.events())

    def goodput(self) -> Goodput:
        return goodput(self.events())

    def tensors(self, path: str) -> Tensors:
        """The content of a file of the last checkpoint, read with safetensors alone."""
        tensors: Tensors = load_file(self.folder / f"checkpoint-{max(self.steps)}" / path)
        return tensors


def differing_tensors(ours: Tensors, theirs: Tensors) -> list[str]:
    """Names of tensors that are not equal in every bit."""
    return sorted(
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours
        or name not in theirs
        or (ours[name].dtype, ours[name].shape) != (theirs[name].dtype, theirs[name].shape)
        or ours[name].tobytes() != theirs[name].tobytes()
    )
