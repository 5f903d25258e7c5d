"""Real Keras scripts in real processes, without waiting five seconds for each import of TensorFlow.

A server imports the frameworks once, before any of them has computed anything, and scripts run in processes that are
forked from it (see :mod:`tests.kit.fork_server`). Everything else is as in production: the script is run by its path,
switched on by its environment.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.base.run_directory import home_of
from tests.kit import jobs
from tests.kit.fork_server import ForkServer, as_an_interpreter_ends

SCRIPTS = Path(__file__).parent / "scripts"
SETTINGS = {"HOLDFAST_ENABLED": "1", "HOLDFAST_KILL_WAIT": "0", "HOLDFAST_GRACE_PERIOD": "40"}


@dataclass
class Outcome(jobs.Outcome):
    """How a script ended."""

    result: dict | None
    """What it wrote at its end."""

    @property
    def code(self) -> int:
        return self.codes[0]


# ---------------------------------------------------------------------- in the script's process


def prepare(modules: list[str]) -> None:
    import holdfast.adapters.keras.training as adapter

    for name in modules:
        importlib.import_module(name)
    adapter.install_into_loaded()


def run(request: dict, rank: int) -> None:
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = os.path.dirname(request["script"])  # as for ``python SCRIPT``
    script = partial(runpy.run_path, request["script"], run_name="__main__")
    as_an_interpreter_ends(script, atexit_functions=True)


# ---------------------------------------------------------------------- in the test


class Server(ForkServer):
    """Runs scripts, several at a time."""

    def __init__(self, *modules: str, **environment: str) -> None:
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        environ = {**os.environ, **quiet, **environment}
        super().__init__(__name__, environ, options={"modules": modules}, stderr=subprocess.DEVNULL)
        self._number = 0

    def start(self, script: str, *arguments: str, folder: Path, **environment: str) -> Job:
        """Run a script in ``folder``; it saves to ``folder/run`` unless the environment says otherwise."""
        self._number += 1
        log, out = folder / f"log-{self._number}", folder / f"out-{self._number}.json"
        environment = {**SETTINGS, "HOLDFAST_DIR": str(folder / "run"), **environment}
        environment.setdefault("TEST_JOURNAL", f"{home_of(environment['HOLDFAST_DIR'])}/journal.jsonl")
        spec = {"script": str(SCRIPTS / script), "arguments": [*arguments, "--out", str(out)]}
        number = self.fork(spec, [environment], log=log, folder=folder)
        job = Job(self, number, log=log, folder=environment["HOLDFAST_DIR"])
        job.out = out
        return job

    def run(self, script: str, *arguments: str, folder: Path, limit_s: float = 120.0, **environment: str) -> Outcome:
        return self.start(script, *arguments, folder=folder, **environment).wait(limit_s)


class Job(jobs.Job[Outcome]):
    """A script that runs."""

    out: Path

    def outcome(self, codes: list[int], seconds: float) -> Outcome:
        result = json.loads(self.out.read_text()) if self.out.exists() else None
        return Outcome(codes, seconds, self.log(), result)
