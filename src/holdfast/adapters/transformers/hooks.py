"""Replacements of transformers' own functions for as long as the process lasts: see the patch table.

Each function takes the original and returns its replacement.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from _holdfast_startup import ENABLED, switch
from holdfast.adapters.transformers.patches import SET_TRAINER, TRANSFORMERS
from holdfast.config import Settings
from holdfast.runtime.ownership import claim
from holdfast.runtime.protection import unprotected
from holdfast.store.base import SENTINEL

log = logging.getLogger("holdfast")

_ARGUMENTS = "HOLDFAST_TRAINER_ARGUMENTS"


# ---------------------------------------------------------------------- Trainer.train


def train(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Trainer.train`` under holdfast's protection, where that is switched on."""

    def train(
        self: Any,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
        **more: Any,
    ) -> Any:
        def plain() -> Any:
            return original(self, resume_from_checkpoint, trial, ignore_keys_for_eval, **more)

        if not _is_asked(self):
            return plain()
        with claim("transformers") as mine:
            if not mine:
                return plain()
            if problem := _cannot(self, trial):
                unprotected(f"holdfast does not protect this training run: {problem}")
                _give_back(self)
                return plain()
            from holdfast.adapters.transformers.run import run

            return run(
                self,
                resume_from_checkpoint,
                trial,
                ignore_keys_for_eval,
                lambda path: original(self, path, trial, ignore_keys_for_eval, **more),
            )

    return train


def _is_asked(trainer: Any) -> bool:
    everything = switch(ENABLED)
    if everything is not None:
        return everything
    return bool(getattr(trainer.args, "enable_jit_checkpoint", False))


def _cannot(trainer: Any, trial: Any) -> str | None:
    """Why this training run cannot be protected."""
    if trial is not None:
        return "it is a trial of a hyperparameter search"
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed keeps the state to itself"
    if getattr(trainer, "is_fsdp_xla_enabled", False) or "torch_xla" in sys.modules:
        return "it runs on XLA"
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        return "its model was sharded while it was loaded, and the Trainer cannot resume such a model"
    return None


# ---------------------------------------------------------------------- HOLDFAST_TRAINER_ARGUMENTS


def take_arguments(original: Callable[..., None]) -> Callable[..., None]:
    """What a platform sets over the script's ``TrainingArguments`` is there before the Trainer looks at them."""

    def __init__(self: Any, model: Any = None, args: Any = None, *more: Any, **named: Any) -> None:
        given = Settings.load().trainer_arguments if os.environ.get(_ARGUMENTS) and switch(ENABLED) else None
        if given:
            args = _changed(args, given)
        original(self, model, args, *more, **named)

    return __init__


def _changed(args: Any, given: Mapping[str, Any]) -> Any:
    """A copy of the arguments with those values, as ``TrainingArguments`` itself would hold them."""
    if args is None:
        args = importlib.import_module("transformers").TrainingArguments(
            output_dir=given.get("output_dir", "tmp_trainer")
        )
    args = copy.copy(args)
    strategy = given.get("save_strategy", args.save_strategy)
    if "save_strategy" in given and args.load_best_model_at_end and strategy != args.save_strategy:
        log.warning(
            "the script's save_strategy stays %s: load_best_model_at_end depends on it", args.save_strategy.value
        )
        given = {name: value for name, value in given.items() if name not in ("save_strategy", "save_steps")}
    for name, value in given.items():
        object.__setattr__(args, name, type(args.save_strategy)(value) if name == "save_strategy" else value)
    return args


# ---------------------------------------------------------------------- enable_jit_checkpoint


def take_over_handler(original: Callable[..., None]) -> Callable[..., None]:
    """``TrainingArguments(enable_jit_checkpoint=True)`` puts no signal handler of its own in place."""

    def set_trainer(self: Any, trainer: Any) -> None:
        self.trainer = trainer

    return set_trainer


def _give_back(trainer: Any) -> None:
    """Let transformers' own handler do what it can."""
    if getattr(trainer.args, "enable_jit_checkpoint", False):
        kind = importlib.import_module(SET_TRAINER.partition(":")[0]).JITCheckpointCallback
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, kind):
                TRANSFORMERS.original(SET_TRAINER)(callback, trainer)


# ---------------------------------------------------------------------- get_last_checkpoint


def newest_complete(original: Callable[..., str | None]) -> Callable[..., str | None]:
    """``get_last_checkpoint``, which passes over folders that are marked as incomplete."""

    def get_last_checkpoint(folder: str) -> str | None:
        from holdfast.store.manifest import step_of

        steps = []
        for name in os.listdir(folder):
            step = step_of(name)
            path = os.path.join(folder, name)
            if step is not None and os.path.isdir(path) and not os.path.lexists(os.path.join(path, SENTINEL)):
                steps.append((step, path))
        return max(steps)[1] if steps else None

    return get_last_checkpoint
