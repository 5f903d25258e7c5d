"""A real Slurm of two nodes on this machine, for tests.

A script starts and stops it: the one that ``HOLDFAST_TEST_SLURM`` names, or ``shared/slurm/cluster`` beside the
repository. ``up DIR`` prints the variable to export, ``SLURM_CONF``; ``down DIR`` ends all jobs and daemons.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit import ROOT
from tests.kit.ports import free_port

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
PATIENCE_S = 120.0


@dataclass
class Slurm:
    """The commands of Slurm, with the cluster's configuration."""

    environ: dict[str, str]

    def run(self, *words: str) -> str:
        """What a command prints; AssertionError if it fails."""
        done = subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: Path, *options: str) -> str:
        """Submit a batch script; returns the id of the job."""
        return self.run("sbatch", "--parsable", *options, str(script)).strip().partition(";")[0]

    def state(self, job: str) -> str:
        """The state of a job, such as ``PENDING``, ``RUNNING`` or ``COMPLETED``."""
        match = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job))
        assert match is not None
        return match[1]

    def until_ended(self, job: str, timeout_s: float = PATIENCE_S) -> str:
        """Wait until a job has ended; returns its last state."""
        until = time.monotonic() + timeout_s
        while (state := self.state(job)) not in ENDED:
            assert time.monotonic() < until, f"job {job} is {state} after {timeout_s:g} s\n{self.run('squeue')}"
            time.sleep(0.2)
        return state


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """Start Slurm in ``folder``, and stop it at the end; skip the test where it cannot be had."""
    script = os.environ.get("HOLDFAST_TEST_SLURM") or str(ROOT.parent / "shared/slurm/cluster")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs Slurm, and {', '.join(missing)} is not in PATH: apt-get install slurm-wlm munge")
    if not os.access(script, os.X_OK):
        pytest.skip("needs a script that starts Slurm: name it with HOLDFAST_TEST_SLURM")
    if os.geteuid() != 0:
        pytest.skip("needs root: the daemons of Slurm start processes for other users")
    # Ports of its own (it uses three in a row): another test run on this machine may have a cluster too.
    environ = {**os.environ, "SLURM_TEST_PORT": str(free_port())}
    try:
        up = subprocess.run(
            [script, "up", str(folder)], env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        if up.returncode:
            pytest.fail(f"{script} up failed:\n{up.stdout[-2000:]}{up.stderr[-2000:]}")
        name, _, value = up.stdout.strip().splitlines()[-1].removeprefix("export ").partition("=")
        yield Slurm({**environ, name: shlex.split(value)[0]})
    finally:
        subprocess.run([script, "down", str(folder)], env=environ, capture_output=True, timeout=PATIENCE_S, check=False)
