"""Counts the optimizer steps of all processes of a job, and sends the signal at a chosen one.

Imported by the ranks of the fork server, and by ``sitecustomize`` in other interpreters. The counter is shared memory,
one slot for each process and one that says whether the signal was sent.
"""

import contextlib
import glob
import json
import mmap
import os
import signal
import sys
import time

COUNTER = "STRANGERS_COUNTER"
"""The file behind the counter."""
POINT = "STRANGERS_POINT"
"""``<steps of all processes>:<before or after the optimizer>:<action>:<rank that is hit, empty: any>``.

TERM goes to the command, INT to all of its processes; KILL, and SELF, which is SIGTERM, to the process that reaches the
step.
"""
TARGETS = "STRANGERS_TARGETS"
"""The processes that get SIGTERM: their number, or a JSON file with a list of them."""
FOLDER = "STRANGERS_FOLDER"
"""Where the script runs: below it holdfast keeps its journal."""
SEED = "STRANGERS_SEED"
"""With which random numbers a script begins that does not seed them."""
SLOTS = 1024
HEARD_S = 3.0


def arm():
    """Count from here on, and send the signal if one is wanted."""
    if COUNTER not in os.environ:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    if SEED in os.environ:
        import torch

        torch.manual_seed(int(os.environ[SEED]))

    file = os.open(os.environ[COUNTER], os.O_RDWR)
    counts = memoryview(mmap.mmap(file, SLOTS * 4)).cast("I")
    os.close(file)
    text = os.environ.get(POINT, "")
    at, when, action, rank = text.split(":") if text else ("0", "", "", "")

    def reached(place):
        mine = not rank or os.environ.get("RANK", "0") == rank
        if place == when and mine and not counts[0] and sum(counts[1:]) >= int(at):
            counts[0] = 1
            _send(action)

    def before(*_):
        counts[1 + os.getpid() % (SLOTS - 1)] += 1
        reached("before")

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(lambda *_: reached("after"))


def seed():
    """Seed what draws random numbers and has no seed yet; torch is seeded when it is armed."""
    if SEED in os.environ:
        import random

        number = int(os.environ[SEED])
        random.seed(number)
        when_imported("numpy", lambda: sys.modules["numpy"].random.seed(number))
        when_imported("tensorflow", lambda: sys.modules["tensorflow"].random.set_seed(number))


def _send(action):
    if action == "KILL":
        os.kill(os.getpid(), signal.SIGKILL)
    heard = _notices()
    for pid in [os.getpid()] if action == "SELF" else _targets():
        with contextlib.suppress(ProcessLookupError):
            if action == "INT":
                os.killpg(pid, signal.SIGINT)
            else:
                os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + HEARD_S
    while _notices() == heard and time.monotonic() < until:  # else a tiny training run would be over by then
        time.sleep(0.005)


def _targets():
    text = os.environ[TARGETS]
    if text.isdigit():
        return [int(text)]
    file = os.open(text, os.O_RDONLY)
    try:
        return json.loads(os.read(file, 1 << 16))
    finally:
        os.close(file)


def _notices():
    """Notices in the journals of all runs below the folder."""
    total = 0
    for path in glob.glob(
        "**/.holdfast/journal.jsonl", root_dir=os.environ[FOLDER], recursive=True, include_hidden=True
    ):
        file = os.open(os.path.join(os.environ[FOLDER], path), os.O_RDONLY)
        try:
            total += os.read(file, 1 << 24).count(b'"event":"notice"')
        finally:
            os.close(file)
    return total


def when_imported(name, act):
    """Call ``act`` once the module ``name`` has been imported; a mere look whether it is there does not count."""

    class Finder:
        looks = False

        @classmethod
        def find_spec(cls, wanted, path=None, target=None):
            if wanted != name or cls.looks:
                return None
            cls.looks = True
            try:
                for finder in sys.meta_path:
                    spec = finder.find_spec(wanted, path, target) if hasattr(finder, "find_spec") else None
                    if spec is not None:
                        _after(spec.loader, imported)
                        return spec
            finally:
                cls.looks = False
            return None

    def imported():
        sys.meta_path.remove(Finder)
        act()

    sys.meta_path.insert(0, Finder)


def _after(loader, act):
    execute = loader.exec_module

    def exec_module(module):
        execute(module)
        act()

    loader.exec_module = exec_module
