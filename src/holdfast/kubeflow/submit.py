"""What is done to a TrainJob of :class:`TransformersTrainer` as it is submitted to Kubernetes.

The SDK's ``train`` hands on only what it knows: no claim, no grace period, no variables from a secret. So the body that
it sends is completed here, with the code of the operator itself: where the operator runs, it does the same again, and
more; where it does not, the job still has its volume and its variables.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from kubeflow.trainer.constants import constants
from kubernetes.client import ApiException

from holdfast.errors import ConfigError
from holdfast.kubeflow import carried
from holdfast.kubeflow.submission import Submission
from holdfast.operator.admission.trainjob import secured
from holdfast.operator.names import CHECKPOINTING, CONTAINER, DOMAIN, QUEUE_LABEL
from holdfast.operator.spec import parse

SDK_MANAGER = f"{DOMAIN}/sdk"
"""Who wrote a part of ``spec.runtimePatches`` here."""
_TIMEOUT_S = 10
_SECRET_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT",
    "AWS_ALLOW_HTTP",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_ENDPOINT",
)
"""Taken from a secret whose keys the submitter may not see."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXPANDED = re.compile(r"\$(?=[$(])")
"""Where Kubernetes would look for another variable, or take one of two signs away."""


def refuse(*_: Any) -> str:
    """As a container of this machine a job would have neither its volume nor holdfast, and would not be saved."""
    raise ConfigError(
        "client: ContainerBackendConfig is not accepted for a TransformersTrainer; it must be a client of "
        "Kubernetes, or of LocalProcessBackendConfig"
    )


def submit(
    backend: Any, train: Callable[..., str], runtime: Any, trainer: Submission, options: list[Any] | None
) -> str:
    """Check what only the cluster knows, then submit."""
    keys = check(backend, trainer)
    stand_in = copy.copy(backend)
    stand_in.custom_api = _Completing(backend, trainer, keys)
    return str(train(stand_in, runtime=runtime, trainer=trainer))


def check(backend: Any, trainer: Submission) -> list[str]:
    """Raises ConfigError for a claim or a secret that is not there, and for a path that means nothing in a pod.

    Returns the keys of the secret.
    """
    output = trainer.output
    if output is None:
        return []
    if output.claim is None and not output.is_object_store and not os.path.isabs(output.text):
        raise ConfigError(
            f"output_dir: {output.text!r} is relative, which means nothing in a pod; it must be pvc://<claim>/<path>, "
            f"s3://<bucket>/<prefix> or an absolute path"
        )
    parse(trainer.checkpointing(), "output_dir")
    if output.claim is not None:
        _must_exist(
            backend, "output_dir", "claim", output.claim, backend.core_api.read_namespaced_persistent_volume_claim
        )
    if trainer.secret_name is None:
        return []
    secret = _must_exist(backend, "secret_name", "secret", trainer.secret_name, backend.core_api.read_namespaced_secret)
    return list(_SECRET_VARIABLES if secret is None else filter(_VARIABLE.fullmatch, sorted(secret.data or {})))


def _must_exist(backend: Any, field: str, kind: str, name: str, read: Callable[..., Any]) -> Any:
    """The object; None: who asks may not see it."""
    try:
        return read(name, backend.namespace, _request_timeout=_TIMEOUT_S)
    except ApiException as error:
        # Who may not look is not told that it is missing.
        if error.status == 404:
            raise ConfigError(
                f"{field}: the {kind} {name!r} does not exist in the namespace {backend.namespace!r}; create it first"
            ) from None
        return None


class _Completing:
    """The API that the SDK talks to, for one submission: the TrainJob is completed on its way."""

    def __init__(self, backend: Any, trainer: Submission, keys: list[str]) -> None:
        self._backend = backend
        self._api = backend.custom_api
        self._trainer = trainer
        self._keys = keys

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def create_namespaced_custom_object(
        self, group: str, version: str, namespace: str, plural: str, body: dict[str, Any], **more: Any
    ) -> Any:
        core_api, carrying = self._backend.core_api, carried.name_for(body["metadata"]["name"])
        try:
            carries = carrying if carried.create(core_api, namespace, carrying) else None
            path = _runtime_path(self._api, namespace, body) if carries else None
            sent = completed(body, self._trainer, carries=carries, path=path, keys=self._keys)
            made = self._api.create_namespaced_custom_object(group, version, namespace, plural, sent, **more)
        except BaseException:
            carried.remove(core_api, namespace, carrying)
            raise
        if carries:
            carried.belongs_to(core_api, namespace, carries, made)
        return made


def _runtime_path(api: Any, namespace: str, body: dict[str, Any]) -> str | None:
    """``PYTHONPATH`` of the job's runtime, which a variable of the job replaces; None: it has none, or hides it."""
    asked = body["spec"]["runtimeRef"]
    field = (constants.GROUP, constants.VERSION)
    with contextlib.suppress(Exception):  # nothing that a submission should fail for
        if asked.get("kind") == "TrainingRuntime":
            found = api.get_namespaced_custom_object(
                *field, namespace, constants.TRAINING_RUNTIME_PLURAL, asked["name"], _request_timeout=_TIMEOUT_S
            )
        else:
            found = api.get_cluster_custom_object(
                *field, constants.CLUSTER_TRAINING_RUNTIME_PLURAL, asked["name"], _request_timeout=_TIMEOUT_S
            )
        for job in found["spec"]["template"]["spec"]["replicatedJobs"]:
            for container in job["template"]["spec"]["template"]["spec"]["containers"]:
                for variable in container.get("env") or []:
                    if (job["name"], container["name"], variable["name"]) == (CONTAINER, CONTAINER, "PYTHONPATH"):
                        return str(variable["value"])
    return None


def completed(
    body: dict[str, Any],
    trainer: Submission,
    *,
    carries: str | None,
    path: str | None = None,
    keys: Sequence[str] = (),
) -> dict[str, Any]:
    """The TrainJob with the block as an annotation, and with what its pods need.

    ``carries``: the ConfigMap with holdfast, if it is there; ``path``: ``PYTHONPATH`` of the runtime; ``keys``: those
    of the secret, which become variables one by one, since no operator may be there that takes it as a whole.
    """
    body = copy.deepcopy(body)
    for variable in body["spec"]["trainer"].get("env") or []:
        if "value" in variable:
            variable["value"] = _EXPANDED.sub("$$", variable["value"])
    metadata = body.setdefault("metadata", {})
    metadata["annotations"] = {
        **(metadata.get("annotations") or {}),
        CHECKPOINTING: json.dumps(trainer.checkpointing()),
    }
    body = secured(body)
    spec = body["spec"]
    environment = spec["trainer"]["env"]
    if trainer.secret_name is not None:
        known = {variable["name"] for variable in environment}
        environment += [
            {
                "name": name,
                "valueFrom": {"secretKeyRef": {"name": trainer.secret_name, "key": name, "optional": True}},
            }
            for name in keys
            if name not in known
        ]
    pod: dict[str, Any] = {}
    # Kueue writes a job back without a grace period, and then wants to change what must not change.
    if QUEUE_LABEL not in (metadata.get("labels") or {}):
        pod["terminationGracePeriodSeconds"] = trainer.grace_period_seconds
    if carries:
        carried.add_path(environment, path)
        pod["volumes"] = [carried.volume(carries)]
        pod["containers"] = [{"name": CONTAINER, "volumeMounts": [carried.MOUNT]}]
    if pod:
        jobs = [{"name": CONTAINER, "template": {"spec": {"template": {"spec": pod}}}}]
        # A manager of its own: the operator, where there is one, writes its own part anew.
        spec["runtimePatches"].append(
            {"manager": SDK_MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
        )
    return body
