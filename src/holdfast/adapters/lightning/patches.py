"""Lightning: ``Trainer.fit`` of an unmodified script survives preemption.

:func:`install` wraps what a fit goes through. Each wrapper does something only while a :class:`Fit` is under way for
that trainer, and otherwise calls what it wraps:

=====================================  ========================================================================
``Trainer._run``                       a fit begins and ends
``_CheckpointConnector.resume_start``  loading: goes on from the newest whole checkpoint
``Trainer._run_stage``                 training begins, is complete, or fails
``CombinedLoader.__iter__``            a pass over the data, which can be continued
``_Sequential``                        a pass over validation data, whose workers do not die of a SIGTERM to all
``_TrainingEpochLoop.advance``         a batch: the boundary of a step is at its end
``_EvaluationLoop``                    a notice does not wait for the end of a validation
``Precision._after_closure``           from here to the boundary, weights and counters disagree
SIGTERM and what Lightning does of it  ours: its own handler talks to other ranks from inside the handler, and its
                                       loop asks all ranks at each batch
=====================================  ========================================================================
"""

from __future__ import annotations

import functools
import importlib
import logging
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from holdfast.adapters.lightning.data import shielded
from holdfast.adapters.lightning.fit import Fit, why_not
from holdfast.base.patching import PatchSet
from holdfast.config import Settings
from holdfast.errors import Preempted, StateError
from holdfast.runtime.ownership import claim

TABLES: tuple[PatchSet, ...] = ()
log = logging.getLogger("holdfast")

_MARK = "__holdfast__"
_current: Fit | None = None


def _fit_of(trainer: Any) -> Fit | None:
    """The fit that is under way for this trainer, once training has begun."""
    fit = _current
    return fit if fit is not None and fit.trainer is trainer and fit.steps is not None else None


def install(module: Any) -> None:
    """``module``: ``lightning.pytorch.trainer.trainer`` or ``pytorch_lightning.trainer.trainer``."""
    root = module.__name__.removesuffix(".trainer.trainer")
    fabric = "lightning.fabric" if root == "lightning.pytorch" else "lightning_fabric"

    def part(name: str) -> Any:
        return importlib.import_module(f"{root}.{name}")

    combined = part("utilities.combined_loader")
    _patch(module.Trainer, "_run", functools.partial(_run, modes=combined._SUPPORTED_MODES))
    _patch(module.Trainer, "_run_stage", _run_stage)
    _patch(part("trainer.call"), "_interrupt", _interrupt)
    _patch(part("trainer.connectors.checkpoint_connector")._CheckpointConnector, "resume_start", _resume_start)
    _patch(part("trainer.connectors.signal_connector")._SignalConnector, "register_signal_handlers", _register)
    epoch_loop = part("loops.training_epoch_loop")._TrainingEpochLoop
    _patch(epoch_loop, "advance", _advance)
    _patch(epoch_loop, "reset", _reset)
    _patch(epoch_loop, "_broadcast_sigterm_tensor", _broadcast)
    evaluation_loop = part("loops.evaluation_loop")._EvaluationLoop
    _patch(evaluation_loop, "run", _evaluate)
    _patch(evaluation_loop, "_evaluation_step", _evaluation_step)
    _patch(part("loops.optimization.automatic")._AutomaticOptimization, "run", _optimize)
    _patch(part("plugins.precision.precision").Precision, "_after_closure", _after_closure)
    _patch(combined.CombinedLoader, "__iter__", _iterate)
    _patch(combined._Sequential, "_load_current_iterator", _load_current)
    observer = importlib.import_module(f"{fabric}.strategies.launchers.subprocess_script")._ChildProcessObserver
    _patch(observer, "_terminate_all", _terminate_all)


def _patch(owner: Any, name: str, wrap: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return
    wrapped = functools.wraps(original)(wrap(original))
    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


# ---------------------------------------------------------------------- a fit


def _run(original: Any, modes: dict[str, Any]) -> Any:
    def run(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        global _current
        if trainer.state.fn != "fit" or trainer.fast_dev_run:
            return original(trainer, *args, **kwargs)
        with claim("lightning") as mine:
            settings = Settings.load()
            if not mine or not settings.enabled:
                return original(trainer, *args, **kwargs)
            if reason := why_not(trainer):
                log.warning("holdfast keeps out of this fit: %s", reason)
                return original(trainer, *args, **kwargs)
            fit = _current = Fit(trainer, settings, modes)
            try:
                return original(trainer, *args, **kwargs)
            finally:
                _current = None
                fit.close()

    return run


def _resume_start(original: Any) -> Any:
    def resume_start(connector: Any, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        fit = _current
        if fit is None or fit.trainer is not connector.trainer or fit.host is not None:
            original(connector, checkpoint_path, weights_only)
        else:
            fit.load(connector, original, checkpoint_path, weights_only)

    return resume_start


def _run_stage(original: Any) -> Any:
    def run_stage(trainer: Any) -> Any:
        fit = _current
        if fit is None or fit.trainer is not trainer or not trainer.training:
            return original(trainer)
        try:
            fit.begin()
        except StateError as error:
            log.warning("holdfast keeps out of this fit: %s", error)
            return original(trainer)
        if fit.is_complete:
            fit.tell_complete()
            fit.finish()
            return None
        try:
            result = original(trainer)
            fit.finish()
            return result
        except BaseException as error:
            fit.crashed(error)
            raise

    return run_stage


def _interrupt(original: Any) -> Any:
    """After a just-in-time save nothing else is saved: the time for that is over."""

    def interrupt(trainer: Any, exception: BaseException) -> None:
        if not isinstance(exception, Preempted):
            original(trainer, exception)
            return
        callbacks = trainer.callbacks
        savers = [callback for callback in callbacks if hasattr(type(callback), "best_model_path") or _saves(callback)]
        trainer.callbacks = [callback for callback in callbacks if callback not in savers]
        try:
            original(trainer, exception)
        finally:
            trainer.callbacks = callbacks

    return interrupt


def _saves(callback: Any) -> bool:
    return any(base.__name__ == "Checkpoint" for base in type(callback).__mro__)


# ---------------------------------------------------------------------- batches


def _advance(original: Any) -> Any:
    def advance(epoch_loop: Any, data_fetcher: Any) -> None:
        fit = _fit_of(epoch_loop.trainer)
        if fit is None:
            original(epoch_loop, data_fetcher)
        elif fit.before_batch(epoch_loop):
            original(epoch_loop, data_fetcher)
            fit.after_batch(epoch_loop)

    return advance


def _reset(original: Any) -> Any:
    def reset(epoch_loop: Any) -> None:
        if _fit_of(epoch_loop.trainer) is None:
            original(epoch_loop)
            return
        with warnings.catch_warnings():
            # The position of a loader is ours to restore, and is.
            warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
            original(epoch_loop)

    return reset


def _iterate(original: Any) -> Any:
    def iterate(combined: Any) -> Any:
        fit = _current
        if fit is None or fit.steps is None or fit.trainer.fit_loop._combined_loader is not combined:
            return original(combined)
        combined._iterator = fit.open_pass(combined)
        return combined

    return iterate


def _load_current(original: Any) -> Any:
    def load_current_iterator(iterator: Any) -> None:
        if _current is None:
            original(iterator)
            return
        with shielded(iterator.iterables[iterator._iterator_idx :][:1]):
            original(iterator)

    return load_current_iterator


def _optimize(original: Any) -> Any:
    def run(optimization: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(optimization, *args, **kwargs)
        fit = _fit_of(optimization.trainer)
        if fit is not None:
            fit.loss = outputs.get("loss")
        return outputs

    return run


def _after_closure(original: Any) -> Any:
    def after_closure(precision: Any, model: Any, optimizer: Any) -> None:
        original(precision, model, optimizer)
        fit = _fit_of(model.trainer)
        if fit is not None and fit.steps is not None:
            fit.steps.before_update()

    return after_closure


def _evaluate(original: Any) -> Any:
    def run(loop: Any) -> Any:
        fit = _fit_of(loop.trainer)
        if fit is not None and fit.steps is not None and not loop.trainer.sanity_checking:
            fit.steps.begin_validation()
        return original(loop)

    return run


def _evaluation_step(original: Any) -> Any:
    def evaluation_step(loop: Any, *args: Any, **kwargs: Any) -> Any:
        fit = _fit_of(loop.trainer)
        if fit is not None and fit.steps is not None and fit.steps.pending and not loop.trainer.sanity_checking:
            fit.steps.pause()
        return original(loop, *args, **kwargs)

    return evaluation_step


# ---------------------------------------------------------------------- signals


def _register(original: Any) -> Any:
    def register_signal_handlers(connector: Any) -> None:
        fit = _current
        before = signal.getsignal(signal.SIGTERM)
        original(connector)
        if (
            fit is not None
            and fit.trainer is connector.trainer
            and threading.current_thread() is threading.main_thread()
        ):
            signal.signal(signal.SIGTERM, before)

    return register_signal_handlers


def _broadcast(original: Any) -> Any:
    def broadcast(epoch_loop: Any) -> None:
        if _fit_of(epoch_loop.trainer) is None:
            original(epoch_loop)

    return broadcast


def _terminate_all(original: Any) -> Any:
    """Lightning kills all ranks of a machine within seconds after one has ended: survivors need theirs to save."""

    def terminate_all(observer: Any) -> None:
        fit = _current
        if fit is not None:
            time.sleep(fit.settings.grace_period)
        original(observer)

    return terminate_all
