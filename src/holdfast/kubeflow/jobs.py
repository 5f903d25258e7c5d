"""Jobs by name: pause, resume, progress, checkpoints. The same for TrainJobs and for jobs of the local backend.

A name is looked up among the local jobs first, unless a client says where to look.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.errors import ConfigError, JobNotFoundError, MissingExtraError
from holdfast.kubeflow import records
from holdfast.kubeflow.states import (
    COMPLETE,
    CREATED,
    FAILED,
    PAUSED,
    PAUSING,
    RUNNING,
    Jobs,
    Progress,
    UnreachableError,
)
from holdfast.store.checkpoints import rows_of
from holdfast.store.manifest import step_of

__all__ = [
    "COMPLETE",
    "CREATED",
    "FAILED",
    "PAUSED",
    "PAUSING",
    "RUNNING",
    "Jobs",
    "LocalJobs",
    "Progress",
    "UnreachableError",
    "checkpoints",
    "delete",
    "logs",
    "patient",
    "pause",
    "paused",
    "progress",
    "resume",
    "wait_for",
    "where",
]

_LOOK_S = 0.5
_MARGIN_S = 120.0
"""To pause a job takes its grace period at most, and this for what a cluster does before and after."""
_LAST_WORDS_S = 20.0
"""What a pod said last is in the status of its job a moment after the pod has gone, if there is an operator."""
_PATIENCE_S = 60.0
"""How long whoever waits for a job bears with a cluster that does not answer."""


class LocalJobs:
    """Those of the local-process backend, of any process of this user."""

    def names(self) -> list[str]:
        return [record.name for record in records.records()]

    def pause(self, name: str) -> None:
        records.pause(name)

    def grace_s(self, name: str) -> float:
        return records.read_record(name).grace_s

    def resume(self, name: str) -> None:
        records.resume(name)

    def progress(self, name: str) -> Progress:
        record = records.read_record(name)
        state = record.status()
        return Progress(name, PAUSED if state == records.SUSPENDED else state, record.place.progress())

    def checkpoints(self, name: str) -> list[dict[str, Any]]:
        record = records.read_record(name)
        if "://" in record.location:
            return records.listed(record)
        return [row for backend in record.place.backends() for row in rows_of(backend)]

    def delete(self, name: str) -> None:
        records.delete(name)

    def logs(self, name: str, follow: bool) -> Any:
        return records.log_lines(records.read_record(name), follow=follow)


def where(name: str | None = None, client: Any = None, *, on: str | None = None, namespace: str | None = None) -> Jobs:
    """Who knows the job: the client's backend; ``local`` or ``kubernetes``; else whoever has a job of that name."""
    if client is not None:
        from kubeflow.trainer.backends.kubernetes.backend import KubernetesBackend
        from kubeflow.trainer.backends.localprocess.backend import LocalProcessBackend

        backend = getattr(client, "backend", client)
        if isinstance(backend, LocalProcessBackend):
            return LocalJobs()
        if isinstance(backend, KubernetesBackend):
            return _on_cluster(lambda: backend)
        raise ConfigError(
            f"client: {type(backend).__name__} is not accepted; it must be a client of Kubernetes or local"
        )
    if on == "local":
        return LocalJobs()
    local = on is None and namespace is None and name is not None
    if local:
        try:
            records.read_record(str(name))
            return LocalJobs()
        except JobNotFoundError:
            pass

    def current() -> Any:
        from kubeflow.trainer import KubernetesBackendConfig, TrainerClient

        return TrainerClient(KubernetesBackendConfig(namespace=namespace)).backend

    try:
        return _on_cluster(current)
    except UnreachableError as error:
        if local:
            raise JobNotFoundError(f"there is no local job {name!r}, and {error}") from None
        raise


def _on_cluster(backend: Callable[[], Any]) -> Jobs:
    try:
        from kubernetes.config import ConfigException

        from holdfast.kubeflow.cluster import ClusterJobs

        return ClusterJobs(backend())
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "kubeflow", "kubeflow", "to look for jobs in a cluster") from error
    except (ConfigException, OSError) as error:  # no configuration, or one that cannot be read
        raise UnreachableError(f"there is no cluster to look in: {error}") from None


def pause(name: str, *, client: Any = None, wait: bool = True, timeout_s: float | None = None) -> Progress:
    """Save and stop: SIGTERM, checkpoint, end of the processes. They come back with :func:`resume`.

    Returns once the job is paused, with ``wait=False`` once it is told to; TimeoutError if it takes longer than
    ``timeout_s``; None: its grace period and two minutes.
    """
    jobs = where(name, client)
    if wait:
        return paused(jobs, name, timeout_s)
    jobs.pause(name)
    return jobs.progress(name)


def paused(jobs: Jobs, name: str, timeout_s: float | None) -> Progress:
    """Pause a job of ``jobs``, and wait until it is."""
    limit_s = jobs.grace_s(name) + _MARGIN_S if timeout_s is None else timeout_s
    jobs.pause(name)
    now = _wait(jobs, name, lambda now: now.state in (PAUSED, COMPLETE, FAILED), limit_s)
    if "phase" in now.file:  # of an operator
        with contextlib.suppress(TimeoutError):
            return _wait(jobs, name, lambda now: now.state != PAUSED or _is_saved(now), _LAST_WORDS_S)
    return now


def _is_saved(now: Progress) -> bool:
    """Whether the step that it shows is that of its newest checkpoint, as it is after a pause."""
    newest = (now.latest_checkpoint or "").rstrip("/").rpartition("/")[2]
    return not now.step or step_of(newest) == now.step


def resume(name: str, *, client: Any = None) -> Progress:
    """Go on from the newest checkpoint. A local job that is being paused goes on once it is."""
    jobs = where(name, client)
    jobs.resume(name)
    return jobs.progress(name)


def progress(name: str, *, client: Any = None) -> Progress:
    """How far it is, as its progress file says."""
    return where(name, client).progress(name)


def checkpoints(name: str, *, client: Any = None) -> list[dict[str, Any]]:
    """The job's checkpoints, newest first, as ``holdfast ls --json`` shows them.

    On a claim of a cluster only the job's pods see them: of a job without pods, a paused one, the newest is known.
    """
    return where(name, client).checkpoints(name)


def logs(name: str, *, client: Any = None, follow: bool = False) -> Iterator[str]:
    """What the job has printed, line by line; with ``follow``, until it ends or is paused."""
    return iter(where(name, client).logs(name, follow))


def delete(name: str, *, client: Any = None) -> None:
    """End the job, with a save, and forget it. Its checkpoints stay."""
    where(name, client).delete(name)


def wait_for(
    name: str, *states: str, client: Any = None, timeout_s: float = 600.0, step: int | None = None
) -> Progress:
    """Wait for one of the states (none given: the end), and for a step; raises if the job fails or ends first."""
    wanted = states or ((COMPLETE,) if step is None else (RUNNING, PAUSED, COMPLETE))

    def there(now: Progress) -> bool:
        if now.state == FAILED and FAILED not in wanted:
            raise RuntimeError(f"the job {name} has failed; see its logs")
        if now.state == COMPLETE and (COMPLETE not in wanted or (step or 0) > (now.step or 0)):
            at = "" if now.step is None else f" at step {now.step}"
            wish = " or ".join(wanted) if COMPLETE not in wanted else f"step {step}"
            raise RuntimeError(f"the job {name} is complete{at}: it will not come to {wish}")
        return now.state in wanted and (step is None or (now.step or 0) >= step)

    return _wait(where(name, client), name, there, timeout_s)


def patient(look: Callable[[], Progress]) -> Callable[[], Progress | None]:
    """As ``look``; None while the cluster does not answer, for a minute at most."""
    answered = time.monotonic()

    def again() -> Progress | None:
        nonlocal answered
        try:
            now = look()
        except UnreachableError:
            if time.monotonic() - answered > _PATIENCE_S:
                raise
            return None
        answered = time.monotonic()
        return now

    return again


def _wait(jobs: Jobs, name: str, there: Callable[[Progress], bool], timeout_s: float) -> Progress:
    limit = time.monotonic() + timeout_s
    look = patient(lambda: jobs.progress(name))
    while True:
        now = look()
        if now is not None and there(now):
            return now
        if time.monotonic() > limit:
            raise TimeoutError(f"the job {name} is {now.state if now else 'out of reach'} after {timeout_s:.0f} s")
        time.sleep(_LOOK_S)
