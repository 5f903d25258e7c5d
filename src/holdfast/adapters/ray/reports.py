"""Behind ``ray.train.report`` and ``ray.train.get_checkpoint`` in a worker: the script's own checkpoints go on as ever.

While the loop is replayed, what it reports was reported before the save, and is not reported again. What
the training function finds at its start is what it found when its recording began.

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


class Reporting(DistributedTrainFnUtils):  # type: ignore[misc]
    """What Ray's functions ask."""

    def __init__(self, worker: Reporter) -> None:
        self._worker = worker
        self._replayed = 0
        self._left_out = 0
        """Reports that another worker had made, and this one had not, when they were saved."""

    def report(self, *args: Any, **kwargs: Any) -> None:
        if self._worker.replaying:
            self._replayed += 1
            return
        if self._left_out:
            self._left_out -= 1
            return
        with self._busy():
            super().report(*args, **kwargs)

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
        world = self._worker.context.get_world_size()
        if world == 1:
            return
        from torch.distributed import PrefixStore

        from holdfast.agree.torch_board import job_store

        store = PrefixStore("holdfast/reports", job_store().clone())
        store.set(str(self._worker.rank), str(self._replayed))
        self._left_out = max(int(store.get(str(rank))) for rank in range(world)) - self._replayed

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
                    worker.reports.write(name, Note(worker.origin.base, step))
                except OSError as error:
                    log.warning("no note of %s could be left; older checkpoints are not used after it: %s", name, error)
            return original(training_report, report_call_index)

        return put
