"""Jobs for the tests of the operator."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAMESPACE = "holdfast-system"
TRAIN = str(Path(__file__).with_name("train.py"))
CHECKPOINTS = "/workspace/checkpoints"
EPOCHS = 8


def claim(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }


def trainjob(
    name: str, *, epochs: int = EPOCHS, step_s: float = 0.1, cpu: str = "10m", **checkpointing: Any
) -> dict[str, Any]:
    """Two nodes with a process each."""
    block: dict[str, Any] = {
        "interval": "30s",
        "gracePeriodSeconds": 30,
        "storage": {"persistentVolume": {"claimName": name, "mountPath": CHECKPOINTS}},
        "env": [{"name": "HOLDFAST_KILL_WAIT", "value": "0"}],
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "checkpointing": {**block, **checkpointing},
            "trainer": {
                "numNodes": 2,
                "command": ["torchrun", TRAIN, str(epochs), str(step_s), f"{CHECKPOINTS}/digest"],
                "resourcesPerNode": {"requests": {"cpu": cpu, "memory": "64Mi"}, "limits": {"memory": "1500Mi"}},
            },
        },
    }


@functools.cache
def expected_digest(epochs: int = EPOCHS) -> str:
    """Of a run that nothing interrupts, without holdfast."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", TRAIN]
        subprocess.run(
            [sys.executable, *command, str(epochs), "0", f"{folder}/digest"],
            env={**environ, "HOLDFAST_ENABLED": "0", "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
            timeout=120,
        )
        return Path(folder, "digest").read_text()


def crd_spec(kube: Any) -> dict[str, Any]:
    return spec_of(kube.get("crd", "trainjobs.trainer.kubeflow.org"))


def spec_of(crd: dict[str, Any]) -> dict[str, Any]:
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
