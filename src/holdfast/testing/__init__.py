"""Suites and tools for tests, ours and yours. Nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.testing.backend_contract import BackendContract
    from holdfast.testing.store_machine import CheckpointMachine, CrashingBackend

__all__ = ["BackendContract", "CheckpointMachine", "CrashingBackend"]

_HOME = {
    "BackendContract": "backend_contract",
    "CheckpointMachine": "store_machine",
    "CrashingBackend": "store_machine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
