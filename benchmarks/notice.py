"""From SIGTERM to the commit: what is left of it without kill_wait, the step in flight and a raw write.

Real processes and a real signal. With two ranks only one of them gets it, so that they must agree first.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import Bench, Row, job_store, place_in_job, raw_write, settle

KILL_WAIT_S = 0.5
LIMIT_S = 0.5
STATE = 128 << 20
START_LIMIT_S = 120.0


def measure(bench: Bench) -> list[Row]:
    rows = []
    for world in (1, 2):
        found = [_preempt(bench, world, number) for number in range(bench.rounds(5, 2))]
        beyond = statistics.median(one["beyond_s"] for one in found)
        total_s, step_s, raw_s = (
            statistics.median(one[part] for one in found) for part in ("total_s", "step_s", "raw_s")
        )
        rows.append(
            Row(
                f"notice → committed, beyond kill_wait, step and raw write, {world} rank{'s' if world > 1 else ''}",
                f"{beyond:.2f} s ({total_s:.2f} − {KILL_WAIT_S} − {step_s:.3f} − {raw_s:.2f})",
                f"≤ {LIMIT_S:g} s",
                beyond <= LIMIT_S,
                {"runs": found},
            )
        )
    return rows


def _preempt(bench: Bench, world: int, number: int) -> dict[str, float]:
    """One run that is preempted; its seconds, by part."""
    folder = bench.path(f"world-{world}-{number}")
    store = job_store()
    size = min(STATE, bench.size)
    command = [sys.executable, str(Path(__file__).with_name("notice_rank.py")), folder, str(KILL_WAIT_S), str(size)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **place_in_job(rank, world, store.port)}, stderr=subprocess.PIPE)
        for rank in range(world)
    ]
    try:
        _wait_for_steps(folder, ranks)
        sent = time.time()
        ranks[-1].send_signal(signal.SIGTERM)
        texts = [rank.communicate(timeout=60)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode != 143 for rank in ranks):
        raise RuntimeError(f"a rank left with {[rank.returncode for rank in ranks]}: {texts[0][-500:]}")
    begin, notice, commit = (_event(folder, name) for name in ("training", "notice", "commit"))
    steps = max(1, notice["step"] - begin["step"])
    target = bench.path("raw")
    raw_s = []
    for _ in range(3):
        settle(target)
        raw_s.append(raw_write(target, commit["bytes"], direct=True))
    settle(target)
    settle(folder)
    parts = {
        "total_s": commit["t"] - sent,
        "step_s": (notice["t"] - begin["t"]) / steps,
        "raw_s": statistics.median(raw_s),
    }
    return {**parts, "beyond_s": parts["total_s"] - KILL_WAIT_S - parts["step_s"] - parts["raw_s"]}


def _wait_for_steps(folder: str, ranks: list[subprocess.Popen[bytes]]) -> None:
    """Until training is under way on all ranks: the first step needs them all."""
    until = time.monotonic() + START_LIMIT_S
    while _event(folder, "training") == {}:
        if time.monotonic() > until or any(rank.poll() is not None for rank in ranks):
            raise RuntimeError("the run did not start")
        time.sleep(0.05)
    time.sleep(1.0)


def _event(folder: str, name: str) -> dict[str, Any]:
    from holdfast.progress import read_journal

    try:
        events = read_journal(os.path.join(folder, ".holdfast", "journal.jsonl"))
        return next((event for event in events if event["event"] == name), {})
    except OSError:
        return {}
