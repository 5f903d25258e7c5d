"""What is added to the CustomResourceDefinition of TrainJob, and how it is put in and taken out again.

The CRD is Kubeflow's. Two properties and some printer columns are added by a patch that touches nothing else and
tests, in the same request, that nobody was quicker; an upgrade of Kubeflow Trainer that replaces the CRD brings the
patch back at the next look.
"""

from __future__ import annotations

import copy
from typing import Any

from holdfast.operator.spec import ACCESS_MODES, FALLBACK_PATH, GRACE_S, SCHEMES

_NUMBER = r"[0-9]+(\\.[0-9]+)?"
_INTERVAL = "^([1-9][0-9]*( ?(steps?|epochs?))?|" + "".join(f"({_NUMBER}{unit})?" for unit in "dhms") + ")$"


def _rule(rule: str, message: str) -> dict[str, str]:
    return {"rule": rule, "message": message}


def _text(description: str, *rules: dict[str, str], longest: int = 253) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "description": description, "maxLength": longest, "minLength": 1}
    return {**schema, "x-kubernetes-validations": list(rules)} if rules else schema


def _volume(description: str, default_path: str | None = None) -> dict[str, Any]:
    rules = [_rule("has(self.claimName)", "claimName is missing: name a claim in the namespace of the job")]
    where = "Where it is mounted in every training container"
    if default_path is None:
        rules.append(
            _rule("has(self.mountPath)", "mountPath is missing: say where in the container the claim is mounted")
        )
    else:
        where += f"; {default_path} if it is left out"
    path = _rule(
        "self.startsWith('/') && self != '/' && !self.contains(':') && !self.contains('..')",
        "mountPath must be an absolute path other than /, without ':' and '..'",
    )
    return {
        "type": "object",
        "description": description,
        "properties": {
            "claimName": _text("A claim in the namespace of the job."),
            "mountPath": _text(f"{where}.", path, longest=1024),
            "size": {
                "type": "string",
                "description": "Make the claim, of this size, if it is not there. It is never removed.",
                "pattern": r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$",
            },
            "storageClassName": _text("Of a claim that is made; the cluster's default class if it is left out."),
        },
        "x-kubernetes-validations": rules,
    }


CHECKPOINTING: dict[str, Any] = {
    "type": "object",
    "description": "How the job is kept from losing work when its pods are preempted. Added by holdfast.",
    "properties": {
        "enabled": {
            "type": "boolean",
            "default": True,
            "description": "false: progress is reported, nothing is saved.",
        },
        "interval": _text(
            "Save this often besides the saves just in time: a duration such as 5m, or '500 steps', '1 epoch'.",
            _rule(
                f"self.matches('{_INTERVAL}')",
                "interval must be a duration such as 30s, 5m or 1h30m, or a number of steps or epochs such as "
                "'500 steps' or '1 epoch'",
            ),
            longest=32,
        ),
        "maxCheckpoints": {
            "type": "integer",
            "format": "int32",
            "default": 3,
            "description": "How many whole checkpoints are kept.",
            "x-kubernetes-validations": [_rule("self >= 1", "maxCheckpoints must be 1 or more")],
        },
        "resumeFromCheckpoint": {
            "type": "boolean",
            "default": True,
            "description": "Go on from the newest whole checkpoint. false: start anew, and set the old ones aside.",
        },
        "gracePeriodSeconds": {
            "type": "integer",
            "format": "int32",
            "default": GRACE_S,
            "description": "Seconds from SIGTERM to SIGKILL; becomes terminationGracePeriodSeconds of the pods.",
            "x-kubernetes-validations": [_rule("self >= 5", "gracePeriodSeconds must be 5 or more")],
        },
        "storage": {
            "type": "object",
            "description": "Where checkpoints go.",
            "properties": {
                "uri": _text(
                    "s3://, gs:// or az:// with a bucket, or an absolute path on the claim.",
                    _rule(
                        "self.startsWith('/') || "
                        + " || ".join(f"self.startsWith('{scheme}://')" for scheme in SCHEMES),
                        "uri must begin with s3://, gs:// or az://, or be an absolute path",
                    ),
                    _rule(
                        "self.startsWith('/') || !self.contains('@')",
                        "uri must hold no credentials: use storage.secretRef",
                    ),
                    longest=1024,
                ),
                "accessMode": {
                    "type": "string",
                    "enum": list(ACCESS_MODES),
                    "default": "ReadWriteOnce",
                    "description": "Of a claim that is made.",
                },
                "persistentVolume": _volume(
                    "The claim for checkpoints; with an s3://, gs:// or az:// uri, the fallback for when that is away."
                ),
                "secretRef": {
                    "type": "object",
                    "description": "A secret whose keys become variables of the training containers.",
                    "properties": {"name": _text("A secret in the namespace of the job.")},
                    "x-kubernetes-validations": [_rule("has(self.name)", "name is missing: name a secret")],
                },
                "fallback": {
                    "type": "object",
                    "description": "A second location, used when the first cannot be reached in time.",
                    "properties": {"persistentVolume": _volume("The claim for it.", FALLBACK_PATH)},
                },
            },
            "x-kubernetes-validations": [
                _rule(
                    "!has(self.uri) || !self.uri.startsWith('/') || !has(self.persistentVolume) || "
                    "!has(self.persistentVolume.mountPath) || self.uri == self.persistentVolume.mountPath || "
                    "self.uri.startsWith(self.persistentVolume.mountPath + "
                    "(self.persistentVolume.mountPath.endsWith('/') ? '' : '/'))",
                    "uri must lie below persistentVolume.mountPath",
                ),
                _rule(
                    "has(self.uri) || has(self.persistentVolume)",
                    "storage must say where checkpoints go: uri, persistentVolume, or both",
                ),
            ],
        },
        "persistentVolume": _volume(
            "A short way to name a fallback: the same as storage.fallback.persistentVolume. Without storage, it is "
            "where checkpoints go.",
            FALLBACK_PATH,
        ),
        "env": {
            "type": "array",
            "maxItems": 100,
            "description": "More variables for the training containers; they win over those made from the fields.",
            "items": {
                "type": "object",
                "properties": {
                    "name": _text("Name of the variable."),
                    "value": {"type": "string", "maxLength": 32768, "description": "Its value."},
                    "valueFrom": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                        "description": "Where the value is found, as in a container.",
                    },
                },
                "required": ["name"],
                "x-kubernetes-validations": [
                    _rule(
                        f"!(self.name == '{name}') || !has(self.value) || self.value.matches('{pattern}')",
                        f"{name} must be {accepted}",
                    )
                    for name, pattern, accepted in (
                        ("CHECKPOINT_STRATEGY", "^(epoch|steps|time)$", "epoch, steps or time"),
                        ("CHECKPOINT_SAVE_TYPE", "^(full|incremental)$", "full or incremental"),
                        ("PROGRESS_UPDATE_FREQUENCY", "^[1-9][0-9]*$", "a whole number of steps, 1 or more"),
                    )
                ],
            },
        },
    },
    "x-kubernetes-validations": [
        _rule("self == oldSelf", "checkpointing cannot be changed after the job was created: make a new TrainJob"),
        _rule(
            "!has(self.persistentVolume) || !has(self.storage) || !has(self.storage.fallback)",
            "persistentVolume is a second fallback beside storage.fallback: name one of them",
        ),
    ],
}

_COUNT = {"type": "integer", "format": "int64", "minimum": 0}
_LINE = {"type": "string", "maxLength": 4096}
_TIME = {"type": "string", "format": "date-time"}

TRAINING_PROGRESS: dict[str, Any] = {
    "type": "object",
    "description": "What the running job last said of itself. Added by holdfast.",
    "properties": {
        **dict.fromkeys(("epoch", "totalEpochs", "step", "totalSteps"), _COUNT),
        **dict.fromkeys(("loss", "accuracy", "validationLoss", "validationAccuracy", "learningRate"), _LINE),
        **dict.fromkeys(("percentComplete", "estimatedTimeRemaining"), _LINE),
        "lastUpdateTime": _TIME,
        "resumedFrom": {**_LINE, "nullable": True},
        "checkpointing": {
            "type": "object",
            "properties": {
                "enabled": {"type": "boolean"},
                "latestCheckpoint": _LINE,
                "checkpointsCreated": _COUNT,
                "latestCheckpointTime": _TIME,
            },
        },
        "phase": {
            "type": "string",
            "description": "Pending, Running, Preempted, Restarting, Suspended, Complete or Failed.",
        },
        "recoveries": {**_COUNT, "description": "How often the job went on from a checkpoint."},
        "podUID": {**_LINE, "description": "The pod that the progress was read from."},
        "conditions": {
            "type": "array",
            "description": "Running, and ProgressReadable: whether the last look at the pods told anything.",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
            "items": {
                "type": "object",
                "required": ["type", "status"],
                "properties": {
                    "type": _LINE,
                    "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                    "reason": _LINE,
                    "message": _LINE,
                    "lastTransitionTime": _TIME,
                },
            },
        },
    },
}

COLUMNS: list[dict[str, Any]] = [
    {"name": "Phase", "type": "string", "jsonPath": ".status.trainingProgress.phase"},
    {"name": "Step", "type": "integer", "jsonPath": ".status.trainingProgress.step"},
    {"name": "Progress", "type": "string", "jsonPath": ".status.trainingProgress.percentComplete"},
    {"name": "ETA", "type": "string", "jsonPath": ".status.trainingProgress.estimatedTimeRemaining"},
    {
        "name": "Checkpoint Age",
        "type": "date",
        "jsonPath": ".status.trainingProgress.checkpointing.latestCheckpointTime",
    },
    {"name": "Recoveries", "type": "integer", "jsonPath": ".status.trainingProgress.recoveries"},
]
_OURS = ".status.trainingProgress."


def patch(crd: dict[str, Any]) -> list[dict[str, Any]]:
    """JSON patch that adds what is missing to the installed CRD; empty: all is there."""
    return _difference(crd, add=True)


def unpatch(crd: dict[str, Any]) -> list[dict[str, Any]]:
    """JSON patch that takes out what :func:`patch` has added, and nothing else."""
    return _difference(crd, add=False)


def _difference(crd: dict[str, Any], *, add: bool) -> list[dict[str, Any]]:
    operations: list[dict[str, Any]] = []
    for index, version in enumerate(crd["spec"]["versions"]):
        base = f"/spec/versions/{index}"
        properties = version["schema"]["openAPIV3Schema"].get("properties", {})
        for part, name, schema in (
            ("spec", "checkpointing", CHECKPOINTING),
            ("status", "trainingProgress", TRAINING_PROGRESS),
        ):
            there = properties.get(part, {}).get("properties")
            if there is None:
                continue
            path = f"{base}/schema/openAPIV3Schema/properties/{part}/properties/{name}"
            if add and there.get(name) != schema:
                operations.append({"op": "add", "path": path, "value": copy.deepcopy(schema)})
            elif not add and name in there:
                operations.append({"op": "remove", "path": path})
        columns = version.get("additionalPrinterColumns", [])
        others = [column for column in columns if not column["jsonPath"].startswith(_OURS)]
        names = [column["name"] for column in others]
        at = names.index("Age") if "Age" in names else len(names)  # Age stays last, as everywhere
        ours = [column for column in COLUMNS if column["name"] not in names]
        wanted = [*others[:at], *ours, *others[at:]] if add else others
        if not wanted and columns:
            operations.append({"op": "remove", "path": f"{base}/additionalPrinterColumns"})
        elif wanted != columns:
            operations.append({"op": "add", "path": f"{base}/additionalPrinterColumns", "value": wanted})
    if operations:
        version_test = {"op": "test", "path": "/metadata/resourceVersion", "value": crd["metadata"]["resourceVersion"]}
        return [version_test, *operations]
    return []
