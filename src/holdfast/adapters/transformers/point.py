"""A moment of a Trainer's run that can be saved, and gone on from: the end of a step.

What the Trainer does after a step (log, evaluate, save, end the epoch) is not done yet at that moment. It is noted as
pending, and done again on resume: so ranks that have come to different places after the same step still save one and
the same moment, and an evaluation need not be waited for.
"""

from __future__ import annotations

import copy
from typing import Any

from holdfast.adapters.transformers.feed import Feed
from holdfast.torch.data.batches import Mark

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)


class Point:
    """Everything about the moment that changes before the next one, except for tensors."""

    __slots__ = (
        "callbacks",
        "epoch",
        "epoch_ended",
        "epoch_over",
        "feed",
        "flags",
        "flos",
        "grad_norm",
        "last_logged",
        "learning_rate",
        "log_length",
        "loss",
        "mark",
        "metrics",
        "random",
        "rates",
        "scheduler",
        "seconds",
        "state",
        "step",
        "total_loss",
        "used",
    )

    step: int
    epoch: int
    """The pass over the data that the step belongs to, from 0."""
    used: int
    """Batches of that pass that were trained on."""
    epoch_over: bool
    """That was all of them."""
    epoch_ended: bool
    """And what the Trainer does at the end of an epoch is done."""
    flags: tuple[bool, ...]
    """What is pending, as :data:`FLAGS`."""
    feed: Feed | None
    mark: Mark | None
    random: dict[str, Any] | None
    """The random state; None: that of the black box's record of the step."""
    loss: Any
    """This rank's sum of losses since the last log: a number, or a tensor that nobody changes."""

    def __init__(self, trainer: Any, step: int, control: Any) -> None:
        state = trainer.state
        self.step = step
        self.state = {name: getattr(state, name) for name in _STATE}
        self.log_length = len(state.log_history)
        self.total_loss = trainer._total_loss_scalar
        self.last_logged = trainer._globalstep_last_logged
        self.flos = trainer.current_flos
        self.flags = (
            control.should_training_stop,
            control.should_epoch_stop,
            control.should_save,
            control.should_evaluate,
            control.should_log,
        )
        self.callbacks: dict[str, Any] = {}
        self.metrics: dict[str, Any] | None = None
        self.scheduler: Any = None
        self.rates: list[Any] | None = None
        self.grad_norm: Any = None
        self.learning_rate: Any = None
        self.random = None
        self.feed = self.mark = None
        self.epoch = self.used = 0
        self.epoch_over = self.epoch_ended = False
        self.seconds = 0.0
        self.loss = 0.0

    def keep_callbacks(self, stateful: list[Any]) -> None:
        """Callbacks whose state the Trainer saves: several of a class become a list, as there."""
        states: dict[str, Any] = {}
        for callback in stateful:
            name = type(callback).__name__
            if name in states:
                known = states[name]
                states[name] = [*known, callback.state()] if isinstance(known, list) else [known, callback.state()]
            else:
                states[name] = callback.state()
        self.callbacks = states

    def keep_scheduler(self, scheduler: Any, optimizer: Any) -> None:
        """A scheduler that steps on a metric does so after the evaluation, and changes the optimizer's rates."""
        self.scheduler = copy.deepcopy(scheduler.state_dict())
        self.rates = [copy.copy(group["lr"]) for group in optimizer.param_groups]

    def pending(self) -> dict[str, bool]:
        return dict(zip(FLAGS, self.flags, strict=True))


def number(value: Any) -> float | None:
    """A number that may still be a tensor."""
    if value is None:
        return None
    return float(value.item() if hasattr(value, "item") else value)
