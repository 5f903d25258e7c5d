"""What is done to a TrainJob as it is created."""

from __future__ import annotations

import copy
import json
from typing import Any

from holdfast.operator import pods
from holdfast.operator.names import CHECKPOINTING, CONTAINER, JOBSET_NAME_LABEL, MANAGED, MANAGER
from holdfast.operator.spec import Checkpointing, from_annotations, parse

RUN_ID = {"fieldRef": {"fieldPath": f"metadata.labels['{JOBSET_NAME_LABEL}']"}}


def asked_by(trainjob: dict[str, Any]) -> Checkpointing | None:
    """What a TrainJob asks for, in its spec or, where the field is not known, in an annotation; None: nothing."""
    block = (trainjob.get("spec") or {}).get("checkpointing")
    if block is not None:
        return parse(block)
    return from_annotations(trainjob.get("metadata", {}).get("annotations") or {})


def secured(trainjob: dict[str, Any], push: pods.Push = pods.ASKED) -> dict[str, Any]:
    """The TrainJob with what its training containers need; raises SpecError if what it asks for is not accepted."""
    asked = asked_by(trainjob)
    if asked is None:
        return trainjob
    trainjob = copy.deepcopy(trainjob)
    spec = trainjob["spec"] = trainjob.get("spec") or {}
    trainer = spec["trainer"] = spec.get("trainer") or {}
    # Variables of this container are refused in a runtime patch: upstream wants them here.
    trainer["env"] = pods.added(trainer.get("env"), pods.variables(asked, RUN_ID, push))
    others = [patch for patch in spec.get("runtimePatches") or [] if patch.get("manager") != MANAGER]
    spec["runtimePatches"] = [*others, _runtime_patch(asked, push)]
    return trainjob


def _runtime_patch(asked: Checkpointing, push: pods.Push) -> dict[str, Any]:
    container: dict[str, Any] = {"name": CONTAINER}
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": asked.grace_s}
    if mounts := pods.mounts(asked, push):
        pod["volumes"] = pods.volumes(asked, push)
        container["volumeMounts"] = mounts
        pod["containers"] = [container]
    annotations = {MANAGED: "TrainJob"}
    if asked.secret:
        # A runtime patch has no field for a whole secret: the webhook on the JobSet adds it.
        annotations[CHECKPOINTING] = json.dumps({"storage": {"secretRef": {"name": asked.secret}}})
    return {
        "manager": MANAGER,
        "trainingRuntimeSpec": {
            "template": {
                "metadata": {"annotations": annotations},
                "spec": {"replicatedJobs": [{"name": CONTAINER, "template": {"spec": {"template": {"spec": pod}}}}]},
            }
        },
    }
