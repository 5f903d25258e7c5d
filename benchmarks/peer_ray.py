"""holdfast beside Ray's own recipe (``get_preemption_info``, a checkpoint in the loop), under the same interruptions.

One training script on a real local cluster: bare, with holdfast switched on by environment variables; and with what
Ray's documentation asks a user to write, without holdfast. ``max_failures=0`` for both. A job that fails is submitted
once more, as a person would. Prints a Markdown table::

    python -m benchmarks.peer_ray              # about half an hour
    python -m benchmarks.peer_ray --rounds 1   # a quarter of an hour
    python -m benchmarks.peer_ray --rounds 0 --speed-rounds 7   # the time of a step alone
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from tests.jobs.ray.cluster import Cluster, Job, wait_for

SCRIPT = str(Path(__file__).with_name("peer_ray_train.py"))
KILL_WAIT_S = 0.0
STEP_S = 0.05
DEADLINE_S = 10
AT_STEP = 60
FOLDER = tempfile.TemporaryDirectory(prefix="peer-ray-", ignore_cleanup_errors=True)
HOLDFAST = {"RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "1", "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT": str(KILL_WAIT_S)}


@dataclass
class Outcome:
    """One run that was interrupted once."""

    ended: bool
    """The job, or the same job submitted once more, came to its end."""
    resubmitted: bool
    lost: int | None
    """Steps that were complete and had to be trained again."""
    exact: bool
    commit_s: float | None
    """From the interruption to a committed checkpoint."""


def last_word(out: Path, rank: int, what: str = "step") -> tuple[int, int, str]:
    """Number, process and node of a worker's last note of this kind."""
    with contextlib.suppress(FileNotFoundError):
        for line in reversed((out / f"steps-{rank}").read_text().splitlines()):
            _, pid, node, kind, number = line.split()
            if kind == what:
                return int(number), int(pid), node
    return 0, 0, ""


def drain(cluster: Cluster, out: Path) -> None:
    """The node is told that it has ten seconds, and is gone then."""
    _, pid, name = last_word(out, 1)
    node = cluster.node_of(pid)
    cluster.drain(name, DEADLINE_S)
    threading.Timer(DEADLINE_S, os.killpg, (node.pid, signal.SIGKILL)).start()


def stop_node(cluster: Cluster, out: Path) -> None:
    cluster.node_of(last_word(out, 0)[1]).send_signal(signal.SIGTERM)


def term_worker(cluster: Cluster, out: Path) -> None:
    os.kill(last_word(out, 1)[1], signal.SIGTERM)


def kill_worker(cluster: Cluster, out: Path) -> None:
    os.kill(last_word(out, 1)[1], signal.SIGKILL)


INTERRUPTIONS: dict[str, Callable[[Cluster, Path], None]] = {
    f"`ray drain-node`, {DEADLINE_S} s": drain,
    "SIGTERM to `ray start --block` (a pod)": stop_node,
    "SIGTERM to a worker": term_worker,
    "SIGKILL of a worker": kill_worker,
}


def start(cluster: Cluster, out: Path, *, recipe: bool, **variables: str) -> Job:
    options = ["--storage", str(out / "storage"), "--name", "peer", "--step-s", str(STEP_S), "--epochs", "12"]
    return cluster.run(SCRIPT, out, *options, *(["--recipe"] if recipe else []), **variables)


def interrupted(cluster: Cluster, recipe: bool, interrupt: Callable[[Cluster, Path], None], expected: str) -> Outcome:
    cluster.at_least(3)
    out = Path(tempfile.mkdtemp(dir=FOLDER.name))
    variables = {} if recipe else HOLDFAST
    job = start(cluster, out, recipe=recipe, **variables)
    wait_for(lambda: job.process.poll() is not None or last_word(out, 0)[0] >= AT_STEP, 240.0, "the training begins")
    before = last_word(out, 1)
    sent = time.time()
    interrupt(cluster, out)
    resubmitted = job.wait(400.0) != 0
    if resubmitted:
        cluster.at_least(3)
        job = start(cluster, out, recipe=recipe, **variables)
    ended = job.wait(400.0) == 0
    notes = [line.split() for line in (out / "steps-0").read_text().splitlines()]
    first = notes[0][1]
    reached = max(int(note[4]) for note in notes if note[1] == first and note[3] == "step")
    if recipe:
        again = [int(note[4]) for note in notes if note[1] != first and note[3] == "step"]
        resumed = again[0] - 1 if again else reached
        commits = [
            float(note[0]) for note in notes if note[1] == first and note[3] == "saved" and float(note[0]) > sent
        ]
    else:
        events = [json.loads(line) for line in (out / "storage/peer/holdfast/.holdfast/journal.jsonl").open()]
        commits = [event["t"] for event in events if event["event"] == "commit" and event["t"] > sent]
        resumed = max((event["resumed_from"] or 0 for event in events if event["event"] == "attempt"), default=0)
    digests = {result["digest"] for result in job.result().values()} if ended else set()
    print(f"  from step {before[0]}: reached {reached}, went on from {resumed}, ended {ended}", file=sys.stderr)
    return Outcome(
        ended, resubmitted, max(0, reached - resumed), digests == {expected}, commits[0] - sent if commits else None
    )


def uninterrupted(cluster: Cluster, **variables: str) -> str:
    out = Path(tempfile.mkdtemp(dir=FOLDER.name))
    return str(start(cluster, out, recipe=False, **variables).result()[0]["digest"])


def speed(cluster: Cluster, rounds: int) -> list[tuple[float, float]]:
    """Milliseconds of a step with holdfast and without, in turn."""
    found = []
    for _ in range(rounds):
        pair = []
        for variables in (HOLDFAST, {}):
            out = Path(tempfile.mkdtemp(dir=FOLDER.name))
            options = [
                "--storage",
                str(out),
                "--name",
                "speed",
                "--epochs",
                "100",
                "--width",
                "512",
                "--warm-up",
                "1000",
            ]
            job = cluster.run(SCRIPT, out, *options, "--warm-up", "1000", **variables)
            pair.append(float(job.result()[0]["step_ms"]))  # type: ignore[arg-type]
        found.append((pair[0], pair[1]))
    return found


def median(values: list[Any]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f}" if known else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=3, help="runs of each row; 0: the time of a step alone")
    parser.add_argument("--speed-rounds", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    cluster = Cluster()
    rows: list[str] = []
    numbers: dict[str, Any] = {}
    try:
        cluster.add(3)
        expected = uninterrupted(cluster)
        assert uninterrupted(cluster, **HOLDFAST) == expected, "holdfast changes the training"
        for name, interrupt in INTERRUPTIONS.items() if options.rounds else ():
            for recipe in (True, False):
                who = "Ray's recipe" if recipe else "holdfast"
                print(f"{name}, {who}", file=sys.stderr)
                found = [interrupted(cluster, recipe, interrupt, expected) for _ in range(options.rounds)]
                numbers[f"{name}, {who}"] = [vars(one) for one in found]
                ended = f"{sum(one.ended for one in found)}/{len(found)}"
                again = sum(one.resubmitted for one in found)
                rows.append(
                    f"| {name} | {who} | {ended}{f', {again} after a second start' if again else ''} | "
                    f"{median([one.lost for one in found])} | {sum(one.exact for one in found)}/{len(found)} | "
                    f"{median([one.commit_s for one in found])} |"
                )
        pairs = speed(cluster, options.speed_rounds)
    finally:
        cluster.close()
    ratios = [on / off for on, off in pairs]
    numbers["speed"] = pairs
    print(f"Ray {ray.__version__}, torch {torch.__version__}, {os.cpu_count()} processors, {platform.machine()}\n")
    print("| interruption | who | ended well | steps lost | exact | seconds to commit |\n|---|---|---|---|---|---|")
    print("\n".join(rows))
    print(
        f"\nA step with holdfast / without: {statistics.median(ratios):.3f} "
        f"(of {len(ratios)} pairs: {min(ratios):.3f} to {max(ratios):.3f}; "
        f"{statistics.median(on for on, _ in pairs):.2f} ms / {statistics.median(off for _, off in pairs):.2f} ms)"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
