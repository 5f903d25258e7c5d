"""Test suites and fault injection, for our tests and yours.

For a backend of your own: :class:`BackendContract`, :class:`CheckpointMachine` and :class:`CrashingBackend`, whose
:class:`Power` fails. For a training loop of your own: :class:`Injector` carries out a :class:`Fault` at an exact place.

Nothing is imported before it is used: the suites need pytest and Hypothesis, fault injection does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.testing.backend_contract import BackendContract
    from holdfast.testing.faults import PHASES, Fault, InjectedError, Injector, notices, report_saves
    from holdfast.testing.store_machine import CheckpointMachine, CrashingBackend, Power, PowerCutError

__all__ = [
    "PHASES",
    "BackendContract",
    "CheckpointMachine",
    "CrashingBackend",
    "Fault",
    "InjectedError",
    "Injector",
    "Power",
    "PowerCutError",
    "notices",
    "report_saves",
]

_HOME = {
    "BackendContract": "backend_contract",
    "CheckpointMachine": "store_machine",
    "CrashingBackend": "store_machine",
    "Fault": "faults",
    "InjectedError": "faults",
    "Injector": "faults",
    "PHASES": "faults",
    "Power": "store_machine",
    "PowerCutError": "store_machine",
    "notices": "faults",
    "report_saves": "faults",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
