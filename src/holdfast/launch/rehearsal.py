"""Rehearse a preemption: signal chosen ranks of a live run, and tell what came of it from its journal."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.base.clock import Deadline
from holdfast.base.process import Owner
from holdfast.errors import ConfigError
from holdfast.launch import procs
from holdfast.launch.control import NotLiveError, live_launch, saved_step
from holdfast.launch.records import Attempt, box_steps
from holdfast.launch.runs import RunPlace, about_to_start

_LOOK_S = 0.05
_BEYOND_GRACE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one preemption led to."""

    attempt: int
    signal: str
    targets: list[str]
    step_before: int | None
    """The last step that was complete when the signal was sent."""
    committed: str | None
    """Name of the newest checkpoint afterwards; None: there is none."""
    committed_step: int | None
    reason: str | None
    """``jit`` or ``rescue``, if it was saved because of the signal."""
    notice_to_commit_s: float | None
    left_after_s: float | None
    """From the signal until all ranks had left; None: they are still there."""
    steps_lost: int | None
    saved: bool
    """Nothing that was complete when the signal came is lost."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_signal(text: str) -> signal.Signals:
    name = text.strip().upper()
    try:
        return signal.Signals(int(name)) if name.isdigit() else signal.Signals["SIG" + name.removeprefix("SIG")]
    except (KeyError, ValueError):
        raise ConfigError(
            f"--signal={text!r} is not accepted; it must be a signal such as TERM, KILL or USR1"
        ) from None


def wait_for_training(run: RunPlace, timeout_s: float, after: int = 0) -> Attempt:
    """The attempt that is training now, with a step behind it; one with a number above ``after``."""
    limit = Deadline.after(timeout_s)
    while True:
        attempt = run.attempt()
        if attempt is not None and attempt.number > after and attempt.live():
            began = {
                (event.get("run"), event.get("attempt")): event.get("step") or 0
                for event in run.journal()
                if event["event"] == "training"
            }.get((attempt.run, attempt.number))
            if began is not None and min(box_steps(attempt).values(), default=began + 1) > began:
                return attempt
        elif (attempt is None or not after) and run.live_state() is None and not about_to_start():
            elsewhere = attempt.elsewhere() if attempt is not None else {}
            why = f"; rank {min(elsewhere)} runs {procs.where(elsewhere[min(elsewhere)])}" if elsewhere else ""
            raise NotLiveError(f"{run.location}: no rank of it is alive here{why}")
        if limit.passed():
            what = "was not started again" if after else "does not train yet"
            raise NotLiveError(f"{run.location} {what} after {timeout_s:.0f} s")
        time.sleep(_LOOK_S * 4)


def choose(run: RunPlace, attempt: Attempt, ranks: Sequence[int], launcher: bool) -> list[tuple[str, Owner]]:
    """Who gets the signal."""
    live = attempt.live()
    if launcher:
        return [_launcher(run, live)]
    missing = sorted(set(ranks) - live.keys())
    if missing:
        raise NotLiveError(f"rank {missing[0]} is not alive here; alive are {', '.join(map(str, sorted(live)))}")
    return [(f"rank {rank}", live[rank]) for rank in (ranks or sorted(live))]


def _launcher(run: RunPlace, live: dict[int, Owner]) -> tuple[str, Owner]:
    launch = live_launch(run)
    if launch is not None:
        return "launcher", launch.owner
    process = procs.look(min(live.values(), key=lambda owner: owner.pid).pid) if live else None
    parent = procs.look(process.parent) if process is not None else None
    if parent is None or not any("torch" in part for part in procs.command_of(parent.pid)):
        raise NotLiveError(f"{run.location}: the ranks have no launcher that is known as one")
    return "torchrun", Owner("", pid=parent.pid, started=parent.started)


def preempt(
    run: RunPlace, attempt: Attempt, targets: Sequence[tuple[str, Owner]], number: signal.Signals, skew_s: float
) -> Outcome:
    """Send the signal, wait until the attempt is over, and look what is left of it."""
    begin = time.time()
    step_before = max(box_steps(attempt).values(), default=run.progress().get("step"))
    for index, (_, owner) in enumerate(targets):
        if index and skew_s:
            time.sleep(skew_s)
        procs.send(owner.pid, owner.started, number)
    left_at = _wait_until_left(attempt, attempt.grace_s + _BEYOND_GRACE_S)
    events = [
        event
        for event in run.journal()
        if event.get("attempt") == attempt.number and event.get("run") == attempt.run and event["t"] >= begin - 1.0
    ]
    notice = next((event["t"] for event in events if event["event"] == "notice"), begin)
    commit = next((e for e in events if e["event"] == "commit" and e.get("reason") in ("jit", "rescue")), None)
    newest = saved_step(run)
    lost = None if step_before is None else max(0, step_before - (newest or 0))
    return Outcome(
        attempt=attempt.number,
        signal=number.name,
        targets=[name for name, _ in targets],
        step_before=step_before,
        committed=None if newest is None else f"checkpoint-{newest}",
        committed_step=newest,
        reason=commit["reason"] if commit is not None else None,
        notice_to_commit_s=None if commit is None else round(max(0.0, commit["t"] - notice), 3),
        left_after_s=None if left_at is None else round(left_at - begin, 3),
        steps_lost=lost,
        saved=newest is not None and (commit is not None if lost is None else lost == 0),
    )


def _wait_until_left(attempt: Attempt, timeout_s: float) -> float | None:
    limit = Deadline.after(timeout_s)
    while attempt.live():
        if limit.passed():
            return None
        time.sleep(_LOOK_S)
    return time.time()
