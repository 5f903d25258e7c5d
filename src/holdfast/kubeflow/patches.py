"""The Kubeflow SDK: its ``train`` hands a TransformersTrainer to holdfast; all other trainers go through untouched."""

from __future__ import annotations

from holdfast.base.patching import Patch, PatchSet, Reads

_LOCAL = "kubeflow.trainer.backends.localprocess"

KUBEFLOW = PatchSet(
    framework="kubeflow",
    oldest="0.5",
    newest="0.5.0",
    patches=(
        Patch(
            target="kubeflow.trainer.backends.kubernetes.backend:KubernetesBackend.train",
            wrap="on_cluster",
            why="complete the TrainJob with its volume, grace period and variables",
        ),
        Patch(
            target=f"{_LOCAL}.backend:LocalProcessBackend.train",
            wrap="on_this_machine",
            why="start a job that outlives this process, can be paused and found again",
        ),
        Patch(
            target="kubeflow.trainer.backends.container.backend:ContainerBackend.train",
            wrap="in_container",
            why="refuse: the container would have neither the volume nor holdfast",
        ),
    ),
    reads=(
        Reads(f"{_LOCAL}.backend:LocalProcessBackend._LocalProcessBackend__register_job"),
        Reads(f"{_LOCAL}.job:LocalJob._cancel_requested"),
    ),
)
TABLES = (KUBEFLOW,)


def install(kind: type) -> None:
    """``kind``: the class of the trainers that holdfast submits. MissingTargetsError: this SDK cannot be used."""
    from holdfast.kubeflow.wrappers import Wrappers

    KUBEFLOW.apply(Wrappers(kind))
