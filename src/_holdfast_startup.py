"""Run by ``holdfast.pth`` at the start of every Python process of the environment; hence it costs next to nothing.

It imports nothing that the interpreter has not loaded by then, and puts one finder in place that looks at the name of
what is imported. When a framework of :data:`TRIGGERS` is imported and the environment says so, the adapter for it is
installed right after. ``HOLDFAST_ENABLED=0``: not even the finder.

Another finder, the last one, finds the modules of :data:`STAND_INS`, which documents import from frameworks that do not
have them. It is there with ``HOLDFAST_ENABLED=0`` too: a script that imports them must run, and then they do nothing.

A process whose environment is wrong (``HOLDFAST_ENABLED=maybe``) may be anything, ``pip`` or an editor. So it is
treated as off, and the message waits until a framework is imported.
"""

import os
import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

ENABLED = "HOLDFAST_ENABLED"
RAY_ENABLED = "RAY_TRAIN_JIT_CHECKPOINT_ENABLED"

TRIGGERS = {
    "transformers.trainer": "transformers",
    "lightning.pytorch.trainer.trainer": "lightning",
    "pytorch_lightning.trainer.trainer": "lightning",
    "keras": "keras",
    "tf_keras": "keras",
    "ray.train": "ray",
    "torch": "replay",
    "torch.distributed.launcher.api": "torchrun",
}
"""Module of a framework, and the adapter that is installed once it is imported; see ``holdfast.adapters.registry``."""

STAND_INS = {
    "ray.train._internal.jit_checkpoint_config": ("holdfast.ray", ("JITCheckpointConfig",)),
    "kubeflow.trainer.rhai": ("holdfast.kubeflow", ("TransformersTrainer",)),
    "kubeflow.trainer.rhai.transformers": ("holdfast.kubeflow", ("PeriodicCheckpointConfig", "TransformersTrainer")),
}
"""Modules that a framework may not have, and which names of holdfast they then hold."""

started = False
"""Whether ``holdfast.pth`` was read."""

FOLDER: "str | None" = None
"""The working folder that the process was started in."""

REQUIRE = "require"
"""Value of ``HOLDFAST_ENABLED`` that refuses to train unprotected."""

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_IMPORTLIB = "<frozen importlib._bootstrap_external>"
_searching: set[tuple[str, int]] = set()
_complaints: set[str] = set()


def switch(name: str, environ: "Mapping[str, str]" = os.environ) -> "bool | None":
    """What the variable says: True, False, or None where it is not set. ValueError: it has another value."""
    text = environ.get(name, "").strip().lower()
    if not text:
        return None
    if text == REQUIRE and name == ENABLED:
        return True
    if text not in _TRUE and text not in _FALSE:
        more = f", or {REQUIRE}" if name == ENABLED else ""
        raise ValueError(f"{name}={environ[name]!r} is not accepted; it must be 1/true/yes/on or 0/false/no/off{more}")
    return text in _TRUE


def required(environ: "Mapping[str, str]" = os.environ) -> bool:
    """``HOLDFAST_ENABLED=require``: a run that cannot be protected must not train."""
    return environ.get(ENABLED, "").strip().lower() == REQUIRE


def acts(adapter: str, environ: "Mapping[str, str]" = os.environ) -> bool:
    """Whether the adapter is to be installed. transformers' always is: a Trainer may be told by its arguments."""
    everything = switch(ENABLED, environ)
    if everything is False:
        return False
    ray = switch(RAY_ENABLED, environ) if adapter == "ray" else None
    return (everything is True or adapter == "transformers") if ray is None else ray


def start() -> None:
    """Called by ``holdfast.pth``."""
    global started, FOLDER
    started = True
    if StandIn not in sys.meta_path:
        sys.meta_path.append(StandIn)
    if os.environ.get(ENABLED, "").strip().lower() in _FALSE:
        return
    try:
        FOLDER = os.getcwd()
    except OSError:  # it has been removed
        FOLDER = None
    for name in TRIGGERS:
        if name in sys.modules:
            _imported(name, sys.modules[name])
    sys.meta_path.insert(0, Finder)


class Finder:
    """Finds what the other finders find, and learns when a trigger has been imported."""

    @staticmethod
    def find_spec(name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in TRIGGERS or (name, get_ident()) in _searching:
            return None
        _searching.add((name, get_ident()))
        try:
            for finder in sys.meta_path:
                spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
                if spec is not None:
                    _watch(name, spec.loader)
                    return spec
        finally:
            _searching.discard((name, get_ident()))
        return None


class StandIn:
    """Finds and fills the modules of :data:`STAND_INS`. It is the last to be asked: what a framework ships wins."""

    @staticmethod
    def find_spec(name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in STAND_INS:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, StandIn, is_package=any(other.startswith(f"{name}.") for other in STAND_INS))  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: "Any") -> None:
        """The default one."""

    @staticmethod
    def exec_module(module: "Any") -> None:
        from importlib import import_module

        source, names = STAND_INS[module.__name__]
        try:
            for name in names:
                setattr(module, name, getattr(import_module(source), name))
        except Exception as error:
            if isinstance(error, ImportError):
                raise
            raise ImportError(str(error), name=module.__name__) from error  # what scripts are prepared for


def _watch(name: str, loader: "Any") -> None:
    """Let ``loader`` tell when it has executed the module. It stays the object that it is: others look at its type."""
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: "Any") -> None:
        if module.__name__ == name:
            vars(loader).pop("exec_module", None)
        execute(module)
        if module.__name__ == name:
            _imported(name, module)

    # A line of importlib's own, as far as tracebacks are concerned: Python leaves those out.
    exec_module.__code__ = exec_module.__code__.replace(co_filename=_IMPORTLIB)
    try:
        loader.exec_module = exec_module
    except (AttributeError, TypeError):
        _complain(f"{name} comes from a {type(loader).__qualname__}, which cannot be watched: holdfast keeps out of it")


def _imported(name: str, module: "Any") -> None:
    try:
        if not acts(TRIGGERS[name]):
            return
    except ValueError as error:
        _complain(f"{error}. holdfast keeps out of this process")
        return
    try:
        from holdfast.adapters.registry import install

        install(TRIGGERS[name], module)
    except Exception as error:
        if required():
            raise
        _complain(f"holdfast keeps out of {name}, its adapter failed: {type(error).__name__}: {error}")


def _complain(text: str) -> None:
    if text not in _complaints:
        _complaints.add(text)
        import logging

        logging.getLogger("holdfast").warning("%s", text)
