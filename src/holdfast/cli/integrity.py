"""``holdfast verify`` and ``holdfast prune``: what is whole, and what may go."""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from holdfast.base.process import Owner
from holdfast.cli.control import Run
from holdfast.cli.inspect import all_rows, find
from holdfast.cli.output import (
    NOT_FOUND,
    PROBLEM,
    USAGE,
    Json,
    console,
    emit,
    fail,
    guarded,
    human_bytes,
    note,
    say,
    styled,
)
from holdfast.errors import CheckpointCorruptError, ConfigError, StoreError
from holdfast.launch.runs import RunPlace, below, resolve
from holdfast.store import Backend
from holdfast.store.checkpoints import (
    DAMAGED,
    UNFINISHED,
    WHOLE,
    Checkpoint,
    clean,
    open_checkpoint,
    retain,
    unfinished,
)
from holdfast.store.checkpoints import verify as read_and_check
from holdfast.store.manifest import step_of

VERIFY_HELP = """Read every byte of a run's checkpoints and compare it with the manifests.

Folders that were never committed are reported; they are no damage, since they are never loaded and go at the next
start, and fail the command only with --strict.

Exit codes: 0 all is whole, 1 something is not, 3 there is nothing to verify."""

PRUNE_HELP = """Remove checkpoints. The newest whole one stays, except with --all.

Of the location that was named alone: what the run's own records name as its fallback is another folder, which goes
with --fallback only, after a line that says where it is.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no such run, 4 a live run writes there."""


@guarded
def verify(
    run: Run = None,
    checkpoint: Annotated[str | None, typer.Option("--checkpoint", "-c", help="This one alone.")] = None,
    newest: Annotated[bool, typer.Option("--newest", help="The one that a resume would take, alone.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Without RUN: all runs here, not only one.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Unfinished checkpoints fail too.")] = False,
    as_json: Json = False,
) -> None:
    runs = below() if every and run is None else []
    results: list[dict[str, Any]] = []
    for place in runs or [resolve(run)]:
        if checkpoint is not None:
            results += _verify_one(place, checkpoint, as_json)
        else:
            results += _verify_all(place, newest, as_json)
    checked = [result for result in results if result["state"] != UNFINISHED]
    wrong = [result for result in results if result["state"] == DAMAGED or (strict and result["state"] == UNFINISHED)]
    if as_json:
        emit({"whole": bool(checked) and not wrong, "checkpoints": results})
    else:
        _tell(results)
    if wrong or (results and not checked):
        raise typer.Exit(PROBLEM)
    if not results:
        if not as_json:
            note("there is no checkpoint to verify", error=True)
        raise typer.Exit(NOT_FOUND)


def _result(name: str, location: str, state: str, **values: Any) -> dict[str, Any]:
    return {"name": name, "location": location, "state": state, "bytes": 0, "seconds": 0.0, "problems": [], **values}


def _verify_one(place: RunPlace, name: str, as_json: bool) -> list[dict[str, Any]]:
    try:
        found = find(place, name)
    except CheckpointCorruptError as error:
        return [_result(name, place.location, DAMAGED, problems=[str(error)])]
    return [_read(found, as_json)]


def _verify_all(place: RunPlace, newest: bool, as_json: bool) -> list[dict[str, Any]]:
    results = []
    for backend in place.backends():
        leftover = unfinished(backend)
        names = [name for name in backend.names() if name not in leftover]
        results += [_result(name, backend.uri, UNFINISHED) for name in leftover]
        for name in sorted(names, key=lambda name: -(step_of(name) or 0)):
            try:
                found = open_checkpoint(backend, name)
            except CheckpointCorruptError as error:
                results.append(_result(name, backend.uri, DAMAGED, problems=[str(error)]))
            else:
                if found is None:
                    continue  # removed by the run's own retention while we looked
                results.append(_read(found, as_json))
            if newest:
                return results
    return results


def _read(checkpoint: Checkpoint, as_json: bool) -> dict[str, Any]:
    size = checkpoint.manifest.size
    began = time.monotonic()
    with _bar(checkpoint.name, size, hidden=as_json) as on_bytes:
        problems = read_and_check(checkpoint, on_bytes)
    return _result(
        checkpoint.name,
        checkpoint.backend.uri,
        DAMAGED if problems else WHOLE,
        bytes=size,
        seconds=round(time.monotonic() - began, 4),
        problems=problems,
    )


@contextlib.contextmanager
def _bar(name: str, size: int, *, hidden: bool) -> Iterator[Callable[[int], None]]:
    if hidden or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=size)
        yield lambda count: progress.advance(task, count)


def _tell(results: list[dict[str, Any]]) -> None:
    out = console()
    styles = {WHOLE: "green", DAMAGED: "bold red", UNFINISHED: "yellow"}
    for result in results:
        speed = f"{human_bytes(result['bytes'] / result['seconds'])}/s" if result["seconds"] > 0 else ""
        size = human_bytes(result["bytes"]) if result["state"] != UNFINISHED else ""
        out.print(
            styled(f"{result['state']:<10}", styles[result["state"]]), result["name"], size, speed, result["location"]
        )
        for problem in result["problems"]:
            out.print(f"           {problem}")
    count = sum(result["bytes"] for result in results)
    seconds = sum(result["seconds"] for result in results)
    whole = sum(result["state"] == WHOLE for result in results)
    if seconds > 0:
        out.print(f"{whole} whole, {human_bytes(count)} read at {human_bytes(count / seconds)}/s")


# ---------------------------------------------------------------------- prune


@guarded
def prune(
    run: Run = None,
    keep: Annotated[int | None, typer.Option("--keep", min=1, help="Keep so many of the newest whole ones.")] = None,
    leftovers: Annotated[bool, typer.Option("--unfinished", help="Remove what was never committed.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Remove all checkpoints, the last one too.")] = False,
    fallback: Annotated[bool, typer.Option("--fallback", help="In the run's fallback location too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    if (keep is not None) + everything + leftovers == 0 or (everything and keep is not None):
        raise ConfigError("say what to remove: --keep N, --unfinished, or --all")
    place = resolve(run)
    backends = place.backends()
    doomed = _doomed(place, keep, leftovers, everything, fallback)
    for backend in backends[1:]:
        if not fallback:
            note(f"the fallback {backend.uri} is left alone; --fallback removes there, too")
        elif there := [row["name"] for row in doomed if row["location"] == backend.uri]:
            note(f"in the fallback {backend.uri}, too: {', '.join(there)}")
    if dry_run or not doomed:
        _report(place, doomed, removed=False, as_json=as_json)
        return
    if not yes:
        names = ", ".join(
            f"{row['name']}{'' if row['state'] == WHOLE else ' (' + row['state'] + ')'}" for row in doomed
        )
        if not sys.stdin.isatty() or as_json:
            fail(f"this would remove {names}; give --yes to do it", "usage", USAGE, as_json=as_json)
        if not typer.confirm(f"Remove {names} from {place.location}?", err=True):
            raise typer.Exit(PROBLEM)
    for backend in backends if fallback else backends[:1]:
        if any(row["location"] == backend.uri for row in doomed):
            _remove(backend, keep, leftovers, everything)
    _report(place, doomed, removed=True, as_json=as_json)


def _doomed(
    place: RunPlace, keep: int | None, leftovers: bool, everything: bool, fallback: bool
) -> list[dict[str, Any]]:
    """What would go, as ``ls`` describes it."""
    rows, problems = all_rows(place, fallback=fallback)
    if problems:
        raise StoreError(problems[0])
    if everything:
        return rows
    found = [row for row in rows if leftovers and row["state"] == UNFINISHED]
    if keep is not None:
        for location in {row["location"] for row in rows}:
            found += [row for row in rows if row["location"] == location and row["state"] == WHOLE][keep:]
    return found


def _remove(backend: Backend, keep: int | None, leftovers: bool, everything: bool) -> None:
    """As the one run that writes there: a live one keeps its checkpoints, and none starts meanwhile."""
    backend.acquire(Owner(f"prune-{secrets.token_hex(4)}"), wait_s=0.0)
    try:
        if everything:
            # Newest first: newer ones may refer to files of older ones, and a removal that is cut off breaks none.
            for name in sorted(backend.names(), key=lambda name: -(step_of(name) or 0)):
                backend.discard(name)
            return
        if keep is not None:
            retain(backend, keep)
        if leftovers:
            clean(backend)
    finally:
        backend.release()


def _report(place: RunPlace, doomed: list[dict[str, Any]], *, removed: bool, as_json: bool) -> None:
    freed = sum(row["bytes"] or 0 for row in doomed)
    if as_json:
        emit({"location": place.location, "removed": removed, "bytes": freed, "checkpoints": doomed})
        return
    for row in doomed:
        say(f"{'removed' if removed else 'would remove'} {row['name']} ({row['state']}) in {row['location']}")
    say(f"{len(doomed)} checkpoints, {human_bytes(freed)}" if doomed else "nothing to remove")
