"""Lightning with holdfast beside Lightning alone: ``python -m benchmarks.peer_lightning [--rounds N] [--json FILE]``.

One script, the same signals at the same places, on both sides. Lightning alone follows what its documentation says
about being stopped: an ``OnExceptionCheckpoint``, a ``ModelCheckpoint`` every five steps with ``save_last``, and
``ckpt_path="last"``. With holdfast the script has none of these, and one variable is set.

A run ends well if all ranks have left within the grace period and the same command then goes on and finishes. Steps
lost: completed when the signal came, and done again. Exact: the same bits at the end as a run that nobody stopped.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bench import Pairs, plain
from tests.jobs.lightning.drill import Outcome, Server, Spec

GRACE_S = 30.0
RECIPE = "--own-checkpoints"


@dataclass(frozen=True)
class Case:
    what: str
    world: int
    fault: dict
    args: tuple[str, ...] = ()
    validating: bool = False


def fault(phase: str, *, rank: int = 0, action: str = "TERM", also: tuple[int, ...] = (), skew_s: float = 0.0) -> dict:
    return {"rank": rank, "phase": phase, "action": action, "also": list(also), "skew_s": skew_s}


SLOW = ("--step-s", "0.02")
CASES = (
    Case("1 rank, in a step", 1, fault("backward"), SLOW),
    Case("1 rank, in a validation of 3 s", 1, fault("evaluation"), (*SLOW, "--val-s", "0.5"), validating=True),
    Case("2 ranks, rank 0 alone", 2, fault("backward"), SLOW),
    Case("2 ranks, rank 1 alone", 2, fault("backward", rank=1), SLOW),
    Case("2 ranks, both at once", 2, fault("backward", also=(1,)), SLOW),
    Case("2 ranks, 0.1 s apart", 2, fault("backward", also=(1,), skew_s=0.1), SLOW),
    Case("2 ranks, 1 s apart", 2, fault("backward", also=(1,), skew_s=1.0), SLOW),
    Case("2 ranks, SIGKILL of rank 1", 2, fault("forward", rank=1, action="KILL"), SLOW),
)


@dataclass
class Tally:
    runs: int = 0
    well: int = 0
    lost: list[int] = field(default_factory=list)
    exact: int = 0
    seconds: list[float] = field(default_factory=list)
    codes: set[int] = field(default_factory=set)


class Bench:
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.servers = {True: Server(enabled=True), False: Server(enabled=False)}
        self._numbers = 0
        self._ends: dict[tuple, list] = {}

    def close(self) -> None:
        for server in self.servers.values():
            server.close()

    def out(self) -> str:
        self._numbers += 1
        return str(self.folder / f"run-{self._numbers}")

    def end_of(self, case: Case) -> list:
        """The bits at the end of a run that nobody stopped."""
        key = (case.world, case.args)
        if key not in self._ends:
            done = self.servers[False].run(Spec(self.out(), list(case.args), case.world, on=False))
            assert done.codes == [0] * case.world, done.log
            self._ends[key] = [result["digests"] for result in done.results]
        return self._ends[key]

    def try_once(self, case: Case, ours: bool, step: int) -> tuple[bool, int | None, bool, float, list[int]]:
        server, out = self.servers[ours], self.out()
        args = list(case.args) + ([] if ours else [RECIPE])
        faults = [{**case.fault, "step": step}]
        try:
            stopped = server.run(Spec(out, args, case.world, ours, faults=faults, patient=False), GRACE_S + 10)
            left, seconds, codes = True, stopped.after_fault_s, stopped.codes
        except AssertionError:  # it had to be killed
            left, seconds, codes = False, GRACE_S, []
        try:
            again: Outcome | None = server.run(Spec(out, args, case.world, ours))
        except AssertionError:
            again = None
        finished = again is not None and again.codes == [0] * case.world
        lost = None
        if finished and again is not None:
            completed = step if case.validating else step - 1
            trace = again.results[0]["trace"]
            lost = max(0, completed - (trace[0][0] if trace else completed))
        exact = finished and again is not None and [result["digests"] for result in again.results] == self.end_of(case)
        shutil.rmtree(out, ignore_errors=True)
        return left and finished, lost, exact, seconds, codes

    def compare(self, rounds: int) -> dict[tuple[str, bool], Tally]:
        tallies: dict[tuple[str, bool], Tally] = defaultdict(Tally)
        for number in range(rounds):
            for case in CASES:
                # Batches of an epoch: 12 for one rank, 6 for each of two.
                step = 12 if case.validating else (7, 10, 4, 14, 9, 3, 16)[number % 7]
                for ours in (False, True):
                    well, lost, exact, seconds, codes = self.try_once(case, ours, step)
                    tally = tallies[case.what, ours]
                    tally.runs += 1
                    tally.well += well
                    tally.exact += exact
                    tally.seconds.append(seconds)
                    tally.codes |= set(codes)
                    if lost is not None:
                        tally.lost.append(lost)
                print(".", end="", flush=True)
        print()
        return tallies

    def speed(self, world: int, rounds: int) -> dict[str, Pairs]:
        """The usual time of a step with the adapter and without, in turn: of a tiny model, and where it takes 20 ms."""
        tiny = ["--silent", "--epochs", "4", "--samples", str(1600 * world), "--val-every", "4"]
        usual = ["--silent", "--epochs", "2", "--samples", str(800 * world), "--val-every", "2", "--step-s", "0.02"]
        pairs = {"a tiny model": Pairs(), "steps of 20 ms": Pairs()}
        for number in range(rounds + 1):
            for args, times in zip((tiny, usual), pairs.values(), strict=True):
                taken = {}
                for ours in (number % 2 == 0, number % 2 != 0):
                    out = self.out()
                    done = self.servers[ours].run(Spec(out, args, world, ours), 300)
                    assert done.codes == [0] * world, done.log
                    taken[ours] = done.results[0]["step_s"]
                    shutil.rmtree(out, ignore_errors=True)
                if number:  # the first is for warming up
                    times.add(taken[True], taken[False])
        return pairs


def row(tally: Tally) -> list[str]:
    lost = f"{statistics.mean(tally.lost):.1f} (most {max(tally.lost)})" if tally.lost else "–"
    return [
        f"{tally.well} of {tally.runs}",
        lost,
        f"{tally.exact} of {tally.runs}",
        f"{statistics.median(tally.seconds):.1f} s",
        ", ".join(map(str, sorted(tally.codes))) or "–",
    ]


def show(tallies: dict[tuple[str, bool], Tally], speeds: dict[int, dict[str, Pairs]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("stopped", "by", "ended well", "steps lost", "exact", "to exit", "exit codes"):
        table.add_column(heading)
    for (what, ours), tally in tallies.items():
        table.add_row("" if ours else what, "with holdfast" if ours else "Lightning alone", *row(tally))
    for ours in (False, True) if tallies else ():
        every = Tally()
        for (_, who), tally in tallies.items():
            if who == ours:
                every.runs, every.well = every.runs + tally.runs, every.well + tally.well
                every.exact, every.codes = every.exact + tally.exact, every.codes | tally.codes
                every.lost, every.seconds = every.lost + tally.lost, every.seconds + tally.seconds
        table.add_row("" if ours else "all", "with holdfast" if ours else "Lightning alone", *row(every))
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    if tallies:
        console.print(table)
    for world, pairs in speeds.items():
        ranks = f"{world} rank{'s' if world > 1 else ''}"
        for what, times in pairs.items():
            console.print(f"time of a step with holdfast / without, {ranks}, {what}: {times}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Lightning with holdfast beside Lightning alone.")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each case and side (default 5)")
    parser.add_argument("--speed-rounds", type=int, default=9, help="pairs of runs that are timed (default 9)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=".") as folder:
        bench = Bench(str(Path(folder).resolve()))
        try:
            tallies = bench.compare(options.rounds)
            speeds = {world: bench.speed(world, options.speed_rounds) for world in (1, 2) if options.speed_rounds}
        finally:
            bench.close()
    show(tallies, speeds)
    if options.json:
        content = {
            f"{what}, {'with holdfast' if ours else 'alone'}": vars(one) for (what, ours), one in tallies.items()
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"stopped": content, "speed": speeds}, file, indent=1, default=plain)
    ours = [tally for (_, who), tally in tallies.items() if who]
    return 0 if all(tally.well == tally.exact == tally.runs and not any(tally.lost) for tally in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
