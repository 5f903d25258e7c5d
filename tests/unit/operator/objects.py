"""Objects of the cluster, as the tests of the operator need them."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast.operator.admission import pods
from holdfast.operator.admission import review as admission
from holdfast.operator.names import CHECKPOINTING, MANAGED
from holdfast.operator.reconcile import status
from holdfast.operator.spec import Checkpointing

NOW = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)


def merged(before: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(before) if isinstance(before, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def is_within(theirs: Any, ours: Any) -> bool:
    """Whether all that is in ``theirs`` is in ``ours`` too; lists in the same order, perhaps with more between."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return all(key in ours and is_within(value, ours[key]) for key, value in theirs.items())
    if isinstance(theirs, list) and isinstance(ours, list):
        rest = iter(ours)
        return all(any(is_within(one, other) for other in rest) for one in theirs)
    return bool(theirs == ours)


FULL: dict[str, Any] = {
    "enabled": True,
    "interval": "5m",
    "maxCheckpoints": 3,
    "resumeFromCheckpoint": True,
    "gracePeriodSeconds": 90,
    "storage": {
        "uri": "s3://bucket/prefix",
        "accessMode": "ReadWriteMany",
        "persistentVolume": {"claimName": "first", "mountPath": "/first", "size": "10Gi", "storageClassName": "fast"},
        "secretRef": {"name": "keys"},
        "fallback": {"persistentVolume": {"claimName": "second", "mountPath": "/second"}},
    },
    "env": [
        {"name": "CHECKPOINT_STRATEGY", "value": "epoch"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
    ],
}


PLACE = {"claimName": "first", "mountPath": "/first"}


def values(asked: Checkpointing | None) -> dict[str, str]:
    assert asked is not None
    return {one["name"]: one.get("value", "") for one in asked.variables()}


RUNTIME = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed"}


def train_job(asks: Any = None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "gpt", "namespace": "default"},
        "spec": {"runtimeRef": dict(RUNTIME), **({} if asks is None else {"checkpointing": asks}), **spec},
    }


def pod_template(**more: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "node", "image": "x"}], **more}}


def job_set(
    annotations: dict[str, str] | None, *, names: tuple[str, ...] = ("node",), **template: Any
) -> dict[str, Any]:
    jobs = [{"name": name, "template": {"spec": {"template": pod_template(), **template}}} for name in names]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "gpt", "namespace": "default", "annotations": annotations},
        "spec": {"replicatedJobs": copy.deepcopy(jobs)},
    }


def job(annotations: dict[str, str] | None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "gpt", "namespace": "default", "annotations": annotations},
        "spec": {"template": pod_template(), **copy.deepcopy(spec)},
    }


ASKS = {CHECKPOINTING: json.dumps(FULL)}


FROM_TRAINJOB = {MANAGED: "TrainJob", CHECKPOINTING: json.dumps({"storage": {"secretRef": {"name": "keys"}}})}


PUSH = {"HOLDFAST_PROGRESS_URL": "https://operator:9444/progress", "HOLDFAST_PROGRESS_CA": "PEM"}


def updated(change: Any, new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    return admission._changed(change, new, old, lambda: pods.ASKED)


def pod(
    name: str = "gpt-node-0-0",
    *,
    exit_code: int | None = None,
    running: bool = False,
    reason: str = "Error",
    deleted: bool = False,
    disrupted: bool = False,
    made_s: float = 0,
    ended_s: float = 100,
    index: str | None = "0",
    kind: str = "TrainJob",
    **more: Any,
) -> dict[str, Any]:
    def at(seconds: float) -> str:
        return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")

    state: dict[str, Any] = {"waiting": {}}
    phase = "Pending"
    if running:
        state, phase = {"running": {"startedAt": at(made_s)}}, "Running"
    if exit_code is not None:
        state = {"terminated": {"exitCode": exit_code, "reason": reason, "finishedAt": at(ended_s)}}
        phase = "Failed" if exit_code else "Succeeded"
    labels = {
        MANAGED: kind,
        "jobset.sigs.k8s.io/jobset-name": "gpt",
        "batch.kubernetes.io/job-name": "gpt" if kind == "Job" else "gpt-node-0",
        **({} if index is None else {"batch.kubernetes.io/job-completion-index": index}),
    }
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "labels": labels,
            "creationTimestamp": at(made_s),
            **({"deletionTimestamp": at(ended_s)} if deleted else {}),
        },
        "spec": {"containers": [{"name": "node"}], "nodeName": "one"},
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": "node", "state": state}],
            "conditions": [{"type": "DisruptionTarget", "status": "True"}] if disrupted else [],
        },
        **more,
    }


def told(name: str, reason: str = "", message: str = "") -> dict[str, Any]:
    condition = {"type": name, "status": "True", "reason": reason, "message": message}
    return {"spec": {}, "status": {"conditions": [condition]}}


PROGRESS_NOW: dict[str, Any] = {
    "epoch": 2,
    "step": 150,
    "totalSteps": 300,
    "loss": "0.4523",
    "percentComplete": "50.0",
    "estimatedTimeRemaining": "1h 45m",
    "lastUpdateTime": "2026-11-15T12:00:00Z",
    "resumedFrom": "checkpoint-100",
    "checkpointing": {"enabled": True, "latestCheckpoint": "/c/checkpoint-150", "checkpointsCreated": 3},
}


def look(before: dict[str, Any], phase: str, progress: dict[str, Any] | None, source: Any = None, problem: Any = None):
    return status.combined(before, phase, "", progress, problem, source, NOW)


KEY = ("TrainJob", "default", "gpt")


def body(**more: Any) -> dict[str, Any]:
    thing = train_job({"interval": "5m"})
    thing["metadata"] |= {"uid": "uid-gpt", "generation": 1}
    return {**thing, **more}


def step_told(step: int) -> dict[str, Any]:
    """A minute ago, and each step a second after the one before it."""
    at = datetime.now(UTC) + timedelta(seconds=step - 60)
    return {"step": step, "lastUpdateTime": at.isoformat()}


def ended_pod(name: str, progress: dict[str, Any], **more: Any) -> dict[str, Any]:
    """As the kubelet shows a pod whose container has left this."""
    one = pod(name, exit_code=143, **more)
    one["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = json.dumps(progress)
    return one
