"""What is added to a pod template so that the training in it can be saved."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from holdfast.operator.names import AUDIENCE, TOKEN_FOLDER
from holdfast.operator.spec import Checkpointing

_VOLUMES = ("holdfast-checkpoints", "holdfast-fallback")
_TOKEN = "holdfast-token"
_TOKEN_S = 3600
_LOST_NODE_S = 30
"""A pod on a node that does not answer is given up after this time instead of the usual five minutes."""
_SWITCH = "HOLDFAST_ENABLED"
"""A variable that the container has which trains."""
_TOLD = ("HOLDFAST_PROGRESS_URL", "HOLDFAST_PROGRESS_CA", "HOLDFAST_PROGRESS_TOKEN_FILE")
"""Variables that a container has where pods tell their progress."""
_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


Push = Mapping[str, str]
"""Variables that say where a pod tells its progress."""
ASKED: Push = MappingProxyType({})
"""It does not: it is asked."""


def volumes(asked: Checkpointing, push: Push) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "persistentVolumeClaim": {"claimName": volume.claim}}
        for name, volume in zip(_VOLUMES, asked.volumes, strict=False)
    ]
    if push:
        token = {"audience": AUDIENCE, "expirationSeconds": _TOKEN_S, "path": "token"}
        found.append({"name": _TOKEN, "projected": {"sources": [{"serviceAccountToken": token}]}})
    return found


def mounts(asked: Checkpointing, push: Push) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "mountPath": volume.path} for name, volume in zip(_VOLUMES, asked.volumes, strict=False)
    ]
    return [*found, {"name": _TOKEN, "mountPath": TOKEN_FOLDER, "readOnly": True}] if push else found


def variables(asked: Checkpointing, run_id: dict[str, Any], push: Push) -> list[dict[str, Any]]:
    more = {**push, "HOLDFAST_PROGRESS_TOKEN_FILE": f"{TOKEN_FOLDER}/token"} if push else {}
    return added(asked.variables(run_id), [{"name": name, "value": value} for name, value in more.items()])


def run_id(asked: Checkpointing, by_name: str, by_uid: str) -> dict[str, Any]:
    """Where a container finds what all starts of its job share: a label of the pod.

    A job of the same name goes on from what the one before it has saved, unless it is told not to; then what they
    share must be of this one job alone.
    """
    return {"fieldRef": {"fieldPath": f"metadata.labels['{by_name if asked.resume else by_uid}']"}}


def tolerations() -> list[dict[str, Any]]:
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_NODE_S} for key in _LOST
    ]


def added(there: list[dict[str, Any]] | None, more: list[dict[str, Any]], key: str = "name") -> list[dict[str, Any]]:
    """``there`` and those of ``more`` whose name is not there yet: what the user wrote wins."""
    known = {item.get(key) for item in there or []}
    return [*(there or []), *(copy.deepcopy(item) for item in more if item.get(key) not in known)]


def secure(template: dict[str, Any], asked: Checkpointing, run_id: dict[str, Any], push: Push) -> None:
    """Change a pod template, whose first container trains, in place."""
    spec = template["spec"]
    trains = (spec.get("containers") or [])[:1]
    mount(spec, trains, asked, push)
    spec["tolerations"] = added(spec.get("tolerations"), tolerations(), "key")
    spec["terminationGracePeriodSeconds"] = max(asked.grace_s, spec.get("terminationGracePeriodSeconds") or 0)
    for container in trains:
        container["env"] = added(container.get("env"), variables(asked, run_id, push))
        asked.check(container["env"])
    if asked.secret:
        add_secret(trains, asked.secret)


def kept(there: list[dict[str, Any]] | None, old: list[dict[str, Any]] | None, asked: Checkpointing) -> list[Any]:
    """Variables as somebody writes them anew, and those of ours that they had before: ``old``."""
    ours = {variable["name"] for variable in asked.variables({})} | set(_TOLD)
    return added(there, [variable for variable in old or [] if variable["name"] in ours])


def put_back(template: dict[str, Any], old: dict[str, Any], asked: Checkpointing) -> None:
    """Into a pod template that somebody has written anew, in place: what was added to it as it was before.

    As it was then, and not as it would be made now: an operator with other values would make it one that must not be
    changed.
    """
    spec, before = template["spec"], old.get("spec") or {}
    containers = {container["name"]: container for container in before.get("containers") or []}
    trained = {name for name, one in containers.items() if _has(one, _SWITCH)}
    trains = [container for container in spec.get("containers") or [] if container["name"] in trained]
    mount_again(spec, trains, before)
    if ours := [one for one in before.get("tolerations") or [] if one.get("key") in _LOST]:
        spec["tolerations"] = added(spec.get("tolerations"), ours, "key")
    if before.get("terminationGracePeriodSeconds"):
        graces = (one.get("terminationGracePeriodSeconds") or 0 for one in (spec, before))
        spec["terminationGracePeriodSeconds"] = max(graces)
    for container in trains:
        container["env"] = kept(container.get("env"), containers[container["name"]].get("env"), asked)
        if asked.secret and {"secretRef": {"name": asked.secret}} in containers[container["name"]].get("envFrom", []):
            add_secret([container], asked.secret)


def _has(container: dict[str, Any], name: str) -> bool:
    return any(variable.get("name") == name for variable in container.get("env") or [])


def mount(spec: dict[str, Any], containers: list[dict[str, Any]], asked: Checkpointing, push: Push) -> None:
    """The claims, in these containers of a pod, in place."""
    _mount(spec, containers, volumes(asked, push), mounts(asked, push))


def mount_again(spec: dict[str, Any], containers: list[dict[str, Any]], old: dict[str, Any]) -> None:
    """What an earlier description of the pod had mounted for us in the containers of these names."""
    names = {container["name"] for container in containers}
    there = [
        mount for one in old.get("containers") or [] if one["name"] in names for mount in one.get("volumeMounts") or []
    ]
    ours = (*_VOLUMES, _TOKEN)
    _mount(
        spec,
        containers,
        [volume for volume in old.get("volumes") or [] if volume["name"] in ours],
        [mount for mount in there if mount["name"] in ours],
    )


def _mount(
    spec: dict[str, Any],
    containers: list[dict[str, Any]],
    volumes: list[dict[str, Any]],
    mounts: list[dict[str, Any]],
) -> None:
    if volumes and containers:
        spec["volumes"] = added(spec.get("volumes"), volumes)
        for container in containers:
            container["volumeMounts"] = added(container.get("volumeMounts"), mounts, "mountPath")


def add_secret(containers: list[dict[str, Any]], secret: str) -> None:
    """Its keys become variables of these containers."""
    for container in containers:
        sources = container.setdefault("envFrom", [])
        if {"secretRef": {"name": secret}} not in sources:
            sources.append({"secretRef": {"name": secret}})
