"""``holdfast top``: live runs on one screen."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.inspect import state_cell
from holdfast.cli.output import Json, console, emit, guarded, human_age, human_bytes, human_seconds
from holdfast.launch import procs
from holdfast.launch.records import box_steps
from holdfast.launch.runs import RunPlace, below, named, resolve
from holdfast.launch.watch import view_of
from holdfast.progress import goodput

if TYPE_CHECKING:
    from rich.console import RenderableType

HELP = """Watch runs: progress, checkpoints, preemptions, goodput, and the ranks with their processes.

Without RUN: all runs here. Ends with Ctrl-C.

Exit codes: 0 fine, 3 no such run."""

_SAMPLE_S = 0.3


class Meter:
    """Processor use of processes between two looks."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], tuple[float, float]] = {}

    def percent(self, process: procs.Process) -> float | None:
        key, now = (process.pid, process.started), time.monotonic()
        before = self._last.get(key)
        self._last[key] = (now, process.cpu_s)
        if before is None or now <= before[0]:
            return None
        return round(100 * (process.cpu_s - before[1]) / (now - before[0]), 1)


def ranks_of(run: RunPlace, meter: Meter) -> list[dict[str, Any]]:
    attempt = run.attempt()
    if attempt is None:
        return []
    steps, live = box_steps(attempt), attempt.live()
    rows = []
    for rank, owner in sorted(attempt.ranks.items()):
        process = procs.look(owner.pid) if rank in live else None
        rows.append(
            {
                "rank": rank,
                "pid": owner.pid,
                "host": owner.host,
                "alive": process is not None,
                "step": steps.get(rank),
                "rss": process.rss if process else None,
                "cpu_percent": meter.percent(process) if process else None,
            }
        )
    return rows


def snapshot(run: RunPlace, meter: Meter) -> dict[str, Any]:
    """All that the screen shows of a run."""
    events = run.journal()
    view, account = view_of(run, events), goodput(events)
    launch = run.launch()
    return {
        "location": run.location,
        **dataclasses.asdict(view),
        "launcher": launch.owner.pid if launch is not None and launch.is_alive() else None,
        "attempts": account.attempts,
        "preemptions": account.preemptions,
        "steps_lost": account.steps_lost,
        "goodput": round(account.ratio, 4),
        "total_s": round(account.total_s, 1),
        "ranks_live": ranks_of(run, meter),
    }


@guarded
def top(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]…", help="Runs; else all runs here.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once and leave.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    as_json: Json = False,
) -> None:
    def chosen() -> list[RunPlace]:
        return [named(text) for text in runs] if runs else below() or [resolve(None)]

    meter = Meter()
    found = chosen()
    if once or as_json:
        for run in found:
            ranks_of(run, meter)
        time.sleep(_SAMPLE_S)
        shots = [snapshot(run, meter) for run in found]
        if as_json:
            emit({"runs": shots})
        else:
            console().print(_screen(shots))
        return
    from rich.live import Live

    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(_screen([snapshot(run, meter) for run in found]), console=console(), screen=True) as live,
    ):
        while True:
            time.sleep(every)
            live.update(_screen([snapshot(run, meter) for run in chosen()]))


def _screen(shots: list[dict[str, Any]]) -> RenderableType:
    from rich.console import Group

    from holdfast.cli.plain_text import Escaped

    # A live screen is drawn past the console's own hook.
    return Escaped(Group(*(part for shot in shots for part in _run_lines(shot))))


def _run_lines(shot: dict[str, Any]) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Text.assemble((shot["location"], "bold"), "  ", state_cell(shot["state"]))
    grid = Table.grid(padding=(0, 2))
    total = f"/{shot['total']}" if shot["total"] else ""
    step = "–" if shot["step"] is None else f"step {shot['step']}{total}"
    bar = ProgressBar(total=100, completed=shot["percent"] or 0, width=30)
    left = f"{shot['eta']} left" if shot["eta"] and shot["state"] == "running" else ""
    grid.add_row(bar, step, f"loss {shot['loss']}" if shot["loss"] else "", left)
    saved = "nothing saved yet"
    if shot["saved_step"] is not None:
        saved = f"saved step {shot['saved_step']} {human_age(shot['saved_at'])}"
    facts = Text(
        f"{saved}   attempts {shot['attempts']}   preemptions {shot['preemptions']}   steps lost {shot['steps_lost']}"
        f"   goodput {shot['goodput']:.0%} of {human_seconds(shot['total_s'])}"
    )
    ranks = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("rank", "pid", "step", "memory", "cpu"):
        ranks.add_column(heading, justify="right")
    for rank in shot["ranks_live"]:
        if rank["alive"]:
            cpu = "–" if rank["cpu_percent"] is None else f"{rank['cpu_percent']:.0f}%"
            step = "–" if rank["step"] is None else str(rank["step"])
            ranks.add_row(str(rank["rank"]), str(rank["pid"]), step, human_bytes(rank["rss"]), cpu)
    lines: list[RenderableType] = [head, Padding(grid, (0, 0, 0, 2)), Padding(facts, (0, 0, 0, 2))]
    if ranks.row_count:
        lines.append(Padding(ranks, (0, 0, 0, 2)))
    return [*lines, Text()]
