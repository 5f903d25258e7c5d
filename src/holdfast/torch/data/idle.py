"""Persistent workers of a ``DataLoader`` between two passes, as a state that another process can continue.

They draw no seed from the process as the next pass begins, and go on with the random state that the last one left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from holdfast.torch.data.workers import Line, RandomState, keep, kept


@dataclass(frozen=True, slots=True)
class IdleWorkers:
    """What decides what they load next."""

    seed: torch.Tensor
    """State of the generator that their seeds were drawn from."""
    states: list[RandomState | None]
    """Each worker's random state; None: it has drawn nothing."""
    known: bool
    """False where a worker may be further than its last batch: the pass was broken off, or is over an iterable."""

    @classmethod
    def of(cls, loader: Any) -> IdleWorkers | None:
        """Those of a loader; None if it has none."""
        line = kept(loader) if loader is not None else None
        if not isinstance(line, Line) or line.indices.seed is None:
            return None
        return cls(line.indices.seed, line.states, line.settled)

    def tree(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return {"seed": self.seed, "states": self.states}

    @staticmethod
    def put_back(loader: Any, tree: dict[str, Any]) -> None:
        """Start such workers for a loader of this process. No random number of the process is drawn."""
        states = tree["states"] if len(tree["states"]) == loader.num_workers else [None] * loader.num_workers
        line = Line(loader, states)
        if not line.persistent:
            return
        line.reuse(tree["seed"])
        line.settle(states)
        keep(loader, line)
