"""Every exception that holdfast raises, named by what the caller can do about it.

::

    HoldfastError
    ├── ConfigError            (ValueError)         a setting is wrong: fix the value it names
    ├── MissingExtraError      (ImportError)        an optional package is missing: install the extra it names
    ├── StateError             (TypeError)          an object cannot be saved or restored exactly
    ├── StoreError             (OSError)            the storage location failed
    │   ├── StoreUnavailableError (ConnectionError)  out of reach or too slow: retry, or use the fallback
    │   ├── LocationBusyError                       another live run writes there: choose another location
    │   ├── CheckpointExistsError (FileExistsError) a checkpoint of that name is there already
    │   ├── CheckpointNotFoundError (FileNotFoundError)
    │   └── CheckpointCorruptError (ValueError)     bytes differ from the manifest: use an older checkpoint
    ├── UnprotectedError       (RuntimeError)       HOLDFAST_ENABLED=require, and this run cannot be protected
    ├── MissingTargetsError    (AttributeError)     a framework lacks names that its patch table needs
    ├── JobNotFoundError       (LookupError)        there is no job of that name
    └── AgreementError         (TimeoutError)       the ranks could not agree in time

    Preempted (SystemExit)     the run was saved and the process leaves; not an error
"""

from __future__ import annotations

from typing import Any


class HoldfastError(Exception):
    """Base of all errors of holdfast."""


class ConfigError(HoldfastError, ValueError):
    """A setting has a value that is not accepted. The message names the setting, the value and what is accepted."""


class MissingExtraError(HoldfastError, ImportError):
    """An optional dependency is not installed. The message holds the pip command."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed: pip install 'holdfast[{extra}]'"
        )
        self.extra = extra


class StateError(HoldfastError, TypeError):
    """A state cannot be saved without running code on load, or does not fit what it is restored into."""


class StoreError(HoldfastError, OSError):
    """A storage location refused or failed an operation."""


class StoreUnavailableError(StoreError, ConnectionError):
    """A storage location is out of reach, or did not answer in time."""


class LocationBusyError(StoreError):
    """Another run that is still alive writes into this location."""

    beside = False
    """Whether it is known to be alive, as a process of this very machine."""

    holder: Any = None
    """The process that writes there, an ``Owner``, where it has said who it is."""


class CheckpointExistsError(StoreError, FileExistsError):
    """A checkpoint, or an unfinished one of a live writer, already has this name."""


class CheckpointNotFoundError(StoreError, FileNotFoundError):
    """There is no whole checkpoint of this name."""


class CheckpointCorruptError(StoreError, ValueError):
    """A checkpoint's bytes are not those that its manifest names."""


class UnprotectedError(HoldfastError, RuntimeError):
    """``HOLDFAST_ENABLED=require`` is set, and this training run cannot be protected. The message says why."""


class JobNotFoundError(HoldfastError, LookupError):
    """There is no job of that name, on this machine or in the cluster."""


class AgreementError(HoldfastError, TimeoutError):
    """The ranks of a job could not agree on a step in time."""


class Preempted(SystemExit):
    """Raised at a step boundary once the just-in-time checkpoint is committed; ends the process with ``exit_code``."""

    def __init__(self, exit_code: int, step: int, reason: str) -> None:
        super().__init__(exit_code)
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        return f"stopped at step {self.step} ({self.reason}), exit code {self.code}"
