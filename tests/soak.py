"""Interrupts real training jobs at random until the time is up, and counts what is lost.

    python -m tests.soak --minutes 10 [--seed N]

Each job is interrupted a few times (SIGTERM or SIGKILL; a random rank, or several, a random phase or
moment, random skew) and resumed until it is complete. In half of the jobs ranks fall behind each other.
Prints runs, hangs, broken checkpoints, steps lost, resumes that were not exact, and the seed of each
failure; exits 1 if there was any.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field

from holdfast.store.checkpoints import whole as complete
from holdfast.store.local import LocalBackend
from tests.jobs.torch import drill
from tests.jobs.torch.checks import uninterrupted
from tests.kit.checks import assert_whole, last_completed_when_noticed
from tests.kit.jobs import journal

PHASES = ["forward", "backward", "optimizer", "after-optimizer", "save", "commit", "evaluation"]


@dataclass
class Tally:
    jobs: int = 0
    runs: int = 0
    sigterm: int = 0
    sigkill: int = 0
    hangs: int = 0
    broken: int = 0
    steps_lost: int = 0
    inexact: int = 0
    failures: list[str] = field(default_factory=list)


def shape(chance: random.Random) -> dict:
    world = chance.choice([1, 2, 2, 2, 3])
    return {
        "world": world,
        "workers": chance.choice([0, 0, 2]),
        "accumulate": chance.choice([1, 1, 2]),
        "batchnorm": chance.random() < 0.3,
        "evaluate_every": 6,
        "isolate_evaluation": True,
        "samples": 48 * world,
    }


def interruption(chance: random.Random, spec: drill.Spec) -> tuple[str, dict | None]:
    """A fault at an exact place, or none: then the signal comes from outside at a random moment."""
    action = chance.choice(["TERM", "TERM", "KILL"])
    if chance.random() < 0.3:
        return action, None
    rank = chance.randrange(spec.world)
    others = [other for other in range(spec.world) if other != rank]
    fault = {"rank": rank, "step": chance.randrange(1, 36), "phase": chance.choice(PHASES), "action": action}
    if action == "TERM" and others and chance.random() < 0.5:
        fault["also"] = chance.sample(others, chance.randint(1, len(others)))
        fault["skew_s"] = chance.choice([0.0, 0.1, 1.0])
    return action, fault


def delays(chance: random.Random, spec: drill.Spec) -> list[dict]:
    """Ranks that fall behind for a moment, here and there."""
    return [
        {
            "rank": chance.randrange(spec.world),
            "step": chance.randrange(1, 36),
            "phase": chance.choice(["forward", "backward", "optimizer", "after-optimizer", "evaluation"]),
            "action": "HANG",
            "skew_s": chance.choice([0.02, 0.05, 0.1, 0.2]),
        }
        for _ in range(chance.choice([0, 25]))
    ]


def one_job(server: drill.Server, seed: int, folder: str, tally: Tally) -> None:
    chance = random.Random(seed)
    kind = shape(chance)
    base = drill.Spec(
        f"{folder}/run",
        save_every=chance.choice(["never", "4 steps", "7 steps", "1 epoch", "0.05s", "0.3s"]),
        store=chance.choice(["rank0", "agent"]),
        settings={"kill_wait": chance.choice([0.0, 0.0, 0.2])},
        step_s=chance.choice([0.0, 0.02]),
        **kind,
    )
    said = False
    for _ in range(chance.randint(1, 3)):
        action, fault = interruption(chance, base)
        spec = drill.Spec(**{**vars(base), "faults": [*delays(chance, base), *([fault] if fault else [])]})
        job = server.start(spec)
        if fault is None:
            job.wait_for("attempt")
            time.sleep(chance.uniform(0.0, 0.6))
            job.send(signal.Signals["SIG" + action], chance.randrange(spec.world))
        tally.runs += 1
        outcome = job.wait(60.0)
        if all(code == 0 for code in outcome.codes):
            return check_end(server, base, outcome, tally, said=said)
        said = said or is_inexact(base.dir)
        tally.sigkill += action == "KILL"
        tally.sigterm += action == "TERM"
        check_loss(spec, action, fault, tally, outcome)
    tally.runs += 1
    check_end(server, base, server.run(base, 60.0), tally, said=said)


def is_inexact(folder: str) -> bool:
    """Whether the newest checkpoint says that a resume from it is not exact."""
    return any(found.manifest.inexact for found in list(complete([LocalBackend(folder)]))[:1])


def check_loss(spec: drill.Spec, action: str, fault: dict | None, tally: Tally, outcome: drill.Outcome) -> None:
    attempt = max(event["attempt"] for event in journal(spec.dir))
    events = [event for event in journal(spec.dir) if event["attempt"] == attempt]
    noticed = [event for event in events if event["event"] == "notice" and "step" in event]
    started = [event["step"] for event in events if event["event"] == "attempt"]
    if not started or not (noticed or fault):
        return
    floor = 0
    if action == "TERM" and noticed:
        floor = last_completed_when_noticed(spec.dir)
    elif action == "KILL" and fault and spec.world > 1:
        floor = fault["step"] - 1 if fault["step"] > started[0] else 0
    left = assert_whole(spec.dir, minimum=1 if floor else 0).step if floor else 0
    if left < floor:
        tally.steps_lost += floor - left
        raise AssertionError(f"{floor - left} steps lost\n{outcome.log}")


def check_end(server: drill.Server, base: drill.Spec, outcome: drill.Outcome, tally: Tally, *, said: bool) -> None:
    """``said``: a checkpoint on the way was not exact, and said so."""
    if outcome.codes != [0] * base.world:
        raise AssertionError(f"ended with {outcome.codes}\n{outcome.log}")
    newest = assert_whole(base.dir)
    if outcome.digest != uninterrupted(server, base).digest and not said and not newest.manifest.inexact:
        tally.inexact += 1
        raise AssertionError(f"not the same bits\n{outcome.log}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="repeat one job")
    arguments = parser.parse_args()
    server, tally = drill.Server(), Tally()
    until = time.monotonic() + arguments.minutes * 60
    seeds = random.SystemRandom()
    while time.monotonic() < until:
        seed = arguments.seed if arguments.seed is not None else seeds.randrange(10**9)
        folder = tempfile.mkdtemp(prefix="holdfast-soak-")
        tally.jobs += 1
        try:
            one_job(server, seed, folder, tally)
            shutil.rmtree(folder, ignore_errors=True)
        except Exception as error:
            text = str(error)
            tally.hangs += "hung" in text
            tally.broken += "whole" in text
            tally.failures.append(f"--seed {seed}: {type(error).__name__}: {text[-3000:]}\n  left in {folder}")
            print(f"FAILED --seed {seed}: {type(error).__name__}: {text.splitlines()[0] if text else ''}", flush=True)
        if arguments.seed is not None:
            break
    print("\n".join(tally.failures))
    print(
        f"{tally.jobs} jobs, {tally.runs} runs, {tally.sigterm} by SIGTERM, {tally.sigkill} by SIGKILL: "
        f"{tally.hangs} hangs, {tally.broken} broken checkpoints, {tally.steps_lost} steps lost, "
        f"{tally.inexact} not exact"
    )
    print(f"{tally.jobs - len(tally.failures)} passed, {len(tally.failures)} failed")
    server.close()
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
