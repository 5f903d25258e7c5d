"""The SDK's local-process backend, for :class:`TransformersTrainer`: jobs that leave no process behind.

A job runs in the environment of this interpreter, with the variables of this process and those of the trainer;
packages that are asked for come into an environment of the job's own on top of it. It does not end with the notebook:
:mod:`.records` finds it again.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import re
import string
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from kubeflow.trainer.backends.localprocess.job import LocalJob
from kubeflow.trainer.constants import constants

from holdfast.errors import ConfigError, JobNotFoundError
from holdfast.kubeflow import records
from holdfast.kubeflow.records import (
    COMPLETE,
    CREATED,
    FAILED,
    NAME,
    PAUSING,
    PROCESSES,
    RUNNING,
    SUSPENDED,
    Record,
    delete,
    follow,
    jobs_folder,
    log_lines,
    read_record,
)
from holdfast.kubeflow.submission import Submission


def submit(
    backend: Any, train: Callable[..., str], runtime: Any, trainer: Submission, options: list[Any] | None
) -> str:
    if runtime is None:
        runtime = constants.DEFAULT_TRAINING_RUNTIME
    if isinstance(runtime, str):
        runtime = backend.get_runtime(runtime)
    job_spec: dict[str, Any] = {}
    for option in options or []:
        option(job_spec, trainer, backend)
    name = job_spec.get("metadata", {}).get("name") or random.choice(string.ascii_lowercase) + uuid.uuid4().hex[:11]
    record = _record(name, trainer)
    job = Job(records.submit(record, f"{inspect.getsource(trainer.func)}\n\n{trainer.func.__name__}()\n"))
    backend._LocalProcessBackend__register_job(train_job_name=name, step_name="train", job=job, runtime=runtime)
    job.start()
    return str(name)


def _record(name: str, trainer: Submission) -> Record:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"name: {name!r} is not accepted; it must be lower case letters, digits and '-', 63 at most, a letter first"
        )
    output = trainer.output
    if output is not None and output.claim is not None:
        raise ConfigError(
            f"output_dir: {output.text!r} is a claim of Kubernetes; as local processes a job needs a path, or "
            f"s3://<bucket>/<prefix>"
        )
    urls = list(trainer.pip_index_urls or [])
    env = dict(trainer.env or {})
    processes = env.get(PROCESSES, "")
    if processes and not re.fullmatch(r"[1-9][0-9]{0,3}", processes):
        raise ConfigError(f"env[{PROCESSES!r}]: {processes!r} is not accepted; it must be a whole number, 1 or more")
    return Record(
        name=name,
        location=output.location() if output is not None else os.path.join(jobs_folder(), name, "run"),
        workers=int(processes or 1) * (trainer.num_nodes or 1),
        grace_s=float(trainer.grace_period_seconds),
        env=env,
        packages=list(trainer.packages_to_install or []),
        index_urls=[] if urls == list(constants.DEFAULT_PIP_INDEX_URLS) else urls,
        cwd=os.getcwd(),
        created=time.time(),
    )


class Job(LocalJob):  # type: ignore[misc]
    """What the SDK holds of a job. It follows the launcher; it does not keep it alive."""

    def __init__(self, record: Record) -> None:
        super().__init__(name=f"{record.name}-train", command=(), execution_dir=record.folder, env=record.env)
        self.daemon = True
        self._record_name, self._created = record.name, record.created
        self._last = record

    def run(self) -> None:
        follow(self._record_name, self._cancel_requested)
        if self._cancel_requested.is_set():
            self._remove()

    def cancel(self) -> None:
        """Delete the job: its processes are gone when this returns, and so may be this one soon."""
        super().cancel()
        if self.is_alive():
            self.join()
        self._remove()  # it had ended before, and nobody followed it any more

    def _remove(self) -> None:
        with contextlib.suppress(JobNotFoundError):
            delete(self._record_name, created=self._created)

    def _now(self) -> Record:
        with contextlib.suppress(JobNotFoundError):
            found = read_record(self._record_name)
            if found.created == self._created:  # else it was deleted, and another has its name
                self._last = found
        return self._last

    @property
    def status(self) -> str:
        if self._cancel_requested.is_set():
            return FAILED
        now = self._now().status()
        # As a suspended TrainJob's; and the SDK takes a word that it does not know for the end of the job.
        return {SUSPENDED: CREATED, PAUSING: RUNNING}.get(now, now)

    @property
    def success(self) -> bool:
        return bool(self.status == COMPLETE)

    @property
    def returncode(self) -> int | None:
        return self._now().code

    @property
    def stdout(self) -> str:
        return "\n".join(self.logs())

    def logs(self, follow: bool = False) -> Iterator[str]:
        return log_lines(self._last, follow=follow)
