"""Training that survives preemption: saved just in time, resumed exactly.

Importing this package costs only the standard library: no torch, no threads, no signal handlers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.errors import (
    CheckpointCorruptError,
    ConfigError,
    HoldfastError,
    LocationBusyError,
    MissingExtraError,
    Preempted,
    StateError,
    StoreError,
)

if TYPE_CHECKING:
    from holdfast.adapters.replay.track import track
    from holdfast.notice import listen
    from holdfast.torch.run import Run

__version__ = "0.1.0"

__all__ = [
    "CheckpointCorruptError",
    "ConfigError",
    "HoldfastError",
    "LocationBusyError",
    "MissingExtraError",
    "Preempted",
    "Run",
    "StateError",
    "StoreError",
    "listen",
    "track",
]


def __getattr__(name: str) -> Any:
    if name == "Run":
        try:
            importlib.import_module("numpy")  # torch needs it only once a random state is saved
            from holdfast.torch.run import Run
        except ModuleNotFoundError as error:
            if error.name in ("torch", "numpy", "safetensors"):
                raise MissingExtraError(error.name, "torch", "holdfast.Run") from error
            raise
        return Run
    if name == "track":
        from holdfast.adapters.replay.track import track

        return track
    if name == "listen":
        from holdfast.notice import listen

        return listen
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
