"""The webhooks. What they do to an object is in :mod:`.trainjob`, :mod:`.jobset` and :mod:`.ray`."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable
from typing import Any, Literal

from holdfast.operator.admission import jobset, pods, ray, trainjob
from holdfast.operator.names import (
    JOBSET_GROUP,
    JOBSET_VERSION,
    JOBSETS,
    MANAGED,
    TRAINER_GROUP,
    TRAINER_VERSION,
    TRAINJOBS,
)
from holdfast.operator.spec import SpecError

log = logging.getLogger("holdfast.operator")

Change = Callable[..., dict[str, Any]]

Operation = Literal["CREATE", "UPDATE"]

WEBHOOKS: tuple[tuple[str, str, str, str, Change, tuple[Operation, ...]], ...] = (
    ("trainjob", TRAINER_GROUP, TRAINER_VERSION, TRAINJOBS, trainjob.secured, ("CREATE", "UPDATE")),
    ("jobset", JOBSET_GROUP, JOBSET_VERSION, JOBSETS, jobset.secured_jobset, ("CREATE", "UPDATE")),
    ("job", "batch", "v1", "jobs", jobset.secured_job, ("CREATE", "UPDATE")),
    ("raycluster", "ray.io", "v1", "rayclusters", ray.secured, ("CREATE", "UPDATE")),
    ("rayjob", "ray.io", "v1", "rayjobs", ray.secured, ("CREATE", "UPDATE")),
    ("rayservice", "ray.io", "v1", "rayservices", ray.secured, ("CREATE", "UPDATE")),
)
"""Path of the webhook, what it is for, what it does, when."""


class Reviews:
    """Answers the API server, whatever kopf knows of the resource that it asks about: that may be just installed."""

    def __init__(
        self, push: Callable[[], pods.Push] = lambda: pods.ASKED, open_for: frozenset[str] = frozenset()
    ) -> None:
        """``push``: where pods tell their progress, now. ``open_for``: plural names of kinds of which an object that
        cannot be looked at is let through as it is, with a warning, and not refused."""
        self._push = push
        self._changes = {
            f"{path}-{operation.lower()}": (change, plural in open_for)
            for path, _, _, plural, change, operations in WEBHOOKS
            for operation in operations
        }

    async def __call__(self, review: dict[str, Any], *, webhook: str | None = None, **_: Any) -> dict[str, Any]:
        """The answer to an AdmissionReview that came to the path ``webhook``."""
        request = review["request"]
        response: dict[str, Any] = {"uid": request["uid"], "allowed": False}
        new, old = request.get("object") or {}, request.get("oldObject")
        warnings: list[str] = []
        try:
            operations = self._look(webhook, new, old, warnings)
            response["allowed"] = True
            if operations:
                patch = base64.b64encode(json.dumps(operations).encode()).decode()
                response |= {"patch": patch, "patchType": "JSONPatch"}
                if not request.get("dryRun"):
                    log.info("%s %s is made safe", new.get("kind"), _name(new))
        except SpecError as error:
            log.info("%s %s refused: %s", new.get("kind"), _name(new), error)
            response["status"] = {"code": 400, "message": str(error)}
        except _SenselessError as error:
            response["status"] = {"code": 500, "message": str(error)}
        if warnings:
            response["warnings"] = warnings
        return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}

    def _look(self, webhook: str | None, new: dict[str, Any], old: Any, warnings: list[str]) -> list[dict[str, Any]]:
        """What is to be done to an object, as a JSON patch."""
        change, opens = self._changes.get(webhook or "", (None, False))
        if change is None:
            raise _SenselessError(f"holdfast has no webhook {webhook!r}")
        try:
            after = _changed(change, new, old, self._push)
            if change is ray.secured:
                warnings += ray.warnings(after)
            elif old is None:
                warnings += filter(None, (_lost_with_the_pod(after), _out_of_reach(after)))
        except SpecError:
            raise
        except Exception as error:  # such as a list where the CRD, which is asked after us, wants an object
            what = "let through as it is" if opens else "refused"
            log.exception("%s %s is %s: it cannot be looked at", new.get("kind"), _name(new), what)
            said = f"holdfast cannot make sense of this {new.get('kind')} ({type(error).__name__}: {error})"[:300]
            if not opens:
                raise _SenselessError(said) from None
            warnings.append(f"{said}: it is not made safe")
            return []
        patch: dict[str, Any] = {}
        _differences(new, after, patch)
        return _operations(new, patch)


class _SenselessError(Exception):
    """An object cannot be looked at."""


def _changed(change: Change, new: dict[str, Any], old: Any, push: Callable[[], pods.Push]) -> dict[str, Any]:
    if change is ray.secured:
        return change(new)
    if old is not None and change is trainjob.secured:
        trainjob.check_update(old, new)
        return trainjob.kept(old, new)
    if old is not None:
        jobset.check_update(old, new)
        # One that was made without us stays as it is: with what is missing it could not even be suspended.
        secured = jobset.is_secured_job(old) if change is jobset.secured_job else jobset.is_secured(old)
        return change(new, push(), old) if secured else new
    return change(new, push())


def _lost_with_the_pod(thing: dict[str, Any]) -> str | None:
    """In words for whoever creates a job that says nothing of where its checkpoints go."""
    if MANAGED in ((thing.get("metadata") or {}).get("annotations") or {}):
        return None  # a JobSet, of whose TrainJob it was said
    asked = trainjob.asked_by(thing)
    if asked is None or not asked.enabled or asked.location or {"CHECKPOINT_URI", "HOLDFAST_DIR"} & asked.env_names:
        return None
    return (
        "checkpointing.storage is not set: checkpoints go where the training script puts them, and are lost with the "
        "pod unless that is on a volume"
    )


def _out_of_reach(thing: dict[str, Any]) -> str | None:
    """In words for whoever creates a job of several pods with a claim for one node."""
    if MANAGED in ((thing.get("metadata") or {}).get("annotations") or {}):
        return None
    asked = trainjob.asked_by(thing)
    made = [volume.claim for volume in asked.volumes if volume.size] if asked is not None else []
    count = _pods(thing)
    if asked is None or asked.access_mode == "ReadWriteMany" or not made or count < 2:
        return None
    return (
        f"checkpointing.storage.accessMode is {asked.access_mode}, but the claim {made[0]} is for {count} pods: those "
        f"on another node than the first cannot start; ReadWriteMany is for several nodes"
    )


def _pods(thing: dict[str, Any]) -> int:
    """How many a job has at a time, as far as it says so itself."""
    spec = thing.get("spec") or {}
    if thing.get("kind") == "TrainJob":
        return int((spec.get("trainer") or {}).get("numNodes") or 1)
    if thing.get("kind") == "Job":
        return int(spec.get("parallelism") or 1)
    jobs = spec.get("replicatedJobs") or []
    return sum(int(job.get("replicas", 1)) * int(job["template"]["spec"].get("parallelism") or 1) for job in jobs)


def _differences(before: dict[str, Any], after: dict[str, Any], patch: dict[str, Any]) -> None:
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


def _operations(before: dict[str, Any], patch: dict[str, Any], path: str = "") -> list[dict[str, Any]]:
    """The same as a JSON patch."""
    found: list[dict[str, Any]] = []
    for key, new in patch.items():
        place = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
        old = before.get(key)
        if new is None:
            found.append({"op": "remove", "path": place})
        elif isinstance(old, dict) and isinstance(new, dict):
            found += _operations(old, new, place)
        else:
            found.append({"op": "add", "path": place, "value": new})  # in an object it replaces what is there
    return found


def _name(thing: dict[str, Any]) -> str:
    meta = thing.get("metadata", {})
    return f"{meta.get('namespace', '')}/{meta.get('name') or meta.get('generateName', '')}"
