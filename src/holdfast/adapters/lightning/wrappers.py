"""Replacements of Lightning's own functions; :mod:`.patches` says which, and what each is for."""

from __future__ import annotations

import functools
import importlib
import signal
import threading
import time
import warnings
import weakref
from typing import Any

from holdfast.adapters.lightning.data import shielded
from holdfast.adapters.lightning.fit import Fit, why_not
from holdfast.config import Settings
from holdfast.errors import Preempted, StateError
from holdfast.runtime.ownership import claim
from holdfast.runtime.protection import unprotected


@functools.cache
def wrappers_of(root: str) -> Wrappers:
    """The wrappers for the Lightning of which ``root`` is the package: ``lightning.pytorch``, ``pytorch_lightning``."""
    return Wrappers(root)


class Wrappers:
    """Each method takes one of Lightning's functions and returns its replacement."""

    def __init__(self, root: str) -> None:
        self.fit: Fit | None = None
        """The fit that is under way."""
        self._root = root
        self._opened: weakref.WeakSet[Any] = weakref.WeakSet()
        """Loaders that are iterated by holdfast."""

    def _fit_of(self, trainer: Any) -> Fit | None:
        """The fit that is under way for this trainer, once training has begun."""
        fit = self.fit
        return fit if fit is not None and fit.trainer is trainer and fit.steps is not None else None

    # ------------------------------------------------------------------ a fit

    def run(self, original: Any) -> Any:
        def run(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer.state.fn != "fit" or trainer.fast_dev_run:
                return original(trainer, *args, **kwargs)
            with claim("lightning") as mine:
                settings = Settings.load()
                if not mine or not settings.enabled:
                    return original(trainer, *args, **kwargs)
                if reason := why_not(trainer):
                    unprotected(f"holdfast keeps out of this fit: {reason}")
                    return original(trainer, *args, **kwargs)
                modes = importlib.import_module(f"{self._root}.utilities.combined_loader")._SUPPORTED_MODES
                fit = self.fit = Fit(trainer, settings, modes)
                try:
                    return original(trainer, *args, **kwargs)
                finally:
                    self.fit = None
                    fit.close()

        return run

    def resume_start(self, original: Any) -> Any:
        def resume_start(connector: Any, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
            fit = self.fit
            if fit is None or fit.trainer is not connector.trainer or fit.host is not None:
                original(connector, checkpoint_path, weights_only)
            else:
                fit.load(connector, original, checkpoint_path, weights_only)

        return resume_start

    def run_stage(self, original: Any) -> Any:
        def run_stage(trainer: Any) -> Any:
            fit = self.fit
            if fit is None or fit.trainer is not trainer or not trainer.training:
                return original(trainer)
            try:
                fit.begin()
            except StateError as error:
                unprotected(f"holdfast keeps out of this fit: {error}")
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

    def interrupt(self, original: Any) -> Any:
        def interrupt(trainer: Any, exception: BaseException) -> None:
            if not isinstance(exception, Preempted):
                original(trainer, exception)
                return
            callbacks = trainer.callbacks
            savers = [one for one in callbacks if hasattr(type(one), "best_model_path") or _saves(one)]
            trainer.callbacks = [callback for callback in callbacks if callback not in savers]
            try:
                original(trainer, exception)
            finally:
                trainer.callbacks = callbacks

        return interrupt

    # ------------------------------------------------------------------ batches

    def advance(self, original: Any) -> Any:
        def advance(epoch_loop: Any, data_fetcher: Any) -> None:
            fit = self._fit_of(epoch_loop.trainer)
            if fit is None:
                original(epoch_loop, data_fetcher)
            elif fit.before_batch(epoch_loop):
                original(epoch_loop, data_fetcher)
                fit.after_batch(epoch_loop)

        return advance

    def reset(self, original: Any) -> Any:
        def reset(epoch_loop: Any) -> None:
            if self._fit_of(epoch_loop.trainer) is None:
                original(epoch_loop)
                return
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
                original(epoch_loop)

        return reset

    def iterate(self, original: Any) -> Any:
        def iterate(combined: Any) -> Any:
            fit = self.fit
            if fit is None or fit.steps is None or fit.trainer.fit_loop._combined_loader is not combined:
                return original(combined)
            self._opened.add(combined)
            combined._iterator = fit.open_pass(combined)
            return combined

        return iterate

    def state_dicts(self, original: Any) -> Any:
        def state_dicts(combined: Any) -> list[dict[str, Any]]:
            states: list[dict[str, Any]] = [] if combined in self._opened else original(combined)
            return states

        return state_dicts

    def load_current_iterator(self, original: Any) -> Any:
        def load_current_iterator(iterator: Any) -> None:
            if self.fit is None:
                original(iterator)
                return
            with shielded(iterator.iterables[iterator._iterator_idx :][:1]):
                original(iterator)

        return load_current_iterator

    def optimize(self, original: Any) -> Any:
        def run(optimization: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = original(optimization, *args, **kwargs)
            fit = self._fit_of(optimization.trainer)
            if fit is not None:
                fit.loss = outputs.get("loss")
            return outputs

        return run

    def after_closure(self, original: Any) -> Any:
        def after_closure(precision: Any, model: Any, optimizer: Any) -> None:
            original(precision, model, optimizer)
            fit = self._fit_of(model.trainer)
            if fit is not None and fit.steps is not None:
                fit.steps.before_update()

        return after_closure

    def evaluate(self, original: Any) -> Any:
        def run(loop: Any) -> Any:
            fit = self._fit_of(loop.trainer)
            if fit is not None and fit.steps is not None and not loop.trainer.sanity_checking:
                fit.steps.begin_validation()
            return original(loop)

        return run

    def evaluation_step(self, original: Any) -> Any:
        def evaluation_step(loop: Any, *args: Any, **kwargs: Any) -> Any:
            fit = self._fit_of(loop.trainer)
            if fit is not None and fit.steps is not None and fit.steps.pending and not loop.trainer.sanity_checking:
                fit.steps.pause()
            return original(loop, *args, **kwargs)

        return evaluation_step

    # ------------------------------------------------------------------ files

    def log_row(self, original: Any) -> Any:
        def log_metrics(writer: Any, *args: Any, **kwargs: Any) -> None:
            original(writer, *args, **kwargs)
            writer._holdfast_rows = vars(writer).get("_holdfast_rows", 0) + 1

        return log_metrics

    def save_checkpoint(self, original: Any) -> Any:
        def _save_checkpoint(callback: Any, trainer: Any, filepath: str) -> None:
            fit = self._fit_of(trainer)
            if fit is not None:
                fit.logs.saved(filepath)
            original(callback, trainer, filepath)

        return _save_checkpoint

    def link_checkpoint(self, original: Any) -> Any:
        def _link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
            fit = self._fit_of(trainer)
            if fit is not None:
                fit.logs.saved(linkpath)
            original(trainer, filepath, linkpath)

        return _link_checkpoint

    def remove_checkpoint(self, original: Any) -> Any:
        def _remove_checkpoint(callback: Any, trainer: Any, filepath: str) -> None:
            original(callback, trainer, filepath)
            fit = self._fit_of(trainer)
            if fit is not None:
                fit.logs.removed(filepath)

        return _remove_checkpoint

    # ------------------------------------------------------------------ signals

    def register_signal_handlers(self, original: Any) -> Any:
        def register_signal_handlers(connector: Any) -> None:
            fit = self.fit
            before = signal.getsignal(signal.SIGTERM)
            original(connector)
            if (
                fit is not None
                and fit.trainer is connector.trainer
                and threading.current_thread() is threading.main_thread()
            ):
                signal.signal(signal.SIGTERM, before)

        return register_signal_handlers

    def broadcast_sigterm(self, original: Any) -> Any:
        def broadcast(epoch_loop: Any) -> None:
            if self._fit_of(epoch_loop.trainer) is None:
                original(epoch_loop)

        return broadcast

    def terminate_all(self, original: Any) -> Any:
        def terminate_all(observer: Any) -> None:
            fit = self.fit
            if fit is not None:
                time.sleep(fit.settings.grace_period)
            original(observer)

        return terminate_all


def _saves(callback: Any) -> bool:
    return any(base.__name__ == "Checkpoint" for base in type(callback).__mro__)
