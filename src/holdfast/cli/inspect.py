"""``holdfast ls`` and ``holdfast show``: what there is."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Any

import typer

from holdfast.cli.output import (
    Json,
    console,
    emit,
    guarded,
    human_age,
    human_bytes,
    human_seconds,
    show_table,
    styled,
)
from holdfast.errors import CheckpointCorruptError, CheckpointNotFoundError, StoreError
from holdfast.launch.runs import RunPlace, below, named, resolve
from holdfast.launch.watch import seconds_of, view_of
from holdfast.progress import goodput, timeline
from holdfast.store.checkpoints import DAMAGED, UNFINISHED, WHOLE, Checkpoint, facts_of, open_checkpoint, rows_of
from holdfast.store.manifest import step_of

LS_HELP = """List the checkpoints of a run, newest first, in all its locations; several runs: one line each.

Exit codes: 0 fine, 1 a location cannot be read, 3 no such run."""

SHOW_HELP = """Show a run (attempts, interruptions, where its time went) or one checkpoint (files, sizes, timings).

Exit codes: 0 fine, 1 the checkpoint is damaged, 3 no such run or checkpoint."""


def all_rows(run: RunPlace, *, fallback: bool = True) -> tuple[list[dict[str, Any]], list[str]]:
    """Checkpoints of all locations of a run, newest first, and what could not be read."""
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for order, backend in enumerate(run.backends() if fallback else run.backends()[:1]):
        try:
            rows += rows_of(backend, fallback=order > 0)
        except StoreError as error:
            problems.append(str(error))
    return sorted(rows, key=lambda row: (-(row["step"] or 0), row["fallback"])), problems


def summary(run: RunPlace) -> dict[str, Any]:
    """One run in one line, with its checkpoints."""
    rows, problems = all_rows(run)
    attempt, progress = run.attempt(), run.progress()
    whole = [row for row in rows if row["state"] == WHOLE]
    return {
        "location": run.location,
        "home": run.home,
        "run": attempt.run if attempt else None,
        "state": run.state(),
        "attempts": attempt.number if attempt else 0,
        "step": progress.get("step"),
        "total_steps": progress.get("totalSteps"),
        "saved_step": whole[0]["step"] if whole else None,
        "changed": run.changed() or None,
        "checkpoints": rows,
        "problems": problems,
    }


@guarded
def ls(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]…", help="Runs; else HOLDFAST_DIR, all runs here, or this folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    chosen = [named(text) for text in runs or ()]
    if not chosen:
        chosen = below() if "HOLDFAST_DIR" not in os.environ and "CHECKPOINT_URI" not in os.environ else []
        chosen = chosen or [resolve(None)]
    found = [summary(run) for run in chosen]
    if as_json:
        emit({"runs": found})
    elif len(found) > 1 and not runs:
        _show_runs(found)
    else:
        for run in found:
            _show_checkpoints(run)
    if any(run["problems"] for run in found):
        raise typer.Exit(1)


_STATE_STYLE = {
    "running": "green",
    "complete": "green",
    "paused": "yellow",
    "starting": "cyan",
    "stopped": "",
    WHOLE: "green",
    UNFINISHED: "yellow",
    DAMAGED: "bold red",
}


def state_cell(state: str) -> Any:
    return styled(state, _STATE_STYLE.get(state, ""))


def _show_runs(found: list[dict[str, Any]]) -> None:
    columns = [("run", "l"), ("state", "l"), ("step", "r"), ("saved", "r"), ("checkpoints", "r"), ("changed", "r")]
    rows = [
        (
            run["location"],
            state_cell(run["state"]),
            _of(run["step"], run["total_steps"]),
            _or_dash(run["saved_step"]),
            len(run["checkpoints"]),
            human_age(run["changed"]),
        )
        for run in found
    ]
    show_table(columns, rows)


def _show_checkpoints(run: dict[str, Any]) -> None:
    out = console()
    out.print(f"{run['location']}  ", state_cell(run["state"]), sep="")
    for problem in run["problems"]:
        out.print(styled(f"  {problem}", "red"))
    if not run["checkpoints"]:
        out.print("  no checkpoints")
        return
    locations = {row["location"] for row in run["checkpoints"]}
    columns = [
        ("checkpoint", "l"),
        ("step", "r"),
        ("epoch", "r"),
        ("reason", "l"),
        ("size", "r"),
        ("age", "r"),
        ("ranks", "r"),
        ("state", "l"),
    ]
    if len(locations) > 1:
        columns.append(("location", "l"))
    rows = []
    for row in run["checkpoints"]:
        cells: list[Any] = [
            row["name"],
            row["step"],
            _or_dash(row["epoch"]),
            _or_dash(row["reason"]) + (", end" if row["complete"] else ""),
            human_bytes(row["bytes"]),
            human_age(seconds_of(row["created"])),
            _or_dash(row["world_size"]),
            state_cell(row["state"]),
        ]
        rows.append(cells + [row["location"] + (" (fallback)" if row["fallback"] else "")] * (len(locations) > 1))
    show_table(columns, rows)


def _or_dash(value: Any) -> str:
    return "–" if value is None else str(value)


def _of(step: int | None, total: int | None) -> str:
    return "–" if step is None else f"{step}/{total}" if total else str(step)


# ---------------------------------------------------------------------- show


@guarded
def show(
    what: Annotated[
        str | None, typer.Argument(metavar="[NAME|RUN]", help="A checkpoint such as checkpoint-150, or a run.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="The run that the checkpoint belongs to.")] = None,
    as_json: Json = False,
) -> None:
    name = os.path.basename((what or "").rstrip("/"))
    if what is not None and step_of(name) is not None:
        folder = what.rstrip("/")[: -len(name)]
        _show_checkpoint(resolve(run or folder or None), name, as_json)
    else:
        _show_run(resolve(what or run), as_json)


def find(run: RunPlace, name: str) -> Checkpoint:
    """The checkpoint of that name, in the first location that has it whole."""
    damaged: CheckpointCorruptError | None = None
    known: list[str] = []
    for backend in run.backends():
        try:
            checkpoint = open_checkpoint(backend, name)
        except CheckpointCorruptError as error:
            damaged = error
            continue
        if checkpoint is not None:
            return checkpoint
        known += backend.names()
    if damaged is not None:
        raise damaged
    what = "is not whole" if name in known else "does not exist"
    raise CheckpointNotFoundError(f"{name} in {run.location} {what}")


def _show_checkpoint(run: RunPlace, name: str, as_json: bool) -> None:
    checkpoint = find(run, name)
    manifest = checkpoint.manifest
    files = [entry.as_dict() for entry in manifest.files]
    if as_json:
        emit(
            {
                "name": name,
                "location": checkpoint.location,
                **facts_of(checkpoint),
                "run": manifest.run,
                "attempt": manifest.attempt,
                "inexact": list(manifest.inexact),
                "timings": manifest.timings,
                "extra": manifest.extra,
                "files": files,
            }
        )
        return
    out = console()
    out.print(styled(name, "bold"), f"  {checkpoint.location}", sep="")
    out.print(
        f"step {manifest.step}, epoch {_or_dash(manifest.epoch)}, {manifest.reason}, saved by {manifest.world_size} "
        f"ranks {human_age(seconds_of(manifest.created))} ({manifest.created}), run {manifest.run}, "
        f"attempt {manifest.attempt}" + (", the end of the run" if manifest.complete else "")
    )
    for words in manifest.inexact:
        out.print(styled(f"not exact: {words}", "yellow"))
    out.print(
        "timings: " + ", ".join(f"{key.removesuffix('_s')} {value:.3f} s" for key, value in manifest.timings.items())
    )
    rows = [(entry.path, human_bytes(entry.size), entry.checksum, entry.ref or "") for entry in manifest.files]
    rows.append(("total", human_bytes(manifest.size), "", ""))
    show_table([("file", "l"), ("size", "r"), ("xxh3", "l"), ("kept in", "l")], rows)


def _show_run(run: RunPlace, as_json: bool) -> None:
    events = run.journal()
    view, account, interruptions = view_of(run, events), goodput(events), timeline(events)
    facts = summary(run)
    if as_json:
        emit({**facts, "goodput": dataclasses.asdict(account), "interruptions": interruptions})
        return
    out = console()
    out.print(styled(run.location, "bold"), "  ", state_cell(view.state), f"  run {facts['run']}", sep="")
    out.print(
        f"step {_of(view.step, view.total)}, loss {_or_dash(view.loss)}, newest checkpoint at step "
        f"{_or_dash(facts['saved_step'])}, {len(facts['checkpoints'])} checkpoints"
    )
    if account.rows:
        show_table(
            [
                ("attempt", "r"),
                ("started", "r"),
                ("from", "r"),
                ("to", "r"),
                ("lost", "r"),
                ("trained", "r"),
                ("end", "l"),
            ],
            [
                (
                    row.attempt,
                    human_age(row.started),
                    row.first_step,
                    row.last_step,
                    row.steps_lost,
                    human_seconds(row.useful_s + row.replay_s),
                    row.outcome if row.outcome != "unknown" else view.state,
                )
                for row in account.rows
            ],
            title="Attempts",
        )
    if interruptions:
        show_table(
            [("what", "l"), ("step", "r"), ("notice to commit", "r"), ("lost", "r"), ("resume", "r"), ("detail", "l")],
            [
                (
                    entry["what"],
                    entry["step"],
                    human_seconds(entry["notice_to_commit_s"]),
                    entry["steps_lost"],
                    human_seconds(entry["resume_s"]),
                    entry["detail"],
                )
                for entry in interruptions
            ],
            title="Interruptions",
        )
    out.print(
        f"Goodput {account.ratio:.0%} of {human_seconds(account.total_s)}: start {human_seconds(account.startup_s)}, "
        f"restarts {human_seconds(account.lost_restart_s)}, steps again {human_seconds(account.lost_replay_s)}, "
        f"stalls {human_seconds(account.lost_stall_s)}; paused {human_seconds(account.lost_idle_s)}"
    )
