"""What is added to a pod template so that the training in it can be saved."""

from __future__ import annotations

import copy
from typing import Any

from holdfast.operator.spec import Checkpointing

_VOLUMES = ("holdfast-checkpoints", "holdfast-fallback")
_LOST_NODE_S = 30
"""A pod on a node that does not answer is given up after this time instead of the usual five minutes."""
_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def volumes(asked: Checkpointing) -> list[dict[str, Any]]:
    return [
        {"name": name, "persistentVolumeClaim": {"claimName": volume.claim}}
        for name, volume in zip(_VOLUMES, asked.volumes, strict=False)
    ]


def mounts(asked: Checkpointing) -> list[dict[str, Any]]:
    return [{"name": name, "mountPath": volume.path} for name, volume in zip(_VOLUMES, asked.volumes, strict=False)]


def tolerations() -> list[dict[str, Any]]:
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_NODE_S} for key in _LOST
    ]


def added(there: list[dict[str, Any]] | None, more: list[dict[str, Any]], key: str = "name") -> list[dict[str, Any]]:
    """``there`` and those of ``more`` whose name is not there yet: what the user wrote wins."""
    known = {item.get(key) for item in there or []}
    return [*(there or []), *(copy.deepcopy(item) for item in more if item.get(key) not in known)]


def secure(template: dict[str, Any], asked: Checkpointing, run_id: dict[str, Any], *, containers: int = 1) -> None:
    """Change a pod template in place. ``containers``: how many of its containers train, from the first."""
    spec = template["spec"]
    spec["volumes"] = added(spec.get("volumes"), volumes(asked))
    if not spec["volumes"]:
        del spec["volumes"]
    spec["tolerations"] = added(spec.get("tolerations"), tolerations(), "key")
    spec["terminationGracePeriodSeconds"] = max(asked.grace_s, spec.get("terminationGracePeriodSeconds") or 0)
    for container in (spec.get("containers") or [])[:containers]:
        container["env"] = added(container.get("env"), asked.variables(run_id))
        if asked.secret:
            secrets = container.setdefault("envFrom", [])
            if {"secretRef": {"name": asked.secret}} not in secrets:
                secrets.append({"secretRef": {"name": asked.secret}})
        if asked.volumes:
            container["volumeMounts"] = added(container.get("volumeMounts"), mounts(asked), "mountPath")
