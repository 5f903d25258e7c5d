"""Ask a run to pause or to go on, from another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.base.clock import Deadline
from holdfast.base.run_directory import LAUNCH
from holdfast.errors import HoldfastError, LocationBusyError
from holdfast.launch import own_starts, procs
from holdfast.launch.records import ENDED, PAUSED, Attempt, Launch, LaunchSpec, ask, read_launch
from holdfast.launch.runs import RunPlace
from holdfast.progress import goodput
from holdfast.store.checkpoints import whole

LOG = "output.log"
"""In the home folder: what a run that was started in the background prints."""

_LOOK_S = 0.1
_BEHIND_S = 2.0


class NotLiveError(HoldfastError, LookupError):
    """Nothing of the run is alive on this machine, so there is nobody to ask."""


@dataclass(frozen=True, slots=True)
class Restart:
    """How a run that has no launcher any more is started again, by whoever asked."""

    spec: LaunchSpec
    step: int | None
    record: str | None
    """The file that says so, where it is not this user's own word: to be shown, and asked for, before it is run."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request."""

    state: str
    """``paused``, ``running``, ``complete`` or ``stopped``."""
    step: int | None
    changed: bool
    """False: it was so already."""
    launcher: int | None = None


def _wait(until: Callable[[], bool], timeout_s: float) -> bool:
    limit = Deadline.after(timeout_s)
    while not until():
        if limit.passed():
            return False
        time.sleep(_LOOK_S)
    return True


def live_launch(run: RunPlace) -> Launch | None:
    """The launcher of the run, if it is alive."""

    def look() -> Launch | None:
        launch = run.launch()
        return launch if launch is not None and launch.state != ENDED and launch.is_alive() else None

    attempt = run.attempt()
    live = attempt.live().values() if attempt is not None else ()
    # A rank that a launcher has started says where it is a moment before the launcher does.
    if look() is None and any(procs.has_variable(owner.pid, "HOLDFAST_ANNOUNCE") for owner in live):
        _wait(lambda: look() is not None, _BEHIND_S)
    return look()


def saved_step(run: RunPlace) -> int | None:
    """The step of the newest whole checkpoint."""
    return next((checkpoint.step for checkpoint in whole(run.backends())), None)


def tell(run: RunPlace, launch: Launch, action: str) -> str:
    """Ask a launcher that is alive, and wait for nothing; returns the request's name."""
    request = ask(run.home, action)
    procs.send(launch.owner.pid, launch.owner.started, signal.SIGUSR1)
    return request


def pause(run: RunPlace, timeout_s: float | None) -> Answer:
    """Returns once the run has saved and all its ranks have left; raises TimeoutError if that takes longer."""
    launch, attempt = live_launch(run), run.attempt()
    grace_s = attempt.grace_s if attempt is not None else 30.0
    timeout_s = grace_s + 30.0 if timeout_s is None else timeout_s
    if launch is None:
        return _stop_ranks(run, attempt, timeout_s)
    if launch.state == PAUSED:
        return Answer("paused", launch.step, changed=False, launcher=launch.owner.pid)
    request = tell(run, launch, "pause")

    def over() -> bool:
        now = read_launch(run.home)
        if now is None or not now.is_alive():
            return True
        return now.state in (PAUSED, ENDED) and now.control == request

    if not _wait(over, timeout_s):
        raise TimeoutError(f"{run.location} is not paused after {timeout_s:.0f} s; it may still be saving")
    now = run.launch()
    if now is not None and now.is_alive() and now.state == PAUSED:
        return Answer("paused", now.step, changed=True, launcher=now.owner.pid)
    return Answer(run.state(), saved_step(run), changed=True)


def _stop_ranks(run: RunPlace, attempt: Attempt | None, timeout_s: float) -> Answer:
    """Without a launcher of ours: under plain torchrun, or started by hand."""
    live = attempt.live() if attempt is not None else {}
    if attempt is None or not live:
        elsewhere = attempt.elsewhere() if attempt is not None else {}
        why = f"; rank 0 ran {procs.where(elsewhere[0])}" if 0 in elsewhere else ""
        raise NotLiveError(f"{run.location}: no rank of it is alive here{why}")
    for owner in live.values():
        procs.send(owner.pid, owner.started, signal.SIGTERM)
    if not _wait(lambda: not attempt.live(), timeout_s):
        raise TimeoutError(f"the ranks of {run.location} have not left after {timeout_s:.0f} s")
    return Answer("stopped", saved_step(run), changed=True)


def resume(run: RunPlace, timeout_s: float = 30.0) -> Answer | Restart:
    """Ask a paused launcher to go on. Without one: how to start the run again, for the caller to do.

    Ranks of a launcher that was killed get the time to save first.
    """
    launch = live_launch(run)
    if launch is not None:
        pid = launch.owner.pid
        if launch.state != PAUSED:
            return Answer("running", None, changed=False, launcher=pid)
        request = tell(run, launch, "resume")

        def over() -> bool:
            now = read_launch(run.home)
            return now is None or not now.is_alive() or now.control == request

        if not _wait(over, timeout_s):
            raise TimeoutError(f"the launcher of {run.location}, process {pid}, does not answer")
        return Answer("running", launch.step, changed=True, launcher=pid)
    attempt, last = run.attempt(), run.launch()
    if attempt is not None and not _wait(lambda: not attempt.live(), attempt.grace_s + 10.0 if last else 0.0):
        raise LocationBusyError(f"{run.location} is running, without a launcher of holdfast")
    if last is None:
        raise NotLiveError(f"{run.location} was not started with holdfast run: start its own command again")
    if run.state() == "complete":
        rows = goodput(run.journal()).rows
        return Answer("complete", rows[-1].last_step if rows else None, changed=False)
    spec = own_starts.recall(run.home)
    if spec is not None:
        return Restart(spec, last.step, None)
    try:
        return Restart(own_starts.of_elsewhere(run.home), last.step, os.path.join(run.home, LAUNCH))
    except (OSError, ValueError) as error:
        raise HoldfastError(f"{error}: its command is not run. Start the run with holdfast run") from None


def detach(run: RunPlace, timeout_s: float = 30.0) -> int:
    """Start the run again in the background; returns the launcher's process number."""
    log = os.open(os.path.join(run.home, LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli", "resume", run.location],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)

    def up() -> bool:
        now = live_launch(run)
        return child.poll() is not None or (now is not None and now.owner.pid == child.pid)

    if not _wait(up, timeout_s) or child.poll() is not None:
        raise HoldfastError(f"the run could not be started again; see {os.path.join(run.home, LOG)}")
    return child.pid
