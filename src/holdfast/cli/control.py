"""``holdfast pause``, ``resume`` and ``preempt``."""

from __future__ import annotations

import os
import shlex
import sys
import time
from typing import Annotated

import typer

from holdfast.base.clock import Deadline
from holdfast.cli.output import PROBLEM, USAGE, Json, emit, fail, guarded, human_seconds, note, say
from holdfast.cli.ray import run_of_workers
from holdfast.cli.run import supervise
from holdfast.config import parse_duration
from holdfast.errors import ConfigError
from holdfast.launch import control, own_starts, rehearsal
from holdfast.launch.control import Answer
from holdfast.launch.records import LaunchSpec
from holdfast.launch.rehearsal import Outcome
from holdfast.launch.runs import resolve, resolve_soon

Run = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="A run's location or folder; else HOLDFAST_DIR, the newest run here, or this folder."
    ),
]

PAUSE_HELP = """Save, and stop training until `holdfast resume`.

Waits until the run is saved and its ranks have left. The launcher stays; without one (plain torchrun) the ranks get
SIGTERM, and starting the command again goes on.

Exit codes: 0 paused, 1 it took too long or came to nothing, 3 no such run, or nothing of it alive."""

RESUME_HELP = """Go on with a paused run.

If its launcher is gone, after a reboot or a closed terminal, the run is started again the way it was started first.

A run that you did not start from this machine, such as one in an unpacked archive, is shown first, and started after
you said so, or with --yes.

Exit codes: 0 goes on (started again: as holdfast run), 2 not without --yes, 3 no such run, 4 it runs without a launcher
of holdfast."""

PREEMPT_HELP = """Rehearse a preemption: send a signal to ranks of a live run and show what it cost.

Exit codes: 0 nothing was lost, 1 something was, or it was not saved, 3 no such run, or nothing of it alive."""


def _seconds(option: str, value: str | None) -> float | None:
    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise ConfigError(f"{option}={value!r} is not accepted; it must be {error}") from None


def _at(step: int | None) -> str:
    return "before its first checkpoint" if step is None else f"at step {step}"


@guarded
def pause(
    run: Run = None,
    timeout: Annotated[str | None, typer.Option(help="Seconds to wait.  [default: grace period + 30 s]")] = None,
    as_json: Json = False,
) -> None:
    place = resolve(run)
    answer = control.pause(place, _seconds("--timeout", timeout))
    if as_json:
        emit({"location": place.location, "state": answer.state, "step": answer.step, "changed": answer.changed})
    elif answer.state == "paused":
        already = "" if answer.changed else " already"
        say(f"{place.location} is{already} paused {_at(answer.step)}. Go on with: holdfast resume {place.location}")
    elif answer.state == "stopped":
        say(f"{place.location} is stopped {_at(answer.step)}. It has no launcher: start its command again to go on")
    else:
        say(f"{place.location} is {answer.state} {_at(answer.step)}")
    if answer.state not in ("paused", "stopped"):
        raise typer.Exit(PROBLEM)


@guarded
def resume(
    run: Run = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="If it has to be started again: in the background.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but warnings.")] = False,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No status line.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Run the command of a record that you did not write on this machine.")
    ] = False,
    as_json: Json = False,
) -> None:
    place = resolve(run)
    answer = control.resume(place)
    if isinstance(answer, Answer):
        if as_json:
            emit({"location": place.location, "state": answer.state, "step": answer.step, "changed": answer.changed})
        elif answer.state == "complete":
            say(f"{place.location} is complete {_at(answer.step)}: nothing is left to do")
        else:
            say(f"{place.location} {'goes on' if answer.changed else 'is running already'}")
        return
    spec = answer.spec
    if answer.record is not None:
        _ask_about(answer.record, spec, yes=yes, as_json=as_json)
        own_starts.remember(place.home, spec)  # it is this user's word now, for a start in the background too
    if detach:
        pid = control.detach(place)
        if as_json:
            emit({"location": place.location, "state": "running", "step": answer.step, "changed": True, "pid": pid})
        else:
            log = os.path.join(place.home, control.LOG)
            say(f"{place.location} goes on in the background, process {pid}; its output is in {log}")
        return
    raise typer.Exit(supervise(spec, quiet=quiet, progress=not no_progress, as_json=as_json))


def _ask_about(record: str, spec: LaunchSpec, *, yes: bool, as_json: bool) -> None:
    """Show the start of a run that came from elsewhere; returns if the person wants it."""
    workers = "" if spec.workers is None else f"-n {spec.workers} "
    note(f"{record} says how this run is started, and not you from this machine. It would run, in {spec.cwd}:")
    note(f"  {shlex.join([*workers.split(), *spec.program])}")
    for name, value in sorted({**spec.environ, **spec.settings}.items()):
        note(f"  with {name}={value}")
    if spec.dir is not None:
        note(f"  with --dir {spec.dir}")
    if yes:
        return
    if not sys.stdin.isatty() or as_json:
        fail("give --yes to run it, or start the run with holdfast run", "usage", USAGE, as_json=as_json)
    if not typer.confirm("Run it?", err=True):
        raise typer.Exit(PROBLEM)


@guarded
def preempt(
    run: Run = None,
    ranks: Annotated[list[int] | None, typer.Option("--rank", "-r", help="This rank; may be repeated.")] = None,
    all_ranks: Annotated[bool, typer.Option("--all", help="All ranks; the default.")] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="The run of the Ray Train workers on this machine; RUN may be its name.")
    ] = False,
    launcher: Annotated[bool, typer.Option("--launcher", help="The launcher instead of the ranks.")] = False,
    signal: Annotated[str, typer.Option("--signal", "-s", help="TERM, KILL, USR1, …")] = "TERM",
    delay: Annotated[str, typer.Option(help="Seconds to wait before the first signal.")] = "0",
    skew: Annotated[str, typer.Option(help="Seconds between one rank and the next.")] = "0",
    repeat: Annotated[int, typer.Option(min=1, help="So many preemptions, each after the run has come back.")] = 1,
    every: Annotated[str, typer.Option(help="Seconds of training before each further preemption.")] = "5",
    timeout: Annotated[str, typer.Option(help="Seconds to wait for the run to train.")] = "120",
    as_json: Json = False,
) -> None:
    number = rehearsal.parse_signal(signal)
    if launcher and (ranks or all_ranks or ray):
        raise ConfigError("--launcher goes with neither --rank nor --all nor --ray")
    if ranks and all_ranks:
        raise ConfigError("--rank and --all exclude each other")
    wait_s, skew_s = _seconds("--timeout", timeout) or 0.0, _seconds("--skew", skew) or 0.0
    limit = Deadline.after(wait_s)
    place = run_of_workers(run, limit) if ray else resolve_soon(run, limit)
    outcomes: list[Outcome] = []
    attempt_number = 0
    for index in range(repeat):
        attempt = rehearsal.wait_for_training(place, wait_s, after=attempt_number)
        time.sleep((_seconds("--every", every) if index else _seconds("--delay", delay)) or 0.0)
        targets = rehearsal.choose(place, attempt, ranks or [], launcher)
        outcome = rehearsal.preempt(place, attempt, targets, number, skew_s)
        outcomes.append(outcome)
        attempt_number = attempt.number
        if not as_json:
            _tell(outcome)
    if as_json:
        emit({"location": place.location, "preemptions": [outcome.as_dict() for outcome in outcomes]})
    if not all(outcome.saved for outcome in outcomes):
        raise typer.Exit(PROBLEM)


def _tell(outcome: Outcome) -> None:
    who = ", ".join(outcome.targets)
    say(f"{outcome.signal} to {who} at step {outcome.step_before} (attempt {outcome.attempt})")
    if outcome.reason is not None:
        say(
            f"  committed {outcome.committed} ({outcome.reason}), "
            f"{human_seconds(outcome.notice_to_commit_s)} after the notice"
        )
    else:
        newest = f"the newest checkpoint is {outcome.committed}" if outcome.committed else "there is no checkpoint"
        say(f"  nothing was committed for it; {newest}")
    left = "the ranks have not left" if outcome.left_after_s is None else f"all left after {outcome.left_after_s:.1f} s"
    lost = "unknown" if outcome.steps_lost is None else str(outcome.steps_lost)
    say(f"  {left}; steps lost: {lost}")
