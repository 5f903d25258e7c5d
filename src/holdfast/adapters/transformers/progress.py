"""What the progress file says of a Trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.progress import Progress
from holdfast.runtime.host import Host
from holdfast.torch.loop import Loop

_HELD_OUT = ("eval", "val", "test")
_NO_TRAINING = ("eval", "val", "test", "aux", "best")


def look(trainer: Any, before: Any, loop: Loop, host: Host) -> Progress:
    """How the run is going, right across attempts: everything comes from the Trainer's state, which is resumed.

    ``before``: the state that it will go on with, until it does.
    """
    state = trainer.state
    if before is not None and state.global_step < before.global_step:
        state = before
    logs = list(state.log_history)
    total_epochs = trainer.args.num_train_epochs
    if trainer.args.max_steps > 0 or not total_epochs:
        total_epochs = state.num_train_epochs or None
    if total_epochs is not None and total_epochs >= 1 << 40:  # a loader without a length: as many as it takes
        total_epochs = None
    epoch = None
    if state.max_steps:
        epoch = math.floor(state.epoch or 0) + 1
        epoch = min(epoch, math.ceil(total_epochs)) if total_epochs else epoch
    return Progress(
        epoch=epoch,
        total_epochs=math.ceil(total_epochs) if total_epochs else None,
        step=loop.last_boundary(),
        total_steps=state.max_steps or None,
        loss=_newest(logs, _is_loss),
        accuracy=_newest(logs, lambda key: _is_accuracy(key) and not key.startswith(_HELD_OUT)),
        validation_loss=_newest(logs, lambda key: key.startswith(_HELD_OUT) and key.endswith("loss")),
        validation_accuracy=_newest(logs, lambda key: key.startswith(_HELD_OUT) and _is_accuracy(key)),
        learning_rate=_newest(logs, lambda key: key.rpartition("/")[2] in ("learning_rate", "lr")),
        resumed_from=host.resumed_from,
        checkpointing=host.checkpointing(),
    )


def _is_loss(key: str) -> bool:
    """The training loss, whatever a Trainer calls it: ``loss``, ``train_loss``, ``train/loss``, ``lm_loss``."""
    return key.endswith("loss") and not key.startswith(_NO_TRAINING)


def _is_accuracy(key: str) -> bool:
    return key.endswith(("accuracy", "_acc", "/acc")) or key == "acc"


def _newest(logs: Iterable[Mapping[str, Any]], wanted: Any) -> float | None:
    """The value logged last under a key that is wanted; of several in one entry the shortest key's."""
    for entry in reversed(list(logs)):
        keys = [key for key, value in entry.items() if wanted(key) and isinstance(value, int | float)]
        if keys:
            return float(entry[min(keys, key=len)])
    return None
