"""Keras: a ``fit`` that survives preemption, of Keras 3 and of tf-keras, without a change in the script.

``HOLDFAST_ENABLED=1`` makes every ``fit`` of a process one that is looked after; ``holdfast.keras.JITCheckpoint`` among
the callbacks of one makes that one. ``HOLDFAST_ENABLED=0`` wins over both.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from _holdfast_startup import ENABLED, required, switch
from holdfast.adapters.keras import callbacks as keras_callbacks
from holdfast.adapters.keras import seeds as keras_seeds
from holdfast.adapters.keras.fit import Mode
from holdfast.adapters.keras.hooks import FitHooks, Tables
from holdfast.adapters.keras.identity import identity_of
from holdfast.adapters.keras.installed import LEFT_ALONE
from holdfast.adapters.keras.run import KerasRun, seeds_in
from holdfast.adapters.registry import install
from holdfast.base.patching import PatchSet
from holdfast.base.run_directory import default_location
from holdfast.config import Settings
from holdfast.errors import HoldfastError
from holdfast.runtime.ownership import claim
from holdfast.runtime.protection import unprotected
from holdfast.store import open_backend
from holdfast.store.checkpoints import whole

log = logging.getLogger("holdfast")


def _ignored(*arguments: Any, **named: Any) -> bool:
    """A callback's method that does nothing, or says that it does nothing."""
    return False


vars(_ignored)["_is_default"] = True  # Keras need not call it


class JITCheckpoint:
    """Among the callbacks of ``fit``: this training survives preemption.

    ``dir``, ``save_every``, ``keep`` and ``fallback`` are the settings of these names; ``settings`` takes any other.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,
        *,
        save_every: str | int | None = None,
        keep: int | None = None,
        fallback: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        named = {"dir": dir, "save_every": save_every, "keep": keep, "fallback": fallback}
        given = {**(settings or {}), **{name: value for name, value in named.items() if value is not None}}
        self.settings = Settings.load(**given)
        install_into_loaded()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("on_", "set_", "_implements")):
            if LEFT_ALONE:  # nobody takes it out of the callbacks
                return _ignored
            raise AttributeError(
                f"JITCheckpoint has no {name}: holdfast takes it out of the callbacks when fit begins, and this one "
                f"was made before keras or tf_keras was imported; make it after that"
            )
        raise AttributeError(name)


_hooks: dict[str, FitHooks] = {}
"""By framework, the wrappers that are in place."""
_current: KerasRun | None = None
_finished: dict[str, int] = {}
"""By location, the calls of fit that this process has finished."""


def follow(module: Any, table: PatchSet, tensorflow: PatchSet) -> None:
    """Patch ``keras`` or ``tf_keras``, and TensorFlow where it is loaded; all or nothing."""
    name = module.__name__.partition(".")[0]
    hooks = _hooks.get(name)
    if hooks is None or hooks.framework.keras is not module:
        hooks = _hooks_of(name, module, Tables(table, tensorflow))
    try:
        table.apply(hooks)
        if "tensorflow" in sys.modules:
            tensorflow.apply(keras_seeds.DatasetSeeds(_seeds, _is_on))
        hooks.configure()
    except BaseException:
        table.undo()
        _hooks.pop(name, None)
        raise
    _hooks[name] = hooks


def _hooks_of(name: str, module: Any, tables: Tables) -> FitHooks:
    if name == "tf_keras":
        from holdfast.adapters.keras.v2 import Hooks as Hooks2

        return Hooks2(module, tables, Trainings())
    from holdfast.adapters.keras.v3 import Hooks as Hooks3

    return Hooks3(module, tables, Trainings())


def install_into_loaded() -> None:
    """Patch what the process has imported so far. What was left alone is reported once."""
    for name in ("keras", "tf_keras"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "Model") and (name not in LEFT_ALONE or required()):
            install("keras", module)


class Trainings:
    """The training of one framework in this process."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def fit(self, hooks: FitHooks, original: Callable[..., Any], model: Any, arguments: dict[str, Any]) -> Any:
        """Called instead of ``fit``, with its arguments by name."""
        settings = _settings_for(arguments)
        if settings is None:
            return original(**arguments)
        unsupported = hooks.unsupported()
        if unsupported is not None:
            self._report(unsupported)
            return original(**arguments)
        with claim("keras") as mine:
            if not mine:
                return original(**arguments)
            return _looked_after(hooks, original, model, arguments, settings)

    def outside_of_fit(self) -> None:
        """Weights are about to change, and no ``fit`` is under way."""
        if _is_on():
            self._report(
                "holdfast does not protect this loop: of Keras it protects fit, and neither train_on_batch nor a loop "
                "around a GradientTape"
            )

    def _report(self, what: str) -> None:
        """Once; where that is an error, each time."""
        if required() or what not in self._reported:
            self._reported.add(what)
            unprotected(what)


def _settings_for(arguments: dict[str, Any]) -> Settings | None:
    """Of the JITCheckpoint among the callbacks, which is taken out; else of the environment. None: keep still."""
    callbacks = arguments.get("callbacks")
    given = [one for one in keras_callbacks.flatten(callbacks) if isinstance(one, JITCheckpoint)]
    if given:
        arguments["callbacks"] = _without(callbacks)
    if given:
        return given[0].settings if given[0].settings.enabled else None
    return Settings.load() if _is_on() else None


def _is_on() -> bool:
    """Whether the environment says that every training is looked after."""
    return switch(ENABLED) is True


def _without(callbacks: Any) -> Any:
    if isinstance(callbacks, JITCheckpoint):
        return []
    if isinstance(callbacks, list | tuple):
        return [_without(one) for one in callbacks if not isinstance(one, JITCheckpoint)]
    return callbacks


def _looked_after(
    hooks: FitHooks, original: Callable[..., Any], model: Any, arguments: dict[str, Any], settings: Settings
) -> Any:
    run = _run_for(hooks, model, settings)
    identity = identity_of(model, arguments, sys._getframe())
    fit = run.begin(hooks.framework, model, arguments["initial_epoch"], arguments["epochs"], identity)
    if fit.mode is not Mode.ANEW:
        keras_callbacks.keep_files(keras_callbacks.flatten(arguments.get("callbacks")))
    try:
        history = hooks.run(original, fit, arguments)
        run.finish(fit)
    except BaseException as error:
        run.fail(error)
        raise
    return history


def _run_for(hooks: FitHooks, model: Any, settings: Settings) -> KerasRun:
    """The run of this process at that location; one at another location ends where a new one begins."""
    global _current
    location = os.path.abspath(settings.dir or default_location())
    if _current is not None:
        if not _current.closed and _current.location == location:
            return _current
        _current.end()
    _current = KerasRun(settings, hooks.place(model, settings), location, _finished, _seeds)
    return _current


def _seeds_of_last_attempt() -> list[int]:
    """Of the run that this process will go on with, as far as that is known before it trains."""
    settings = Settings.load()
    if settings.resume == "never" or not settings.checkpointing:
        return []
    try:
        locations = [settings.dir or default_location(), *([settings.fallback] if settings.fallback else [])]
        found = whole([open_backend(location) for location in locations])
        newest = next((one for one in found if settings.resumes_from(one.manifest.run)), None)
        return [] if newest is None else seeds_in(newest, keras_seeds.worker_number())
    except (HoldfastError, OSError) as error:
        log.warning("cannot see how the data of the last attempt was shuffled: %s", error)
        return []


_seeds = keras_seeds.Seeds(_seeds_of_last_attempt)
