"""What is done to a TrainJob as it is created."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

from holdfast.operator.admission import pods
from holdfast.operator.admission.jobset import run_id
from holdfast.operator.names import CHECKPOINTING, CONTAINER, MANAGED, MANAGER
from holdfast.operator.spec import Checkpointing, SpecError, from_annotations, parse


def asked_by(trainjob: dict[str, Any]) -> Checkpointing | None:
    """What a TrainJob asks for; None: nothing."""
    block = (trainjob.get("spec") or {}).get("checkpointing")
    if block is not None:
        return parse(block)
    text = _as_text(trainjob)
    return from_annotations({CHECKPOINTING: text}) if text is not None else None


def _as_text(trainjob: dict[str, Any]) -> str | None:
    """The block as text: from the spec; from an annotation, where the field is not known; or from our own patch.

    Who writes a TrainJob back as a whole, with the fields that it knows, drops the block: Kueue, when it admits a job.
    """
    spec = trainjob.get("spec") or {}
    if spec.get("checkpointing") is not None:
        return json.dumps(spec["checkpointing"])
    text = _annotated(trainjob)
    patches = [_template(patch) for patch in spec.get("runtimePatches") or [] if _is_ours(patch)]
    return next((found for found in (text, *map(_annotated, patches)) if found is not None), None)


def _annotated(thing: dict[str, Any]) -> str | None:
    text: str | None = ((thing.get("metadata") or {}).get("annotations") or {}).get(CHECKPOINTING)
    return text


def is_secured(trainjob: dict[str, Any]) -> bool:
    """Whether our webhook was asked when it was made."""
    return any(_is_ours(patch) for patch in (trainjob.get("spec") or {}).get("runtimePatches") or [])


def _is_ours(patch: dict[str, Any]) -> bool:
    return patch.get("manager") == MANAGER


def _template(patch: dict[str, Any]) -> dict[str, Any]:
    template: dict[str, Any] = (patch.get("trainingRuntimeSpec") or {}).get("template") or {}
    return template


def secured(trainjob: dict[str, Any], push: pods.Push = pods.ASKED) -> dict[str, Any]:
    """The TrainJob with what its training containers need; raises SpecError if what it asks for is not accepted."""
    asked = asked_by(trainjob)
    if asked is None:
        return trainjob
    trainjob = copy.deepcopy(trainjob)
    spec = trainjob["spec"] = trainjob.get("spec") or {}
    trainer = spec["trainer"] = spec.get("trainer") or {}
    # Variables of this container are refused in a runtime patch: upstream wants them here.
    given = trainer.get("env") or []
    variables = pods.added(_without_ours(trainjob, push), pods.variables(asked, run_id(asked), push))
    # A variable of the user that is just like ours has its own place in the list.
    is_there = len(given) == len(variables) and all(variable in variables for variable in given)
    trainer["env"] = given if is_there else variables
    asked.check(trainer["env"])
    text = _as_text(trainjob)
    others = [patch for patch in spec.get("runtimePatches") or [] if not _is_ours(patch)]
    spec["runtimePatches"] = [*others, _runtime_patch(asked, push, text)]
    return trainjob


def _without_ours(trainjob: dict[str, Any], push: pods.Push) -> list[dict[str, Any]]:
    """The variables but for those that an operator added to the job from which this one was copied."""
    spec = trainjob["spec"]
    added: list[dict[str, Any]] = []
    for patch in spec.get("runtimePatches") or []:
        annotations = (_template(patch).get("metadata") or {}).get("annotations") or {}
        with contextlib.suppress(SpecError):
            if _is_ours(patch) and (asked := from_annotations(annotations)) is not None:
                added += pods.variables(asked, run_id(asked), push)
    return [variable for variable in spec["trainer"].get("env") or [] if variable not in added]


def check_update(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Its pods are described once, when it is created."""
    if _as_text(new) is not None and _as_text(old) is None:
        raise SpecError(
            f"spec.checkpointing or the annotation {CHECKPOINTING}: cannot be added to a TrainJob that is there "
            f"already; delete the TrainJob and create it with them"
        )
    text = _annotated(new)
    if text is not None and (new.get("spec") or {}).get("checkpointing") is None and text != _as_text(old):
        raise SpecError(f"annotation {CHECKPOINTING}: cannot be changed after the job was created: make a new TrainJob")


def kept(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What is made of a TrainJob that is there already: ``new``, with what was added to it when it was created.

    Who applies the same manifest again replaces the whole list of its variables by the user's own, and the variables of
    a TrainJob cannot be changed.
    """
    patches = (old.get("spec") or {}).get("runtimePatches") or []
    asked = None
    with contextlib.suppress(SpecError):  # which another version has accepted
        asked = asked_by(old)
    if not is_secured(old) or asked is None:
        return new
    new = copy.deepcopy(new)
    spec = new["spec"] = new.get("spec") or {}
    trainer = spec["trainer"] = spec.get("trainer") or {}
    trainer["env"] = pods.kept(trainer.get("env"), ((old["spec"].get("trainer")) or {}).get("env"), asked)
    if not is_secured(new):
        theirs = {patch.get("manager"): patch for patch in spec.get("runtimePatches") or []}
        known = [patch if _is_ours(patch) else theirs.pop(patch.get("manager"), None) for patch in patches]
        spec["runtimePatches"] = [*(patch for patch in known if patch is not None), *theirs.values()]
    return new


def _runtime_patch(asked: Checkpointing, push: pods.Push, text: str | None) -> dict[str, Any]:
    container: dict[str, Any] = {"name": CONTAINER}
    pod: dict[str, Any] = {}
    if mounts := pods.mounts(asked, push):
        pod["volumes"] = pods.volumes(asked, push)
        container["volumeMounts"] = mounts
        pod["containers"] = [container]
    # For the webhook on the JobSet: a runtime patch has no field for a whole secret, and Kueue drops a grace period.
    # And for whoever wants to know what was asked for: Kueue drops the block itself, too.
    annotations = {MANAGED: "TrainJob", CHECKPOINTING: text}
    return {
        "manager": MANAGER,
        "trainingRuntimeSpec": {
            "template": {
                "metadata": {"annotations": annotations},
                "spec": {"replicatedJobs": [{"name": CONTAINER, "template": {"spec": {"template": {"spec": pod}}}}]},
            }
        },
    }
