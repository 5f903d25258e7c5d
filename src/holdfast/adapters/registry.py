"""The adapters: what each is for, what it is installed into, and what switches it on. Standard library only.

An adapter is a package with a module ``patches``: ``TABLES`` holds its patch tables, and ``install(module)`` applies
the one that fits. It may be called again: for the same module it changes nothing, and after ``importlib.reload`` it
patches what is new. Importing ``patches`` costs the standard library alone.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from _holdfast_startup import ENABLED, RAY_ENABLED, TRIGGERS, acts, required, switch
from holdfast.base.patching import MissingTargetsError, PatchSet
from holdfast.errors import UnprotectedError
from holdfast.runtime import ownership

log = logging.getLogger("holdfast")

_RAY_CALLBACKS = "RAY_TRAIN_CALLBACKS"
_RAY_CALLBACK = "holdfast.adapters.ray.callback.JITCheckpointCallback"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A row of the table."""

    name: str
    """Name of its package, ``holdfast.adapters.<name>``."""
    packages: Mapping[str, str]
    """Distributions of the framework, each with the oldest version that is supported; one of them is needed."""
    switches: tuple[str, ...]
    """Variables, of which one that is true switches it on."""
    description: str
    extra: str
    unasked: str = ""
    """What it does where no variable is set."""

    @property
    def triggers(self) -> tuple[str, ...]:
        """Modules after whose import it is installed."""
        return tuple(trigger for trigger, name in TRIGGERS.items() if name == self.name)

    def acts(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether it would be installed; raises ValueError for a variable with a wrong value."""
        return acts(self.name, environ)


ADAPTERS = (
    Adapter(
        "transformers",
        {"transformers": "5.3"},
        (ENABLED,),
        "transformers.Trainer, and trainers made from it such as TRL's",
        "transformers",
        unasked="a Trainer with enable_jit_checkpoint=True",
    ),
    Adapter(
        "lightning",
        {"lightning": "2.6", "pytorch-lightning": "2.6"},
        (ENABLED,),
        "fit of a Lightning Trainer",
        "lightning",
    ),
    Adapter(
        "keras",
        {"keras": "3.11", "tf-keras": "2.18"},
        (ENABLED,),
        "fit of a Keras model, of Keras 3 and of tf-keras",
        "keras",
    ),
    Adapter("ray", {"ray": "2.58"}, (ENABLED, RAY_ENABLED), "training functions of Ray Train", "ray"),
    Adapter("replay", {"torch": "2.6"}, (ENABLED,), "PyTorch loops without a framework", "torch"),
    Adapter(
        "torchrun", {"torch": "2.6"}, (ENABLED,), "the exit code of torchrun, and the time it leaves its ranks", "torch"
    ),
)


def tables(name: str) -> tuple[PatchSet, ...]:
    """Patch tables of the adapter, one for each library that it touches."""
    found: tuple[PatchSet, ...] = importlib.import_module(f"holdfast.adapters.{name}.patches").TABLES
    return found


def install(name: str, module: Any) -> None:
    """Install an adapter into the framework's ``module``, which was just imported.

    A framework that lacks names of the adapter's table stays untouched. One warning says so; with
    ``HOLDFAST_ENABLED=require`` its training function raises UnprotectedError instead.
    """
    patches = importlib.import_module(f"holdfast.adapters.{name}.patches")
    try:
        patches.install(module)
    except MissingTargetsError as error:
        if required():
            refusal = UnprotectedError(f"{error}. HOLDFAST_ENABLED=require refuses to train unprotected")
            if error.table.refuse(refusal):
                return
            raise refusal from error
        ownership.leave_alone(error.table.entry.partition(":")[0])
        unasked = switch(ENABLED) is None and any(one.name == name and one.unasked for one in ADAPTERS)
        level = logging.DEBUG if unasked else logging.WARNING
        log.log(level, "holdfast leaves %s alone, training with it is not protected: %s", error.table.framework, error)
        return
    if name == "ray":
        _register_with_ray()


def _register_with_ray() -> None:
    """Ray Train builds the callbacks that this variable names on the driver, and sends them to the workers."""
    named = [text.strip() for text in os.environ.get(_RAY_CALLBACKS, "").split(",") if text.strip()]
    if _RAY_CALLBACK not in named:
        os.environ[_RAY_CALLBACKS] = ",".join([*named, _RAY_CALLBACK])
