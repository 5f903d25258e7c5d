"""Ray Train: workers save just in time, and Ray starts them anew without spending ``max_failures``.

On the driver, Ray builds :class:`JITCheckpointCallback` since ``RAY_TRAIN_CALLBACKS`` names it, and sends it to
every worker; so the environment of the driver alone decides. In the worker, :mod:`holdfast.adapters.ray.worker`
does the rest.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.v2._internal.execution.callback import WorkerCallback, WorkerGroupCallback

from holdfast.adapters.ray.patches import RAY
from holdfast.base.patching import MissingTargetsError
from holdfast.config import Settings, settings_table
from holdfast.errors import ConfigError, HoldfastError
from holdfast.locations import expanded

_PATHS = ("dir", "fallback", "progress_file", "notice_file")
"""Settings that may be relative paths: they mean the driver's folder, not the worker's."""


@dataclass
class JITCheckpointConfig:
    """The explicit way to switch just-in-time checkpoints on, as ``jit_checkpoint_config=`` of a run config.

    Deprecated: ``RAY_TRAIN_JIT_CHECKPOINT_ENABLED`` and ``RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT`` do the same without a
    change of code, and win over it where they are set.
    """

    enabled: bool = False
    kill_wait: float = 3.0

    def __post_init__(self) -> None:
        warnings.warn(
            "JITCheckpointConfig is deprecated: set RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1 and "
            "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT in the environment of the driver instead",
            DeprecationWarning,
            stacklevel=3,
        )
        Settings.load({}, ray_enabled=self.enabled, kill_wait=self.kill_wait)


class JITCheckpointCallback(WorkerGroupCallback, WorkerCallback):  # type: ignore[misc]
    """Built on the driver, kept by Ray's controller, pickled for and called in every worker."""

    def __init__(self, config: JITCheckpointConfig | None = None) -> None:
        """Raises where the settings are wrong: on the driver, before a worker is started."""
        self.config = config
        self.variables: dict[str, str] | None = None
        """What a worker must find in its environment; None: keep out."""
        try:
            if is_enabled(os.environ, config):
                check_version()
                self.variables = _variables(os.environ, config)
        except ConfigError as error:
            # Of a ValueError Ray would only say that the callback cannot be imported.
            raise HoldfastError(str(error)) from None
        self.groups = 0
        """Groups of workers that were started so far, this one included."""
        self._worker: Any = None

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        self.groups += 1

    def after_init_train_context(self) -> None:
        if self.variables is None or self._is_superseded():
            return
        from holdfast.adapters.ray.worker import Worker

        self._worker = Worker(self.variables, restarted=self.groups > 1)
        self._worker.begin()

    def before_worker_shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shut_down()

    def _is_superseded(self) -> bool:
        """Whether the run config brings a callback of its own, which knows more than this one of the environment."""
        from ray.train.v2._internal.execution.context import get_train_context

        others = get_train_context().train_run_context.run_config.callbacks
        return self.config is None and any(isinstance(other, JITCheckpointCallback) for other in others)


def check_version() -> None:
    """Raise where Ray is too old, lacks names of the patch table, or is told to use the old Ray Train.

    Before the oldest version of the table, a worker cannot say that it is preempted.
    """
    found, oldest = (tuple(int(part) for part in text.split(".")[:2]) for text in (ray.__version__, RAY.oldest))
    if found < oldest:
        raise HoldfastError(
            f"just-in-time checkpoints need Ray {RAY.oldest} or newer, and this is Ray {ray.__version__}: upgrade Ray, "
            f"or unset RAY_TRAIN_JIT_CHECKPOINT_ENABLED"
        )
    if missing := RAY.missing():
        raise HoldfastError(f"just-in-time checkpoints do not work here: {MissingTargetsError(RAY, missing)}")
    from ray.train.v2._internal.constants import is_v2_enabled

    if not is_v2_enabled():
        raise HoldfastError(
            "just-in-time checkpoints need Ray Train V2, and RAY_TRAIN_V2_ENABLED=0 switches it off: unset it, or "
            "unset RAY_TRAIN_JIT_CHECKPOINT_ENABLED"
        )


def is_enabled(environ: Mapping[str, str], config: JITCheckpointConfig | None) -> bool:
    """A variable that is set wins over the config; a callback that was named without either is meant to act."""
    settings = Settings.load(environ)
    if not settings.enabled:
        return False
    if environ.get("RAY_TRAIN_JIT_CHECKPOINT_ENABLED"):
        return settings.ray_enabled
    return bool(environ.get("HOLDFAST_ENABLED")) or config is None or config.enabled


def _variables(environ: Mapping[str, str], config: JITCheckpointConfig | None) -> dict[str, str]:
    """holdfast's part of the driver's environment, with what the config adds where no variable is set."""
    table = settings_table()
    variables = {
        name: environ[name] for setting in table.values() for name in setting.env if environ.get(name, "") != ""
    }
    for name in (variable for setting in _PATHS for variable in table[setting].env):
        if name in variables and "://" not in variables[name]:
            variables[name] = os.path.abspath(expanded(variables[name]))
    waits = table["kill_wait"].env
    if config is not None and not any(name in variables for name in waits):
        variables[waits[0]] = str(config.kill_wait)
    return variables
