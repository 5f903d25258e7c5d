"""The wrappers that Keras 3 and tf-keras have in common; the patch tables name them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from holdfast.adapters.keras.fit import Fit, Mode
from holdfast.adapters.keras.scopes import CALLBACKS
from holdfast.adapters.keras.seeds import remembered_shuffles
from holdfast.base.patching import PatchSet
from holdfast.config import Settings
from holdfast.runtime.session import Place


class Training(Protocol):
    """What the adapter does with a framework's training."""

    def fit(self, hooks: FitHooks, original: Callable[..., Any], model: Any, arguments: dict[str, Any]) -> Any:
        """Called instead of ``fit``, with its arguments by name."""

    def outside_of_fit(self) -> None:
        """Weights are about to change, and no ``fit`` is under way."""


class Tables(NamedTuple):
    """The patch tables of a framework and of the TensorFlow under it."""

    framework: PatchSet
    tensorflow: PatchSet


class FitHooks(ABC):
    """The wrappers of one framework, and the ``fit`` that they act for."""

    def __init__(self, framework: Any, tables: Tables, training: Training) -> None:
        self.framework = framework
        self.tables = tables
        self._training = training
        self._fit: Fit | None = None
        self._fits = 0
        """Calls of fit that are under way in any thread, looked after or not: replicas have threads of their own."""

    reports_loops = True
    """Training outside of any fit is reported here, and not by whoever follows loops of the backend."""

    def unsupported(self) -> str | None:
        """Why no ``fit`` can be looked after, as a sentence."""
        return None

    @abstractmethod
    def configure(self) -> None:
        """Set what the framework lets one set; the patches are in place."""

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
        """True if the calling thread is inside a ``fit`` that is looked after."""
        return self._fit is not None and self._fit.is_mine()

    # ------------------------------------------------------------------ the patches of the process

    def follow_fit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def fit(self_: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(self_, *args, **kwargs)
            except TypeError:
                return original(self_, *args, **kwargs)
            bound.apply_defaults()
            self._fits += 1
            try:
                return self._training.fit(self, original, self_, bound.arguments)
            finally:
                self._fits -= 1

        return fit

    def follow_apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``original`` applies gradients."""

        @functools.wraps(original)
        def apply(*args: Any, **kwargs: Any) -> Any:
            if self.reports_loops and not self._fits:
                self._training.outside_of_fit()
            return original(*args, **kwargs)

        # AutoGraph leaves Keras' own functions as they are, and this one stands in for one of them.
        vars(apply)["autograph_info__"] = True
        return apply

    def follow_data(self, original: Callable[..., None]) -> Callable[..., None]:
        return self._then(original, self.on_data)

    def follow_callbacks(self, original: Callable[..., None]) -> Callable[..., None]:
        return self._then(original, self._on_callbacks)

    def remember_shuffles(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``original`` makes a dataset of arrays."""

        def made(*args: Any, **kwargs: Any) -> Any:
            remembered = remembered_shuffles(self.tables.tensorflow) if self.is_training() else contextlib.nullcontext()
            with remembered:
                return original(*args, **kwargs)

        return made

    def _then(self, original: Callable[..., None], after: Callable[[Fit, Any], None]) -> Callable[..., None]:
        def init(target: Any, *args: Any, **kwargs: Any) -> None:
            original(target, *args, **kwargs)
            if self._fit is not None and self.is_training():
                after(self._fit, target)

        return init

    # ------------------------------------------------------------------ a fit

    def _on_callbacks(self, fit: Fit, callbacks: Any) -> None:
        if fit.callbacks is None and getattr(callbacks, "_history", None) is not None:
            fit.callbacks = callbacks
            self.tables.framework.begin(CALLBACKS, Listener(fit), to=callbacks)

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


class Listener:
    """Hears what the list of callbacks hears, in the training thread, before or after all of them."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit

    def on_train_begin(self, original: Callable[..., None]) -> Callable[..., None]:
        fit = self._fit

        def on_train_begin(logs: Any = None) -> None:
            original(logs)
            fit.on_train_begin()

        return on_train_begin

    def on_epoch_begin(self, original: Callable[..., None]) -> Callable[..., None]:
        fit = self._fit

        def on_epoch_begin(epoch: int, logs: Any = None) -> None:
            original(epoch, logs)
            fit.on_epoch_begin(epoch)

        return on_epoch_begin

    def on_train_batch_begin(self, original: Callable[..., None]) -> Callable[..., None]:
        fit = self._fit

        def on_train_batch_begin(batch: int, logs: Any = None) -> None:
            fit.fetched = True
            original(batch, logs)

        return on_train_batch_begin

    def on_train_batch_end(self, original: Callable[..., None]) -> Callable[..., None]:
        fit, run = self._fit, self._fit.run

        def on_train_batch_end(batch: int, logs: Any = None) -> None:
            fit.told = True
            fit.logs = logs
            if run.kept is not None:
                run.kept.keep(run.step + fit.in_flight)
            original(batch, logs)

        return on_train_batch_end

    def on_test_begin(self, original: Callable[..., None]) -> Callable[..., None]:
        fit = self._fit

        def on_test_begin(logs: Any = None) -> None:
            fit.end_pass()
            original(logs)

        return on_test_begin

    def on_epoch_end(self, original: Callable[..., None]) -> Callable[..., None]:
        fit = self._fit

        def on_epoch_end(epoch: int, logs: Any = None) -> None:
            fit.end_pass()
            fit.ending = True
            try:
                original(epoch, logs)
            finally:
                fit.ending = False
            fit.on_epoch_end(epoch, logs)

        return on_epoch_end

    def on_train_end(self, original: Callable[..., None]) -> Callable[..., None]:
        fit = self._fit

        def on_train_end(logs: Any = None) -> None:
            original(logs if logs is not None else fit.epoch_logs or None)

        return on_train_end
