"""Pulls a worker out of a training in the middle, and reads from the run's journal what it cost.

The trainings know nothing of it. Who makes them safe is holdfast, by ``HOLDFAST_ENABLED=1`` in their environment; what
happened is in the journal that it keeps beside the checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import training
from cluster import Cluster
from holdfast.launch.runs import place_of
from holdfast.progress import read_journal, timeline

HOWS = ("term", "kill", "node")
"""SIGTERM to one process, SIGKILL to one process, SIGTERM to the whole node that it runs on."""
HOLDFAST = [sys.executable, "-m", "holdfast.cli"]
EVERY_STEP = {"HOLDFAST_PROGRESS_EVERY": "1"}
"""So that it is known at which step a training is."""
_LOOK_S = 0.05


class NotInterruptedError(Exception):
    """The training ended, or stood still, before it could be interrupted."""


def wait_for_step(location: str, step: int, running: Callable[[], bool]) -> None:
    """Until the training that saves at ``location`` has done so many steps."""
    path = os.path.join(location, "training_progress.json")
    done = 0
    while done < step:
        if not running():
            raise NotInterruptedError(f"the training ended before step {step}, at which it was to be interrupted")
        time.sleep(_LOOK_S)
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            done = int(json.load(file).get("step", 0))


def interrupt_process(location: str) -> None:
    """SIGTERM to a training that is one process."""
    _preempt(location)


def interrupt_worker(location: str, rank: int, how: str, cluster: Cluster) -> None:
    """One of several workers, in one of the ways in ``HOWS``."""
    if how == "node":
        attempt = place_of(location).attempt()
        owner = attempt.live().get(rank) if attempt is not None else None
        if owner is None:
            raise NotInterruptedError(f"worker {rank} is not alive on this machine")
        cluster.stop_node_of(owner.pid)
        cluster.add()  # what an autoscaler, or Kubernetes, does by itself
        return
    _preempt("--ray", location, "--rank", str(rank), "--signal", how.upper())


def _preempt(*words: str) -> None:
    """``holdfast preempt``. Raises unless the signal was sent; what became of it is in the journal."""
    done = subprocess.run([*HOLDFAST, "preempt", *words, "--json"], capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {}
    if not answer.get("preemptions"):
        said = answer.get("error", {}).get("message") or done.stderr.strip()[-1000:] or "nothing"
        raise NotInterruptedError(f"holdfast preempt ended with {done.returncode} and said: {said}")


def host_of(location: str) -> str | None:
    """Where the last rank of a run trains. In a pod this is the pod's name."""
    attempt = place_of(location).attempt()
    return attempt.ranks[max(attempt.ranks)].host if attempt is not None and attempt.ranks else None


def was_harmless(entry: dict[str, Any]) -> bool:
    """Whether what is in ``interrupted`` of a comparison lost no step and ended as the undisturbed run."""
    lost = sum(cut["steps_lost"] for cut in entry["interruptions"])
    return bool(entry["interruptions"]) and not lost and bool(entry["same_weights"])


def costs(location: str) -> list[dict[str, Any]]:
    """Every interruption of a run: the step, steps lost, seconds until all was saved, seconds until it went on."""
    events = read_journal(os.path.join(location, ".holdfast", "journal.jsonl"))
    names = ("what", "step", "steps_lost", "notice_to_commit_s", "resume_s")
    return [{name: entry[name] for name in names} for entry in timeline(events)]


def note_costs(path: Path, location: str, how: str) -> list[dict[str, Any]]:
    """Into the results of a run that was interrupted."""
    found = costs(location)
    result = json.loads(path.read_text(encoding="utf-8"))
    training.write(str(path.parent), path.name, {**result, "interrupted_how": how, "interruptions": found})
    return found


def main() -> int:
    """For run-benchmark.sh."""
    parser = argparse.ArgumentParser(description="Look at a run that is interrupted, or was.")
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("host", help="print where the last rank trains").add_argument("location")
    note = what.add_parser("note", help="add what the interruptions cost to the results")
    note.add_argument("result", type=Path)
    note.add_argument("location")
    what.add_parser("check", help="fail if one was not harmless").add_argument("comparison", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "host":
        host = host_of(arguments.location)
        print(host or "")
        return 0 if host else 1
    if arguments.what == "note":
        return 0 if note_costs(arguments.result, arguments.location, "pod") else 1
    comparison = json.loads(arguments.comparison.read_text(encoding="utf-8"))
    return 0 if all(map(was_harmless, comparison["interrupted"])) else 1


if __name__ == "__main__":
    sys.exit(main())
