"""holdfast's part in a worker of Ray Train.

Ray runs the training function in a thread; the worker's main thread is free, and takes signals. After a
just-in-time save the function must neither return (Ray would take that for the end of the training) nor
raise, nor may the process end (both are failures, charged to ``max_failures``). So the worker reports itself
preempted, with a deadline that is over, and waits: Ray starts the workers anew, at once and without a charge.

Whatever trains in the worker finds its settings in the environment, and what surrounds it in
:mod:`holdfast.runtime.environment`: a plain loop, which is followed from here, or a framework that has an
adapter of its own.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ray
from ray.train.v2._internal.execution.context import TrainContext, get_train_context
from ray.train.v2._internal.execution.train_fn_utils import set_train_fn_utils
from ray.train.v2.api.preemption import PreemptionInfo

from _holdfast_startup import required
from holdfast.adapters import registry
from holdfast.adapters.ray.drain import DrainSource, draining
from holdfast.adapters.ray.failures import is_own
from holdfast.adapters.ray.marker import Marker, leave_marker, remove_marker
from holdfast.adapters.ray.patches import RAY
from holdfast.adapters.ray.reports import Noting, Reporting
from holdfast.adapters.ray.storage import Reports, choose_origin, is_unnamed, location_of, run_id_of
from holdfast.base.patching import MissingTargetsError
from holdfast.config import Settings
from holdfast.engine.engine import CRASHED, Engine, State
from holdfast.errors import HoldfastError, Preempted, StoreError
from holdfast.notice import Notice, NoticeSource, SignalSource
from holdfast.runtime.environment import Surroundings, surround
from holdfast.runtime.protection import unprotected

log = logging.getLogger("holdfast")

_PATIENCE_S = 4.0
"""Ray gives a worker five seconds between the word that it will be stopped and the kill."""

_FAILING_S = 2.0
"""A step that was told to give up does so within this time."""


class WorkerStoppedError(HoldfastError):
    """Ray ends the worker while it trains."""


class Worker:
    """One life of one worker."""

    def __init__(self, variables: dict[str, str], *, restarted: bool) -> None:
        """``variables``: holdfast's part of the driver's environment, checked there.

        ``restarted``: other workers of this job were here before.
        """
        self.context: TrainContext = get_train_context()
        self.rank: int = self.context.get_world_rank()
        self.node: str = ray.get_runtime_context().get_node_id()
        self.engines: list[Engine] = []
        """Of what trains in this worker, in the order of their start."""
        os.environ.update(variables)
        self.reports = Reports(self.context)
        latest = self.context.get_checkpoint()
        settings = Settings.load()
        self._hands_over = settings.ray_get_checkpoint == "jit"
        self.origin = choose_origin(
            settings.dir or location_of(self.context),
            None if latest is None else self.reports.name_of(latest),
            self.reports,
            world=self.context.get_world_size(),
            hand_over=self._hands_over,
        )
        if self.origin.before:
            self.context.checkpoint = self.reports.checkpoint(self.origin.base or "")
        # Whatever trains in this worker, another framework's adapter perhaps, finds the same settings.
        if not required():
            os.environ["HOLDFAST_ENABLED"] = "1"
        os.environ["HOLDFAST_DIR"] = self.origin.location
        os.environ["HOLDFAST_RUN_ID"] = settings.run_id or run_id_of(self.context)
        self.restarted = restarted
        if restarted:
            os.environ["HOLDFAST_RESUME"] = "auto"  # what is there now is of this job, which may have begun anew
        self.settings = Settings.load()
        self.follower = self._make_follower()
        self._signals = SignalSource(self.settings.signals)
        self._endings: list[Callable[[], None]] = []
        """Of trainings that go on listening when their function has returned. Ray's kill of this process, which comes
        then, is no notice to them, and runs nothing that is registered for its exit."""
        self._leaving = threading.Event()
        self._over = threading.Event()

    def _make_follower(self) -> Any:
        """For loops of PyTorch; None in workers of other frameworks, which need not even have torch."""
        framework = getattr(self.context.train_run_context.backend_config, "framework", None)
        if framework.value != "torch" if framework is not None else "torch" not in sys.modules:
            return None
        from holdfast.adapters.replay import patches as replay

        importlib.import_module("ray.train.torch.train_loop_utils")  # now its names are needed too
        try:
            replay.check()
            if missing := RAY.missing():
                raise MissingTargetsError(RAY, missing)
        except MissingTargetsError as error:
            unprotected(f"PyTorch loops in this worker are not followed: {error}")
            return None
        from holdfast.adapters.ray import loader
        from holdfast.adapters.replay.follower import Follower

        loader.register()
        return Follower(self.settings, on_preempted=self._preempted, name="ray", around=__file__)

    @property
    def replaying(self) -> bool:
        return self.follower is not None and self.follower.replaying

    @property
    def step(self) -> int:
        """The last step that is complete."""
        return self.engines[-1].training.last_boundary() if self.engines else 0

    @property
    def resuming(self) -> bool:
        """Whether the training function has not yet come to where it was saved."""
        return self.origin.step is not None and (not self.engines or self.replaying)

    # ------------------------------------------------------------------ in the main thread

    def begin(self) -> None:
        """Before the training function is started."""
        self._signals.start(self._on_signal)
        self._reporting = reporting = Reporting(self)
        surround(
            Surroundings(
                sources=self._sources,
                leave=self._leave_stuck,
                started=self._started,
                at_exit=self._endings.append,
                replayed=reporting.settle,
            )
        )
        for adapter in registry.ADAPTERS:  # of frameworks that this process imported before it was told to act
            for trigger in adapter.triggers:
                if adapter.name not in ("ray", "replay") and trigger in sys.modules:
                    registry.install(adapter.name, sys.modules[trigger])
        set_train_fn_utils(reporting)
        Noting(self).begin()
        RAY.begin("worker", self, to=self.context.execution_context.training_thread_runner)
        name, world = self.context.get_experiment_name(), self.context.get_world_size()
        leave_marker(Marker(name=name, location=self.origin.location, rank=self.rank, world=world))
        if self.rank == 0 and is_unnamed(self.context) and not self.restarted:
            log.warning(
                "this run has no name, so no other job will go on from its checkpoints; Ray's own restarts of its "
                "workers do. RunConfig(name=…) gives it one"
            )

    def run(self, original: Callable[[Callable[[], Any]], None]) -> Callable[[Callable[[], Any]], None]:
        """Wrapper of the patch table: Ray's start of the training function."""

        def run(target: Callable[[], Any]) -> None:
            original(functools.wraps(target)(functools.partial(self._train, target)))

        return run

    def shut_down(self) -> None:
        """Ray is about to kill this process. From now on signals are Ray's again."""
        if not self._over.is_set() and not self._leaving.is_set() and not self._restores_itself():
            self._save_before_the_kill()
        self._close()
        self._signals.stop()
        remove_marker()

    def _close(self) -> None:
        if self.follower is not None:
            self.follower.close()

    def _save_before_the_kill(self) -> None:
        """Another worker died, say, or the user stops the job: what is complete is saved all the same."""
        error = WorkerStoppedError("Ray Train stops this worker")
        for engine in self.engines:
            threading.Thread(target=_save_last, args=(engine, error), name="holdfast-last", daemon=True).start()
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until and any(engine.state is not State.LEFT for engine in self.engines):
            time.sleep(0.05)

    # ------------------------------------------------------------------ in the training thread

    def _train(self, target: Callable[[], Any]) -> Any:
        result = None
        try:
            if self.follower is not None:
                self.follower.start()
            result = target()
            if not self._leaving.is_set():
                self._finish()
        except Preempted:
            self._leave()
        except BaseException as error:
            if not self._leaving.is_set():
                if not self._fails_by_itself(error) and self.follower is not None:
                    self.follower.crashed(error)
                self._close()
                self._over.set()
                raise
        if self._leaving.is_set():
            self._park()
        self._close()
        self._over.set()
        return result

    def _fails_by_itself(self, error: BaseException) -> bool:
        """Whether the function will restore itself from a checkpoint of its own. The next attempt then lets it."""
        if self._hands_over or not is_own(error, self.engines):
            return False
        try:
            if not self.reports.any():
                return False
            self.reports.write_failures(self.origin.failures + 1)
        except OSError as failure:
            log.warning("it could not be noted that the training function has failed by itself: %s", failure)
            return False
        return True

    def _restores_itself(self) -> bool:
        """Whether another worker has failed by itself, so that the next attempt begins with the script's checkpoint."""
        try:
            return not self._hands_over and self.reports.failures() > self.origin.failures
        except OSError:
            return False

    def _finish(self) -> None:
        try:
            for end in self._endings:
                end()
            if self.follower is not None:
                self.follower.finish()
        except StoreError as error:
            # The training is done, and its result is the user's own: not a reason to call it failed.
            log.error("the end of the run could not be committed: %s", error)

    def _preempted(self, error: Preempted) -> NoReturn:
        self._leave()
        raise error

    def _leave_stuck(self, code: int) -> None:
        """Instead of the end of this process, where the training thread is stuck: wait for Ray's kill."""
        if code == CRASHED:
            self._over.set()  # another worker has failed, which Ray sees, and charges to ``max_failures``
        else:
            self._leave()

    def _leave(self) -> None:
        """Let Ray start the workers anew. The state is committed, or cannot be."""
        grace_s = getattr(self.context.train_run_context.run_config.failure_config, "preemption_grace_s", 0.0)
        over_ms = int((time.time() - grace_s) * 1000)
        self.context.preemption_context.preemption_info = PreemptionInfo(
            deadline_ms=over_ms, preempted_node_to_ranks={self.node: [self.rank]}
        )
        self._leaving.set()

    def _park(self) -> NoReturn:
        """Until the kill. Ray Train's own word of the same drain, with a later deadline, must not replace ours."""
        while True:
            self._leave()
            time.sleep(0.2)

    def _on_signal(self, notice: Notice) -> None:
        """What trains here hears of signals by itself; until Ray stops this worker none of them ends the process."""
        if not self.engines and not self._over.is_set():
            log.warning(
                "%s received while holdfast follows no training here: nothing is saved, Ray starts its workers anew",
                notice.detail,
            )
            self._leave()

    # ------------------------------------------------------------------ told by what trains here

    def _started(self, engine: Engine) -> None:
        self.engines.append(engine)
        if engine.training is getattr(self.follower, "loop", None):
            engine.training.notes = self._reporting.notes
        if self.origin.before and engine.training is getattr(self.follower, "loop", None):
            engine.training.step = self.origin.before

    def _sources(self) -> Sequence[NoticeSource]:
        return [DrainSource(functools.partial(draining, self.node), self._told)]

    def _told(self) -> int | None:
        info = self.context.preemption_context.preemption_info
        return None if info is None or self._leaving.is_set() else info.deadline_ms or 0


def _save_last(engine: Engine, error: BaseException) -> None:
    """Save what is complete. A step that waits for a worker that is gone has to fail first."""
    give_up = getattr(engine.training, "give_up_step", None)
    if give_up is not None and give_up():
        until = time.monotonic() + _FAILING_S
        while time.monotonic() < until and getattr(engine.training, "in_step", False):
            time.sleep(0.02)
        if not getattr(engine.training, "in_step", False):
            return  # the training thread was thrown out, and saves
    engine.crashed(error)
