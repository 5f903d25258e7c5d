"""What the patches of Keras 3 and of tf-keras have in common."""

from __future__ import annotations

import contextlib
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from holdfast.adapters.keras.fit import Fit, Mode
from holdfast.config import Settings
from holdfast.runtime.session import Place

Train = Callable[["FitHooks", Callable[..., Any], Any, dict[str, Any]], Any]


class FitHooks(ABC):
    """The patches of one framework, and the ``fit`` that they act for."""

    def __init__(self, framework: Any, train: Train) -> None:
        """``train`` is called instead of ``fit``."""
        self.framework = framework
        self._train = train
        self._fit: Fit | None = None

    @abstractmethod
    def install(self) -> None:
        """Patch the framework."""

    @abstractmethod
    def place(self, model: Any, settings: Settings) -> Place:
        """Which worker this is."""

    @abstractmethod
    def on_data(self, fit: Fit, data: Any) -> None:
        """Something that iterates over data was made inside ``fit``: the first is for training."""

    @abstractmethod
    def begun_later(self, fit: Fit) -> AbstractContextManager[None]:
        """Let the framework's loop begin where ``fit`` goes on."""

    @abstractmethod
    def repeat_end(self, original: Callable[..., Any], fit: Fit, arguments: dict[str, Any]) -> Any:
        """Let the framework's ``fit`` do nothing; returns its history."""

    def is_training(self) -> bool:
        """Whether the calling thread is inside a ``fit`` that is looked after."""
        return self._fit is not None and self._fit.is_mine()

    def patch(self, trainer: Any, data: Any, callbacks: Any) -> None:
        trainer.fit = self._followed_fit(trainer.fit)
        data.__init__ = self._then(data.__init__, self.on_data)
        callbacks.__init__ = self._then(callbacks.__init__, self._on_callbacks)

    def _followed_fit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def fit(self_: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(self_, *args, **kwargs)
            except TypeError:
                return original(self_, *args, **kwargs)
            bound.apply_defaults()
            return self._train(self, original, self_, bound.arguments)

        return fit

    def _then(self, original: Callable[..., None], after: Callable[[Fit, Any], None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(target: Any, *args: Any, **kwargs: Any) -> None:
            original(target, *args, **kwargs)
            if self._fit is not None and self.is_training():
                after(self._fit, target)

        return init

    def _on_callbacks(self, fit: Fit, callbacks: Any) -> None:
        if fit.callbacks is None and getattr(callbacks, "_history", None) is not None:
            fit.callbacks = callbacks
            _follow(fit, callbacks)

    def run(self, original: Callable[..., Any], fit: Fit, arguments: dict[str, Any]) -> Any:
        """Call the framework's own fit, so that it goes on where the last attempt was."""
        self._fit = fit
        try:
            if fit.mode is Mode.DONE:
                history = self.repeat_end(original, fit, arguments)
                fit.restore_end(arguments.get("callbacks"), history)
                return history
            given = arguments.get("callbacks")
            if isinstance(getattr(given, "callbacks", None), list):  # a list made by the script
                self._on_callbacks(fit, given)
            with contextlib.nullcontext() if fit.mode is Mode.ANEW else self.begun_later(fit):
                return original(**arguments)
        finally:
            self._fit = None


def _follow(fit: Fit, callbacks: Any) -> None:
    """Hear what the list of callbacks hears, in the training thread, before or after all of them."""
    train_begin, train_end = callbacks.on_train_begin, callbacks.on_train_end
    epoch_begin, epoch_end = callbacks.on_epoch_begin, callbacks.on_epoch_end
    batch_begin, batch_end = callbacks.on_train_batch_begin, callbacks.on_train_batch_end
    test_begin = callbacks.on_test_begin
    run = fit.run

    def on_train_begin(logs: Any = None) -> None:
        train_begin(logs)
        fit.on_train_begin()

    def on_epoch_begin(epoch: int, logs: Any = None) -> None:
        epoch_begin(epoch, logs)
        fit.on_epoch_begin(epoch)

    def on_train_batch_begin(batch: int, logs: Any = None) -> None:
        fit.fetched = True
        batch_begin(batch, logs)

    def on_train_batch_end(batch: int, logs: Any = None) -> None:
        fit.told = True
        fit.logs = logs
        if run.kept is not None:
            run.kept.keep(run.step + fit.in_flight)
        batch_end(batch, logs)

    def on_test_begin(logs: Any = None) -> None:
        fit.end_pass()
        test_begin(logs)

    def on_epoch_end(epoch: int, logs: Any = None) -> None:
        fit.end_pass()
        epoch_end(epoch, logs)
        fit.on_epoch_end(epoch, logs)

    def on_train_end(logs: Any = None) -> None:
        train_end(logs if logs is not None else fit.epoch_logs or None)

    heard = (on_train_begin, on_epoch_begin, on_train_batch_begin, on_train_batch_end, on_test_begin, on_epoch_end)
    for method in (*heard, on_train_end):
        object.__setattr__(callbacks, method.__name__, method)
