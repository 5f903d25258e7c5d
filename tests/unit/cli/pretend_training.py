"""A process that tells the launcher what a training run tells it, without importing torch: it starts in no time.

``pretend_training.py DIR KEY=VALUE…``; it takes a step every 20 ms, goes on from the newest checkpoint, commits when
it gets SIGTERM and leaves with 143.

``steps``  the end of the run (default 50), or a file that says so and may be replaced meanwhile
``crash_at``   raises at this step, after a commit of the one before it
``code``   exit code of the crash (default 7)   ``stubborn``   does not listen to SIGTERM
``stray``  starts a process of its own session  ``early``      leaves with this code before anything else
``quiet``  writes no progress
``detour`` names another location first, where it does not train in the end, until a file ``go`` lies there
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from holdfast.base.process import Owner
from holdfast.base.run_directory import ATTEMPT, JOURNAL, home_of
from holdfast.progress import Journal, Progress, ProgressFile
from holdfast.store.checkpoints import whole
from holdfast.store.local import LocalBackend, write_durable
from tests.kit.checkpoints import make_checkpoint

location = os.environ.get("HOLDFAST_DIR") or sys.argv[1]
options = dict(argument.split("=") for argument in sys.argv[2:])
if "early" in options:
    sys.exit(int(options["early"]))
stopped: list[int] = []
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in options else lambda number, frame: stopped.append(number))

backend = LocalBackend(location)
home = home_of(location)
os.makedirs(home, exist_ok=True)
try:
    with open(os.path.join(home, ATTEMPT), encoding="utf-8") as file:
        last = json.load(file)
except OSError:
    last = {}
number = last.get("attempt", 0) + 1
owner = Owner(os.environ.get("HOLDFAST_RUN_ID") or last.get("run") or "pretend")
record = {
    "run": owner.run,
    "attempt": number,
    "token": "pretend",
    "location": backend.uri,
    "fallback": None,
    "world": 1,
    "ranks": {"0": owner.as_dict()},
    "kill_wait": 0.0,
    "grace_period": float(os.environ.get("HOLDFAST_GRACE_PERIOD", "30")),
    "started": time.time(),
}
backend.acquire(owner, wait_s=5.0)
if "detour" in options and number > 1:
    other = home_of(options["detour"])
    os.makedirs(other, exist_ok=True)
    write_durable(os.path.join(other, ATTEMPT), json.dumps(record | {"location": options["detour"]}).encode())
    write_durable(os.environ["HOLDFAST_ANNOUNCE"], other.encode())
    while not os.path.exists(os.path.join(options["detour"], "go")):
        time.sleep(0.02)
write_durable(os.path.join(home, ATTEMPT), json.dumps(record).encode())
if "HOLDFAST_ANNOUNCE" in os.environ:
    write_durable(os.environ["HOLDFAST_ANNOUNCE"], home.encode())

journal = Journal(os.path.join(home, JOURNAL), run_id=owner.run, attempt=number, rank=0)
newest = next(whole([backend]), None)
step = 0 if newest is None or os.environ.get("HOLDFAST_RESUME") == "never" else newest.step
resumed = step or None
journal.record("attempt", pid=os.getpid(), world=1, resumed_from=resumed, step=step, location=backend.uri)
journal.record("training", step=step)
progress = ProgressFile(os.path.join(location, "training_progress.json"))
if "stray" in options:
    subprocess.Popen(["sleep", "600.25"], start_new_session=True)


def commit(reason: str) -> None:
    if newest is None or step > newest.step:
        make_checkpoint(location, step, reason=reason, run=owner.run, attempt=number, complete=reason == "final")
        journal.record("commit", step=step, reason=reason, name=f"checkpoint-{step}", location=backend.uri)


def end() -> int:
    wanted = options.get("steps", "50")
    return int(wanted if wanted.isdigit() else Path(wanted).read_text())


while step < (total := end()):
    if stopped:
        journal.record("notice", source="signal", detail="SIGTERM", step=step)
        commit("jit")
        journal.record("end", step=step, outcome="preempted")
        sys.exit(143)
    if step >= int(options.get("crash_at", "1000000")):
        commit("rescue")
        journal.record("end", step=step, outcome="rescued")
        sys.exit(int(options.get("code", "7")))
    time.sleep(0.02)
    step += 1
    if "quiet" not in options:
        progress.write(Progress(step=step, total_steps=total, loss=1.0 / step))
commit("final")
journal.record("end", step=step, outcome="complete")
print("DONE", step, flush=True)
