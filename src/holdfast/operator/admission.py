"""The webhooks. What they do to an object is in :mod:`.trainjob`, :mod:`.jobset` and :mod:`.ray`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import kopf

from holdfast.operator import jobset, pods, ray, trainjob
from holdfast.operator.names import JOBSET_GROUP, JOBSET_VERSION, JOBSETS, TRAINER_GROUP, TRAINER_VERSION, TRAINJOBS
from holdfast.operator.spec import SpecError

log = logging.getLogger("holdfast.operator")

Change = Callable[..., dict[str, Any]]

Operation = Literal["CREATE", "UPDATE"]

WEBHOOKS: tuple[tuple[str, str, str, str, Change, tuple[Operation, ...]], ...] = (
    ("trainjob", TRAINER_GROUP, TRAINER_VERSION, TRAINJOBS, trainjob.secured, ("CREATE",)),
    ("jobset", JOBSET_GROUP, JOBSET_VERSION, JOBSETS, jobset.secured_jobset, ("CREATE", "UPDATE")),
    ("job", "batch", "v1", "jobs", jobset.secured_job, ("CREATE",)),
    ("raycluster", "ray.io", "v1", "rayclusters", ray.secured, ("CREATE", "UPDATE")),
    ("rayjob", "ray.io", "v1", "rayjobs", ray.secured, ("CREATE", "UPDATE")),
    ("rayservice", "ray.io", "v1", "rayservices", ray.secured, ("CREATE", "UPDATE")),
)
"""Path of the webhook, what it is for, what it does, when."""


def register(registry: kopf.OperatorRegistry, push: Callable[[], pods.Push] = lambda: pods.ASKED) -> None:
    """``push``: where pods tell their progress, now."""
    for path, group, version, plural, change, operations in WEBHOOKS:
        for operation in operations:
            kopf.on.mutate(
                group, version, plural, id=f"{path}-{operation.lower()}", operation=operation, registry=registry
            )(_handler(change, push))


def _handler(change: Change, push: Callable[[], pods.Push]) -> Callable[..., None]:
    def handle(
        body: kopf.Body, patch: kopf.Patch, warnings: list[str], dryrun: bool, old: Any = None, **_: Any
    ) -> None:
        before = _plain(body)
        try:
            if change is jobset.secured_jobset and old is not None:
                jobset.check_update(_plain(old), before)
            after = change(before) if change is ray.secured else change(before, push())
        except SpecError as error:
            log.info("%s %s refused: %s", before.get("kind"), _name(before), error)
            raise kopf.AdmissionError(str(error), code=400) from None
        if change is ray.secured:
            warnings += ray.warnings(after)
        _differences(before, after, patch)
        if patch and not dryrun:
            log.info("%s %s is made safe", before.get("kind"), _name(before))

    return handle


def _plain(value: Any) -> Any:
    if hasattr(value, "items"):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _differences(before: dict[str, Any], after: dict[str, Any], patch: Any) -> None:
    """Into ``patch``, a merge patch: objects are merged, everything else is replaced, None removes."""
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            inner: dict[str, Any] = {}
            _differences(old, new, inner)
            patch[key] = inner
        else:
            patch[key] = new


def _name(thing: dict[str, Any]) -> str:
    meta = thing.get("metadata", {})
    return f"{meta.get('namespace', '')}/{meta.get('name') or meta.get('generateName', '')}"
