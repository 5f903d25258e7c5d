"""``transformers.Trainer``, and trainers made from it such as TRL's: safe without a change to the script.

:func:`install` patches as little as possible for good: ``Trainer.train``, which hands over to
:mod:`holdfast.adapters.transformers.run` where holdfast is switched on; the handler of ``enable_jit_checkpoint``,
which holdfast takes over; and ``get_last_checkpoint``, which must not name a checkpoint that is not whole. Everything
else is set on the Trainer in question, for the time that it trains.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from _holdfast_startup import ENABLED, switch
from holdfast.base.patching import PatchSet
from holdfast.config import Settings
from holdfast.runtime.ownership import claim
from holdfast.store.base import SENTINEL

TABLES: tuple[PatchSet, ...] = ()
log = logging.getLogger("holdfast")

_MARK = "_holdfast"
_ARGUMENTS = "HOLDFAST_TRAINER_ARGUMENTS"


def install(module: ModuleType) -> None:
    """Patch ``transformers.trainer``, which was just imported."""
    trainer: Any = module.Trainer
    if hasattr(trainer.train, _MARK):
        return
    original = trainer.train

    @functools.wraps(original)
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
                log.warning("holdfast does not look after this training: %s", problem)
                _give_back(self)
                return plain()
            from holdfast.adapters.transformers.run import Attempt

            attempt = Attempt(self, resume_from_checkpoint, trial, ignore_keys_for_eval)
            return attempt.run(lambda path: original(self, path, trial, ignore_keys_for_eval, **more))

    setattr(train, _MARK, True)
    trainer.train = train
    _take_arguments(trainer)
    _take_over_handler()
    _skip_unfinished(importlib.import_module("transformers.trainer_utils"))


def _is_asked(trainer: Any) -> bool:
    everything = switch(ENABLED)
    if everything is not None:
        return everything
    return bool(getattr(trainer.args, "enable_jit_checkpoint", False))


def _cannot(trainer: Any, trial: Any) -> str | None:
    """Why this training is not one that can be looked after."""
    if trial is not None:
        return "it is a trial of a hyperparameter search"
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed keeps the state to itself"
    if getattr(trainer, "is_fsdp_xla_enabled", False) or "torch_xla" in sys.modules:
        return "it runs on XLA"
    from holdfast.adapters.transformers.watch import NEEDED

    missing = [name for name in NEEDED if not hasattr(trainer, name)]
    if missing:
        version = importlib.import_module("transformers").__version__
        return f"transformers {version} has another training loop, without {missing[0]}; use 5.22 or one like it"
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        return "its model was sharded while it was loaded, and the Trainer cannot resume such a model"
    return None


# ---------------------------------------------------------------------- HOLDFAST_TRAINER_ARGUMENTS


def _take_arguments(kind: Any) -> None:
    """What a platform sets over the script's ``TrainingArguments`` is there before the Trainer looks at them."""
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, model: Any = None, args: Any = None, *more: Any, **named: Any) -> None:
        given = Settings.load().trainer_arguments if os.environ.get(_ARGUMENTS) and switch(ENABLED) else None
        if given:
            args = _changed(args, given)
        original(self, model, args, *more, **named)

    kind.__init__ = __init__


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


def _take_over_handler() -> None:
    """``TrainingArguments(enable_jit_checkpoint=True)`` puts no handler of its own in place any more."""
    try:
        jit = importlib.import_module("transformers.trainer_jit_checkpoint")
    except ImportError:
        return
    callback: Any = jit.JITCheckpointCallback
    original = callback.set_trainer
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def set_trainer(self: Any, trainer: Any) -> None:
        self.trainer = trainer

    set_trainer.__dict__[_MARK] = original
    callback.set_trainer = set_trainer


def _give_back(trainer: Any) -> None:
    """Let transformers' own handler do what it can."""
    if getattr(trainer.args, "enable_jit_checkpoint", False):
        for callback in trainer.callback_handler.callbacks:
            original = getattr(getattr(type(callback), "set_trainer", None), _MARK, None)
            if original is not None:
                original(callback, trainer)


# ---------------------------------------------------------------------- get_last_checkpoint


def _skip_unfinished(utils: ModuleType) -> None:
    """Change the function itself: scripts may have imported it already."""
    function: Any = utils.get_last_checkpoint
    if not hasattr(function, _MARK):
        setattr(utils, "_holdfast_last_checkpoint", _last_checkpoint)
        function.__code__ = _get_last_checkpoint.__code__
        setattr(function, _MARK, True)


def _get_last_checkpoint(folder):  # type: ignore[no-untyped-def]
    return _holdfast_last_checkpoint(folder)  # type: ignore[name-defined]  # noqa: F821


def _last_checkpoint(folder: str) -> str | None:
    """The newest checkpoint folder that is not marked as incomplete."""
    from holdfast.store.manifest import step_of

    steps = []
    for name in os.listdir(folder):
        step = step_of(name)
        path = os.path.join(folder, name)
        if step is not None and os.path.isdir(path) and not os.path.lexists(os.path.join(path, SENTINEL)):
            steps.append((step, path))
    return max(steps)[1] if steps else None
