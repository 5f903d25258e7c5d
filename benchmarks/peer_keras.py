"""Keras with holdfast beside Keras alone: ``python -m benchmarks.peer_keras [--rounds N] [--json FILE]``.

One script, the same signals at the same places, on all sides. Keras alone follows its documentation: one process has a
``BackupAndRestore``, every epoch or every five steps; two workers under ``MultiWorkerMirroredStrategy`` have one every
five steps, or a loop of their own around TensorFlow's ``PreemptionCheckpointHandler``, with a checkpoint every five
steps besides. With holdfast the script has none of these, and one variable is set.

A run ends well if the signal makes all processes leave within the grace period, after which they are killed, and the
same command then goes on and finishes. Steps lost: complete when the last process left, and done again. Exact: the same
bits at the end as the same training that nobody stopped. Steps after the signal take 0.7 s, so that a training that
ignores it is not over before it is killed. Where a moment could be before or after a save of Keras, it is after it. On
all sides the state of tf-keras' Dropout lies in a variable, without which none could be exact.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench import Pairs, plain
from tests.jobs.keras.drill import Job, Server
from tests.kit.ports import free_port

GRACE_S = 15.0
LIMIT_S = 90.0
OURS = "with holdfast"
RECIPES = {
    "BackupAndRestore, epoch": "epoch",
    "BackupAndRestore, 5 steps": "5",
    "PreemptionCheckpointHandler": "handler",
    OURS: "",
}
ALONE = ("BackupAndRestore, epoch", "BackupAndRestore, 5 steps")
WORKERS = ("BackupAndRestore, 5 steps", "PreemptionCheckpointHandler")
STEPS = (16, 7, 22, 14, 3, 19, 10)
"""Where a signal comes, in turn; an epoch has 12 steps, and a training three."""


@dataclass(frozen=True)
class Case:
    what: str
    world: int
    moment: str
    ranks: str = "0"
    number: int | None = None
    signal: int = signal.SIGTERM
    args: tuple[str, ...] = ()

    @property
    def peers(self) -> tuple[str, ...]:
        if self.world == 1:
            return ALONE
        # Under SIGTERM a BackupAndRestore of workers does the same whoever gets it, which takes the whole grace period.
        return WORKERS if self.ranks == "0,1" or self.signal == signal.SIGKILL else WORKERS[1:]


CASES = (
    Case("1 process, in a batch", 1, "batch_begin", args=("--validate",)),
    Case("1 process, in a validation of 2 s", 1, "test_batch", number=8, args=("--validate",)),
    Case("1 process, at the end of an epoch", 1, "epoch_end", number=1, args=("--validate",)),
    Case("2 workers, rank 0 alone", 2, "batch_begin"),
    Case("2 workers, rank 1 alone", 2, "batch_begin", "1"),
    Case("2 workers, both at once", 2, "batch_begin", "0,1"),
    Case("2 workers, SIGKILL of rank 1", 2, "batch_begin", "1", signal=signal.SIGKILL),
)


@dataclass
class Tally:
    runs: int = 0
    well: int = 0
    lost: list[int] = field(default_factory=list)
    exact: int = 0
    seconds: list[float] = field(default_factory=list)
    codes: set[int] = field(default_factory=set)

    def add(self, other: Tally) -> None:
        self.runs, self.well, self.exact = self.runs + other.runs, self.well + other.well, self.exact + other.exact
        self.lost, self.seconds = self.lost + other.lost, self.seconds + other.seconds
        self.codes |= other.codes


@dataclass
class Ended:
    codes: list[int] | None
    """None: they had to be killed."""
    at: float
    results: list[dict[str, Any]]
    log: str

    def finished(self, world: int) -> bool:
        return self.codes == [0] * world and len(self.results) == world


class Bench:
    def __init__(self, folder: str, keep: str | None = None) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.server = Server("tensorflow", "keras", "tf_keras")
        self._numbers = 0
        self._ends: dict[tuple, list[str]] = {}

    def close(self) -> None:
        self.server.close()

    def out(self) -> Path:
        self._numbers += 1
        folder = self.folder / f"run-{self._numbers}"
        folder.mkdir()
        return folder

    def run(self, folder: Path, world: int, ours: bool, *args: str, notes: str = "", limit_s: float = LIMIT_S) -> Ended:
        """Until all have left; those that are still there ``GRACE_S`` after a signal, or at the limit, are killed."""
        environment = {"HOLDFAST_ENABLED": "1" if ours else "0", "GCE_METADATA_IP": "127.0.0.1:9"}
        args = (*args, "--backup", str(folder / "backup"))
        if notes:
            args = (*args, "--notes", str(folder / notes))
        cluster = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(world)]}
        jobs: list[Job] = []
        for rank in range(world):
            if world > 1:
                config = {"cluster": cluster, "task": {"type": "worker", "index": rank}}
                environment["TF_CONFIG"] = json.dumps(config)
            jobs.append(self.server.start("keras_peer.py", *args, folder=folder, **environment))
        codes: dict[int, int] = {}
        until, signalled, killed = time.monotonic() + limit_s, False, False
        while len(codes) < world:
            for rank, job in enumerate(jobs):
                if rank not in codes and (ended := job.poll()) is not None:
                    codes[rank] = ended[0]
            if notes and not signalled and (at := signal_in(folder, notes)) is not None:
                signalled, until = True, at + GRACE_S
            if time.monotonic() > until and not killed and len(codes) < world:
                killed = True
                for rank, job in enumerate(jobs):
                    if rank not in codes:
                        job.send(signal.SIGKILL)
            time.sleep(0.02)
        at = time.monotonic()
        outcomes = [job.wait() for job in jobs]
        results = [outcome.result for outcome in outcomes if outcome.result is not None]
        log = "\n\n".join(outcome.log for outcome in outcomes)
        return Ended(None if killed else [codes[rank] for rank in range(world)], at, results, log)

    def end_of(self, case: Case, recipe: str) -> list[str]:
        """The bits at the end of a run that nobody stopped; a loop of one's own is another training than ``fit``."""
        args = [*case.args, *(["--own", "handler"] if recipe == "handler" else [])]
        key = (case.world, *args)
        if key not in self._ends:
            done = self.run(self.out(), case.world, False, *args)
            assert done.finished(case.world), done.log
            self._ends[key] = [result["digest"] for result in done.results]
        return self._ends[key]

    def try_once(self, case: Case, side: str, step: int) -> Tally:
        ours, recipe, folder = side == OURS, RECIPES[side], self.out()
        args = [*case.args, *(["--own", recipe] if recipe else [])]
        stop = f"{case.ranks}:{case.moment}:{case.number or step}:{int(case.signal)}"
        slow = ["--step-s", "0.02", "--then-s", "0.7", "--val-s", "0.3" if case.moment == "test_batch" else "0"]
        stopped = self.run(folder, case.world, ours, *args, *slow, "--stop", stop, notes="first")
        began = signal_in(folder, "first")
        assert began is not None, stopped.log
        again = self.run(folder, case.world, ours, *args, notes="again")
        finished = again.finished(case.world)
        done, redone = steps_in(folder, "first"), steps_in(folder, "again")
        tally = Tally(1)
        if finished:
            tally.lost.append(max(0, max(done, default=0) - (redone[0] - 1 if redone else max(done, default=0))))
        tally.well = int(stopped.codes is not None and 0 not in stopped.codes and finished)
        tally.exact = int(finished and [result["digest"] for result in again.results] == self.end_of(case, recipe))
        tally.seconds.append(stopped.at - began if stopped.codes is not None else GRACE_S)
        tally.codes = set(stopped.codes or ())
        if self.keep and ours and not (tally.well and tally.exact and not any(tally.lost)):
            shutil.copytree(folder, Path(self.keep) / folder.name)
            print(f"\nnot as promised: {case.what}, step {step}: {tally}; see {self.keep}/{folder.name}")
        shutil.rmtree(folder, ignore_errors=True)
        return tally

    def compare(self, rounds: int, peer_rounds: int) -> dict[tuple[str, str], Tally]:
        tallies: dict[tuple[str, str], Tally] = defaultdict(Tally)
        for number in range(max(rounds, peer_rounds)):
            for case in CASES:
                for side in (*case.peers, OURS):
                    if number < (rounds if side == OURS else peer_rounds):
                        tallies[case.what, side].add(self.try_once(case, side, STEPS[number % len(STEPS)]))
                print(".", end="", flush=True)
        print()
        return tallies

    def speed(self, world: int, rounds: int) -> dict[str, Pairs]:
        """Time of training with the adapter / without, in turn: by the clock, and of the processor alone."""
        args = ["--epochs", "4", "--samples", str(4_000 if world == 1 else 1_000)]
        pairs = {"seconds": Pairs(), "cpu_seconds": Pairs()}
        for number in range(rounds + 1):
            taken = {}
            for ours in (number % 2 == 0, number % 2 != 0):
                folder = self.out()
                done = self.run(folder, world, ours, *args, limit_s=300)
                assert done.finished(world), done.log
                taken[ours] = done.results[0]
                shutil.rmtree(folder, ignore_errors=True)
            for name, times in pairs.items():
                if number:  # the first is for warming up
                    times.add(taken[True][name], taken[False][name])
        return pairs


def noted(folder: Path, notes: str, what: str) -> list[list[float]]:
    """What each rank has noted."""
    found = []
    for file in sorted(folder.glob(f"{notes}-*")):
        lines = [line.split() for line in file.read_text().splitlines()]
        found.append([float(words[1]) for words in lines if len(words) == 2 and words[0] == what])
    return found


def signal_in(folder: Path, notes: str) -> float | None:
    with contextlib.suppress(FileNotFoundError):
        return min((at for rank in noted(folder, notes, "signal") for at in rank), default=None)
    return None


def steps_in(folder: Path, notes: str) -> list[int]:
    """Steps that are complete on all ranks, in their order."""
    ranks = noted(folder, notes, "step")
    return [int(steps[0]) for steps in zip(*ranks, strict=False)]


def row(tally: Tally) -> list[str]:
    lost = f"{statistics.mean(tally.lost):.1f} (most {max(tally.lost)})" if tally.lost else "–"
    return [
        f"{tally.well} of {tally.runs}",
        lost,
        f"{tally.exact} of {tally.runs}",
        f"{statistics.median(tally.seconds):.1f} s",
        ", ".join(map(str, sorted(tally.codes))) or "–",
    ]


def show(tallies: dict[tuple[str, str], Tally], speeds: dict[int, dict[str, Pairs]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("stopped", "by", "ended well", "steps lost", "exact", "to exit", "exit codes"):
        table.add_column(heading)
    last = None
    for (what, side), tally in tallies.items():
        table.add_row("" if what == last else what, side, *row(tally))
        last = what
    for side in RECIPES:
        every = Tally()
        for (_, who), tally in tallies.items():
            if who == side:
                every.add(tally)
        if every.runs:
            table.add_row("" if last == "all" else "all", side, *row(every))
            last = "all"
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    if tallies:
        console.print(table)
    for world, pairs in speeds.items():
        console.print(
            f"training time with holdfast / without, {world} {'workers' if world > 1 else 'process'}: "
            f"{pairs['seconds']} by the clock, {pairs['cpu_seconds']} of the processor"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Keras with holdfast beside Keras alone.")
    parser.add_argument("--rounds", type=int, default=6, help="runs of each case with holdfast (default 6)")
    parser.add_argument("--peer-rounds", type=int, help="runs of each case without (default: a third of these)")
    parser.add_argument("--speed-rounds", type=int, default=5, help="pairs of runs that are timed (default 5)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there too")
    parser.add_argument("--keep", metavar="DIR", help="keep the files of runs with holdfast that are not as promised")
    options = parser.parse_args()
    peer_rounds = options.peer_rounds if options.peer_rounds is not None else -(-options.rounds // 3)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=".") as folder:
        bench = Bench(str(Path(folder).resolve()), options.keep and os.path.abspath(options.keep))
        try:
            tallies = bench.compare(options.rounds, peer_rounds)
            show(tallies, {})
            speeds = {world: bench.speed(world, options.speed_rounds) for world in (1, 2) if options.speed_rounds}
        finally:
            bench.close()
    show({}, speeds)
    if options.json:
        content = {f"{what}, {side}": vars(one) for (what, side), one in tallies.items()}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"stopped": content, "speed": speeds}, file, indent=1, default=plain)
    ours = [tally for (_, side), tally in tallies.items() if side == OURS]
    return 0 if all(tally.well == tally.exact == tally.runs and not any(tally.lost) for tally in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
