"""Behind ``ray.train.report`` and ``ray.train.get_checkpoint`` in a worker: the script's own checkpoints go on as ever.

While the loop is replayed, what it reports was reported before the save, and is not reported again. Neither is what
it reported after the step that was saved: Ray counts the reports of all attempts, and the checkpoint says how many the
training function had made. What the function finds at its start is what it found when its recording began.

A report is a barrier of all workers. So they must be of one mind which one is the first that is made again: of two
workers that were saved inside one evaluation, one may have been past a report and the other not.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ray.train.v2._internal.execution.train_fn_utils import DistributedTrainFnUtils

from holdfast.adapters.ray.patches import RAY
from holdfast.adapters.ray.storage import Note, Origin, Reports

log = logging.getLogger("holdfast")


class Reporter(Protocol):
    """The worker that reports."""

    context: Any
    rank: int
    reports: Reports
    origin: Origin

    @property
    def follower(self) -> Any: ...
    @property
    def replaying(self) -> bool: ...
    @property
    def resuming(self) -> bool: ...
    @property
    def step(self) -> int: ...
    @property
    def restarted(self) -> bool: ...


class Reporting(DistributedTrainFnUtils):  # type: ignore[misc]
    """What Ray's functions ask."""

    def __init__(self, worker: Reporter) -> None:
        self._worker = worker
        self._calls = 0
        """Reports of the training function, those included that were made before."""
        self._made = 0
        """Of these, how many it had made in earlier attempts,"""
        self._index: int = worker.context.report_call_index
        """and how many Ray has got of all its attempts."""

    def report(self, *args: Any, **kwargs: Any) -> None:
        if not self._worker.replaying and self._calls >= self._made:
            with self._busy():
                super().report(*args, **kwargs)
            self._index += 1
        self._calls += 1

    def notes(self) -> dict[str, int]:
        """For the checkpoint."""
        return {"reports": max(self._calls, self._made), "index": self._index}

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """A save waits for the end of a report, as it does not for that of an evaluation."""
        loop = getattr(self._worker.follower, "loop", None)
        if loop is None:
            yield
            return
        resting, loop.resting = loop.resting, False
        try:
            yield
        finally:
            loop.resting = resting

    def settle(self) -> None:
        """The replay is over, on all workers: agree on which reports were made."""
        made = self._calls
        recalled: dict[str, int] = self._worker.follower.loop.recalled
        if recalled:
            since = self._index - recalled["index"]  # got after the save, or lost with a worker before Ray got them
            made = max(made, recalled["reports"] + (since if self._worker.restarted else max(0, since)))
        world = self._worker.context.get_world_size()
        if world > 1:
            from torch.distributed import PrefixStore

            from holdfast.agree.torch_board import job_store

            store = PrefixStore("holdfast/reports", job_store().clone())
            store.set(str(self._worker.rank), str(made))
            made = max(int(store.get(str(rank))) for rank in range(world))
        self._made = made

    def get_checkpoint(self) -> Any:
        worker = self._worker
        if worker.resuming:
            return None if worker.origin.base is None else worker.reports.checkpoint(worker.origin.base)
        return super().get_checkpoint()


class Noting:
    """Leaves a note for every checkpoint that is reported. Its methods are wrappers of the patch table."""

    def __init__(self, worker: Reporter) -> None:
        self._worker = worker
        self._steps: dict[int, int] = {}
        """By number of the report: the step at which it was made."""

    def begin(self) -> None:
        RAY.begin("reports", self, to=self._worker.context)

    def report(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def report(*args: Any, **kwargs: Any) -> Any:
            worker = self._worker
            # An upload in the background ends at a later step.
            self._steps[worker.context.report_call_index + 1] = worker.step
            return original(*args, **kwargs)

        return report

    def put(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def put(training_report: Any, report_call_index: int) -> Any:
            worker = self._worker
            step = self._steps.pop(report_call_index, worker.step)
            if training_report.checkpoint is not None:
                name = worker.reports.name_of(training_report.checkpoint)
                try:
                    worker.reports.write(name, Note(worker.origin.base, step, worker.origin.failures))
                except OSError as error:
                    log.warning("no note of %s could be left; older checkpoints are not used after it: %s", name, error)
            return original(training_report, report_call_index)

        return put
