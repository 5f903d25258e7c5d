"""Jobs of a cluster: TrainJobs, by the SDK's own connection."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from kubeflow.trainer.constants import constants
from kubernetes.client import ApiException
from kubernetes.stream import stream
from urllib3.exceptions import HTTPError

from holdfast.base.clock import Deadline
from holdfast.errors import HoldfastError, JobNotFoundError, MissingExtraError, StoreError
from holdfast.kubeflow import states
from holdfast.kubeflow.records import LIST, is_on
from holdfast.kubeflow.states import Progress, UnreachableError
from holdfast.operator.admission.trainjob import asked_by
from holdfast.operator.names import CONTAINER, INDEX_LABEL, JOBSET_NAME_LABEL, PROGRESS, QUEUE_LABEL
from holdfast.progress import ProgressFileError, parse_progress
from holdfast.store import open_backend
from holdfast.store.checkpoints import rows_of
from holdfast.store.manifest import step_of

_TIMEOUT_S = 30
_POD_S = 10
"""For one pod of those that are asked within the time of all."""
_LARGEST = 1 << 20
_NOT_NOW = (0, 429, 500, 502, 503, 504)
"""Answers that another try may not get."""
_USUAL_GRACE_S = 30.0
_PROGRESS_FILE = ("HOLDFAST_PROGRESS_FILE", "TRAINING_PROGRESS_FILE")
_FIELD = (constants.GROUP, constants.VERSION)
_KUEUE, _KUEUE_VERSIONS, _WORKLOADS = "kueue.x-k8s.io", ("v1beta2", "v1beta1"), "workloads"
_OF_JOB = f"{_KUEUE}/job-uid"


class ClusterJobs:
    """TrainJobs of a namespace."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._api = backend.custom_api
        self._core = backend.core_api
        self._namespace = backend.namespace

    def names(self) -> list[str]:
        with self._told():
            found = self._api.list_namespaced_custom_object(
                *_FIELD, self._namespace, constants.TRAINJOB_PLURAL, _request_timeout=_TIMEOUT_S
            )
        return [item["metadata"]["name"] for item in found["items"]]

    def _get(self, name: str) -> dict[str, Any]:
        with self._told(name):
            body: dict[str, Any] = self._api.get_namespaced_custom_object(
                *_FIELD, self._namespace, constants.TRAINJOB_PLURAL, name, _request_timeout=_TIMEOUT_S
            )
            return body

    @contextlib.contextmanager
    def _told(self, name: str = "") -> Any:
        try:
            yield
        except ApiException as error:
            if error.status == 404 and name:
                raise JobNotFoundError(
                    f"there is no TrainJob {name!r} in the namespace {self._namespace!r}, and no local job of that name"
                ) from None
            kind = UnreachableError if error.status in _NOT_NOW else HoldfastError
            raise kind(f"the API server refused: {error.status} {error.reason}") from None
        except (HTTPError, OSError) as error:
            raise UnreachableError(f"the API server does not answer: {error}") from None
        except RuntimeError as error:  # of the SDK, which says what failed and hides why
            cause = error.__cause__
            why = f"{cause.status} {cause.reason}" if isinstance(cause, ApiException) else cause
            raise HoldfastError(f"{error}: {why}" if why else str(error)) from None

    def _stop_or_go(self, name: str, body: dict[str, Any], *, stop: bool) -> None:
        """Kueue, where it decides about a job, takes back a ``spec.suspend`` of anybody else: there it is asked."""
        if QUEUE_LABEL not in (body["metadata"].get("labels") or {}) or not self._activate(body, active=not stop):
            self._suspend(name, stop)

    def _activate(self, body: dict[str, Any], *, active: bool) -> bool:
        """Whether Kueue knows the job, and has been told."""
        of_job = f"{_OF_JOB}={body['metadata'].get('uid')}"
        for version in _KUEUE_VERSIONS:
            place = (_KUEUE, version, self._namespace, _WORKLOADS)
            with self._told():
                try:
                    found = self._api.list_namespaced_custom_object(
                        *place, label_selector=of_job, _request_timeout=_TIMEOUT_S
                    )
                except ApiException as error:
                    if error.status == 404:  # another version, or no Kueue
                        continue
                    raise
                for item in found["items"]:
                    self._api.patch_namespaced_custom_object(
                        *place, item["metadata"]["name"], {"spec": {"active": active}}, _request_timeout=_TIMEOUT_S
                    )
                return bool(found["items"])
        return False

    def _suspend(self, name: str, suspend: bool) -> None:
        with self._told(name):
            self._api.patch_namespaced_custom_object(
                *_FIELD,
                self._namespace,
                constants.TRAINJOB_PLURAL,
                name,
                {"spec": {"suspend": suspend}},
                _request_timeout=_TIMEOUT_S,
            )

    def pause(self, name: str) -> None:
        body, pods = self._get(name), self._pods(name)
        state = _state(body, pods)
        if state in (states.COMPLETE, states.FAILED):
            raise HoldfastError(f"the job {name!r} is {state}: there is nothing to pause")
        if why := _unsaved(body, pods):
            raise HoldfastError(f"the job {name!r} is not paused: {why}, and would begin anew")
        self._stop_or_go(name, body, stop=True)

    def grace_s(self, name: str) -> float:
        asked = asked_by(self._get(name))
        return float(asked.grace_s) if asked is not None else _USUAL_GRACE_S

    def resume(self, name: str) -> None:
        body = self._get(name)
        if _state(body, []) == states.FAILED:
            raise HoldfastError(
                f"the job {name!r} has failed, and a TrainJob does not start again; delete it, and submit it with the "
                f"same output_dir: it goes on from there"
            )
        self._stop_or_go(name, body, stop=False)

    def delete(self, name: str) -> None:
        self._get(name)
        with self._told(name):
            self._backend.delete_job(name)

    def logs(self, name: str, follow: bool) -> Any:
        self._get(name)
        return self._lines(name, follow)

    def _lines(self, name: str, follow: bool) -> Iterator[str]:
        with self._told(name):
            yield from self._backend.get_job_logs(name, follow=follow)

    # ------------------------------------------------------------------ progress

    def progress(self, name: str) -> Progress:
        body = self._get(name)
        pods = self._pods(name)
        state = _state(body, pods)
        return Progress(name, state, self._file(body, pods))

    def _pods(self, name: str) -> list[Any]:
        with self._told():
            found = self._core.list_namespaced_pod(
                self._namespace, label_selector=f"{JOBSET_NAME_LABEL}={name}", _request_timeout=_TIMEOUT_S
            ).items
        return sorted(found, key=lambda pod: int((pod.metadata.labels or {}).get(INDEX_LABEL, 0)))

    def _file(self, body: dict[str, Any], pods: list[Any]) -> dict[str, Any]:
        """As the operator has written it; without one, from the first pod that answers."""
        status = body.get("status") or {}
        if status.get("trainingProgress"):
            return dict(status["trainingProgress"])
        text = (body["metadata"].get("annotations") or {}).get(PROGRESS)
        if text is None:
            path = _progress_file(body)
            text = self._first(pods, ["cat", path]) if path else None
        with contextlib.suppress(ProgressFileError):
            return parse_progress((text or "").encode(errors="replace"))
        return {}

    def _first(self, pods: list[Any], command: list[str]) -> str | None:
        limit = Deadline.after(_TIMEOUT_S)
        for pod in pods:
            if pod.status.phase == "Running" and not limit.passed():
                with contextlib.suppress(Exception):  # a pod that is about to end answers in many ways
                    text = self._exec(pod.metadata.name, command, Deadline.after(min(_POD_S, limit.remaining_s())))
                    if text:
                        return text
        return None

    def _exec(self, pod: str, command: list[str], limit: Deadline) -> str:
        # Read as bytes: what the client decodes by itself it hands back as the text of a Python object.
        answer = stream(
            self._core.connect_get_namespaced_pod_exec,
            pod,
            self._namespace,
            container=CONTAINER,
            command=command,
            stdout=True,
            stderr=False,
            stdin=False,
            tty=False,
            _preload_content=False,
        )
        try:
            text = ""
            while answer.is_open() and len(text) < _LARGEST:
                if limit.passed():
                    raise TimeoutError(f"{pod} has not answered in time")
                answer.update(timeout=limit.remaining_s())
                text += answer.read_stdout(timeout=0.1) if answer.peek_stdout() else ""
            return text
        finally:
            answer.close()

    # ------------------------------------------------------------------ checkpoints

    def checkpoints(self, name: str) -> list[dict[str, Any]]:
        """From the object store, else from a pod that sees the claim, else what the progress says of the newest."""
        body = self._get(name)
        asked = asked_by(body)
        location = asked.location if asked is not None else None
        if location is None:
            return []
        if "://" in location:
            with contextlib.suppress(StoreError, MissingExtraError):
                return rows_of(open_backend(location))
        text = self._first(self._pods(name), ["python", "-c", LIST, location])
        if text:
            with contextlib.suppress(ValueError):
                rows: list[dict[str, Any]] = json.loads(text)
                return rows
        known = self.progress(name)
        if known.latest_checkpoint is None:
            return []
        newest = known.latest_checkpoint.rstrip("/").rpartition("/")[2]
        created = (known.file.get("checkpointing") or {}).get("latestCheckpointTime")
        return [{"name": newest, "step": step_of(newest), "created": created, "location": location}]


def _unsaved(body: dict[str, Any], pods: list[Any]) -> str | None:
    """Why a job does not save when it is told to leave; None: it does."""
    given: dict[str, str | None] = {
        variable.name: variable.value
        for pod in pods
        for container in pod.spec.containers
        if container.name == CONTAINER
        for variable in container.env or []
    }
    given |= _environment(body)
    asked = asked_by(body)
    if asked is None and "HOLDFAST_ENABLED" not in given:
        return "it has neither spec.checkpointing nor HOLDFAST_ENABLED=1"
    if asked is not None and not asked.enabled:
        return "it was submitted without checkpoints"
    off = next((name for name in ("HOLDFAST_ENABLED", "CHECKPOINT_ENABLED") if not is_on(given.get(name))), None)
    return f"{off}={given[off]} switches checkpoints off" if off else None


def _environment(body: dict[str, Any]) -> dict[str, str | None]:
    environment = ((body.get("spec") or {}).get("trainer") or {}).get("env") or []
    return {variable["name"]: variable.get("value") for variable in environment}


def _progress_file(body: dict[str, Any]) -> str | None:
    asked = asked_by(body)
    if asked is None:
        return None
    given = _environment(body)
    return next((str(given[name]) for name in _PROGRESS_FILE if given.get(name)), asked.progress_file)


def _state(body: dict[str, Any], pods: list[Any]) -> str:
    conditions = {item["type"]: item for item in (body.get("status") or {}).get("conditions") or []}
    for kind in (states.COMPLETE, states.FAILED):
        if conditions.get(kind, {}).get("status") == "True":
            return kind
    there = [pod for pod in pods if pod.status.phase not in ("Succeeded", "Failed")]
    if (body.get("spec") or {}).get("suspend"):
        return states.PAUSING if there else states.PAUSED
    running = any(pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None for pod in there)
    return states.RUNNING if running else states.CREATED
