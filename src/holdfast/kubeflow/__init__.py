"""Trainings that survive preemption, through the Kubeflow SDK::

    from kubeflow.trainer import TrainerClient
    from holdfast.kubeflow import PeriodicCheckpointConfig, TransformersTrainer

    TrainerClient().train(
        trainer=TransformersTrainer(func=train, num_nodes=2, output_dir="pvc://checkpoints/qwen"),
    )

What ``TrainerClient.train`` does with other trainers is unchanged. The SDK is imported when it is needed: jobs of this
machine are found without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.errors import JobNotFoundError, MissingExtraError

if TYPE_CHECKING:
    from holdfast.kubeflow.jobs import Progress, checkpoints, delete, logs, pause, progress, resume, wait_for
    from holdfast.kubeflow.panel import Panel
    from holdfast.kubeflow.trainer import PeriodicCheckpointConfig, TransformersTrainer
    from holdfast.kubeflow.view import watch

__all__ = [
    "JobNotFoundError",
    "Panel",
    "PeriodicCheckpointConfig",
    "Progress",
    "TransformersTrainer",
    "checkpoints",
    "delete",
    "logs",
    "pause",
    "progress",
    "resume",
    "wait_for",
    "watch",
]

_MODULES = {
    "jobs": ("Progress", "checkpoints", "delete", "logs", "pause", "progress", "resume", "wait_for"),
    "panel": ("Panel",),
    "trainer": ("PeriodicCheckpointConfig", "TransformersTrainer"),
    "view": ("watch",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            try:
                return getattr(importlib.import_module(f"holdfast.kubeflow.{module}"), name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] in ("kubeflow", "kubernetes"):
                    raise MissingExtraError("kubeflow", "kubeflow", f"holdfast.kubeflow.{name}") from error
                raise
    raise AttributeError(f"module 'holdfast.kubeflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
