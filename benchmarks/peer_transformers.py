"""holdfast beside transformers' own ``enable_jit_checkpoint``: ``python -m benchmarks.peer_transformers [--runs N]``.

One script, the same signals at the same places, on both sides. transformers alone is told
``enable_jit_checkpoint=True`` and resumes from what ``get_last_checkpoint`` names. With holdfast the script is the
same, and one variable is set. Both wait three seconds after a signal before they save, which is the default of both.

A run ends well if all ranks leave by themselves within ``--limit`` seconds and the same command then goes on and
finishes. Steps lost: complete when the signal came, and trained again. Exact: the same bits at the end as a run that
nobody stopped. A job that hangs is killed when the limit is over, as a scheduler would.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench import Pairs
from tests.jobs.transformers import drill

STEP_S = 0.1
LONG = {"num_train_epochs": 30, "logging_steps": 10}
EVALUATING = {**LONG, "eval_strategy": "steps", "eval_steps": 12, "per_device_eval_batch_size": 1}
STEPS = (13, 8, 15, 22, 11, 17, 10)
"""Steps at which a run is stopped, by round."""


@dataclass(frozen=True)
class Case:
    what: str
    world: int
    phase: str = "forward"
    rank: int = 0
    also: tuple[int, ...] = ()
    skew_s: float = 0.0
    action: str = "TERM"
    args: dict[str, Any] = field(default_factory=lambda: LONG)
    agent: bool = False
    """Sent to torchrun, which hands it on."""


CASES = (
    Case("1 process", 1),
    Case("1 process, in an evaluation of 8 s", 1, "evaluation", args=EVALUATING),
    Case("2 ranks, rank 0 alone", 2),
    Case("2 ranks, rank 1 alone", 2, rank=1),
    Case("2 ranks, both at once", 2, also=(1,)),
    Case("2 ranks, 0.1 s apart", 2, also=(1,), skew_s=0.1),
    Case("2 ranks, 1 s apart", 2, rank=1, also=(0,), skew_s=1.0),
    Case("2 ranks, rank 0 in an evaluation", 2, "evaluation", args=EVALUATING),
    Case("2 ranks, torchrun itself", 2, agent=True),
    Case("2 ranks, SIGKILL of rank 1", 2, rank=1, action="KILL"),
)


@dataclass
class Tally:
    runs: int = 0
    well: int = 0
    lost: list[int] = field(default_factory=list)
    exact: int = 0
    seconds: list[float] = field(default_factory=list)
    hung: int = 0


@dataclass
class Stopped:
    """The attempt that was interrupted."""

    left: bool
    seconds: float
    completed: int


class Bench:
    def __init__(self, folder: str, limit_s: float) -> None:
        self.folder = Path(folder)
        self.limit_s = limit_s
        self.servers = {True: drill.Server(holdfast=True), False: drill.Server(holdfast=False)}
        self._number = 0
        self._ends: dict[str, str] = {}

    def close(self) -> None:
        for server in self.servers.values():
            server.close()

    def spec(self, case: Case, ours: bool, **more: Any) -> drill.Spec:
        self._number += 1
        own = {} if ours else {"enable_jit_checkpoint": True}
        env = {"HOLDFAST_ENABLED": "1" if ours else "0", "HOLDFAST_KILL_WAIT": "3", "HOLDFAST_GRACE_PERIOD": "30"}
        return drill.Spec(
            str(self.folder / f"run-{self._number}"), case.world, args={**case.args, **own}, env=env, **more
        )

    def end_of(self, case: Case) -> str:
        """The bits at the end of a run that nobody stopped."""
        key = json.dumps([case.world, case.args])
        if key not in self._ends:
            done = self.servers[False].run(self.spec(case, False), 300)
            assert done.result is not None, done.log
            self._ends[key] = done.result["digest"]
        return self._ends[key]

    def stop(self, case: Case, spec: drill.Spec, ours: bool) -> Stopped:
        if case.agent:
            return self._stop_torchrun(spec)
        job = self.servers[ours].start(spec)
        try:
            done = job.wait(self.limit_s + 60)
        except AssertionError:
            noted = json.loads(Path(f"{spec.dir}.out/noted.json").read_text())
            return Stopped(False, self.limit_s, noted["step"])
        assert done.noted is not None, done.log
        seconds = done.ended - done.noted["at"]
        return Stopped(seconds <= self.limit_s, seconds, done.noted["step"])

    def _stop_torchrun(self, spec: drill.Spec) -> Stopped:
        """A real torchrun gets the signal once rank 0 has completed some steps."""
        out = Path(f"{spec.dir}.out")
        out.mkdir()
        seen = out / "steps"
        target = ["--out", spec.dir, "--step-s", str(STEP_S), "--count", str(seen), "--args", json.dumps(spec.args)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        with (out / "log").open("w") as log:
            process = subprocess.Popen(
                [*torchrun, spec.script, *target],
                env={**os.environ, **spec.env, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        completed = 0
        while process.poll() is None and completed < 10:
            time.sleep(0.02)
            completed = seen.stat().st_size if seen.exists() else 0
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(self.limit_s)
            return Stopped(True, time.monotonic() - began, completed)
        except subprocess.TimeoutExpired:
            return Stopped(False, self.limit_s, completed)
        finally:
            for pid in [process.pid, *_with_argument(spec.dir)]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.wait()

    def try_once(self, case: Case, ours: bool, step: int) -> tuple[Stopped, int | None, bool, bool]:
        step = 12 if case.phase == "evaluation" else step
        fault = {"rank": case.rank, "step": step, "phase": case.phase, "action": case.action}
        faults = [] if case.agent else [{**fault, "also": list(case.also), "skew_s": case.skew_s}]
        spec = self.spec(case, ours, faults=faults, slow_step_s=STEP_S)
        spec.slow_evaluation_s = 0.33 * case.world if case.phase == "evaluation" else 0.0
        stopped = self.stop(case, spec, ours)
        again = spec.plain(options=[] if ours else ["--resume", "last"])
        try:
            resumed = self.servers[ours].run(again, 200)
        except AssertionError:
            resumed = None
        finished = resumed is not None and resumed.codes == [0] * case.world and resumed.result is not None
        lost = max(0, stopped.completed - resumed.result["first"]) if finished else None
        exact = finished and resumed.result["digest"] == self.end_of(case)
        for path in (spec.dir, f"{spec.dir}.out"):
            shutil.rmtree(path, ignore_errors=True)
        return stopped, lost, finished, exact

    def compare(self, runs: int, peer_runs: int) -> dict[tuple[str, bool], Tally]:
        tallies: dict[tuple[str, bool], Tally] = defaultdict(Tally)
        for number in range(max(runs, peer_runs)):
            for case in CASES:
                for ours in (False, True):
                    if number >= (runs if ours else peer_runs):
                        continue
                    stopped, lost, finished, exact = self.try_once(case, ours, STEPS[number % len(STEPS)])
                    tally = tallies[case.what, ours]
                    tally.runs += 1
                    tally.well += stopped.left and finished
                    tally.hung += not stopped.left
                    tally.exact += exact
                    tally.seconds.append(stopped.seconds)
                    if lost is not None:
                        tally.lost.append(lost)
                print(".", end="", flush=True)
        print()
        return tallies

    def speed(self, world: int, rounds: int) -> Pairs:
        """Seconds of a step with holdfast / without, in turn."""
        case = Case("speed", world, args={"num_train_epochs": 30, "logging_steps": 10})
        pairs = Pairs()
        for number in range(rounds + 1):
            taken = {}
            for ours in (number % 2 == 0, number % 2 != 0):
                spec = self.spec(case, ours, options=["--width", "64"])
                if not ours:
                    spec.args.pop("enable_jit_checkpoint")
                done = self.servers[ours].run(spec, 300)
                assert done.result is not None, done.log
                taken[ours] = done.result["step_s"]
                shutil.rmtree(spec.dir, ignore_errors=True)
            if number:  # the first is for warming up
                pairs.add(taken[True], taken[False])
        return pairs


def _with_argument(text: str) -> list[int]:
    """Processes that were started with an argument: torchrun's workers are in sessions of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if text.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def row(tally: Tally) -> list[str]:
    lost = f"{statistics.mean(tally.lost):.1f} (most {max(tally.lost)})" if tally.lost else "–"
    seconds = f"{statistics.median(tally.seconds):.1f} s (most {max(tally.seconds):.1f})"
    hung = f", {tally.hung} hung" if tally.hung else ""
    return [f"{tally.well} of {tally.runs}{hung}", lost, f"{tally.exact} of {tally.runs}", seconds]


def show(tallies: dict[tuple[str, bool], Tally], speeds: dict[int, Pairs]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("SIGTERM to", "by", "ended well", "steps lost", "resume exact", "to exit"):
        table.add_column(heading)
    names = {True: "holdfast", False: "enable_jit_checkpoint"}
    for case in CASES:
        for ours in (False, True):
            if tallies[case.what, ours].runs:
                table.add_row("" if ours else case.what, names[ours], *row(tallies[case.what, ours]))
    for ours in (False, True):
        every = Tally()
        for tally in (tally for (_, who), tally in tallies.items() if who == ours):
            every.runs, every.well, every.hung = (
                every.runs + tally.runs,
                every.well + tally.well,
                every.hung + tally.hung,
            )
            every.exact += tally.exact
            every.lost, every.seconds = every.lost + tally.lost, every.seconds + tally.seconds
        if every.runs:
            table.add_row("" if ours else "all", names[ours], *row(every))
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    console.print(table)
    for world, pairs in speeds.items():
        console.print(f"time of a step with holdfast / without, {world} rank{'s' if world > 1 else ''}: {pairs}")


def main() -> int:
    parser = argparse.ArgumentParser(description="holdfast beside transformers' own enable_jit_checkpoint.")
    parser.add_argument("--runs", type=int, default=5, help="runs of each case with holdfast (default 5)")
    parser.add_argument("--peer-runs", type=int, default=2, help="runs of each case without (default 2)")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds until a job that hangs is killed (40)")
    parser.add_argument("--speed-rounds", type=int, default=9, help="pairs of runs that are timed (default 9)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=".") as folder:
        bench = Bench(str(Path(folder).resolve()), options.limit)
        try:
            speeds = {world: bench.speed(world, options.speed_rounds) for world in (1, 2) if options.speed_rounds}
            tallies = bench.compare(options.runs, options.peer_runs)
        finally:
            bench.close()
    show(tallies, speeds)
    if options.json:
        content = {f"{what}, {'holdfast' if ours else 'peer'}": vars(one) for (what, ours), one in tallies.items()}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"stopped": content, "speed": speeds}, file, indent=1, default=vars)
    ours = [tally for (_, who), tally in tallies.items() if who]
    # Of a step in flight nothing is complete; a rank that is killed may take it along.
    return 0 if all(tally.well == tally.exact == tally.runs and not any(tally.lost) for tally in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
