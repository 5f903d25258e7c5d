"""Starts a script as a stranger would: in an interpreter of its own, or forked from one that has imported torch.

The second kind is for plain ``python train.py``; it takes tenths of a second instead of several.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.kit import jobs
from tests.kit.fork_server import ForkServer, as_an_interpreter_ends, kill
from tests.strangers.rows import Row

INJECTED = Path(__file__).parent / "injected"
ORPHANS_S = 15.0


@dataclass
class Ended:
    """One attempt, seen from outside."""

    codes: list[int]
    printed: list[list[str]]
    """Lines on standard output, by rank."""
    errors: str
    seconds: float
    orphans: bool = False
    """Processes that it started outlived it."""
    hung: bool = False

    @property
    def text(self) -> str:
        """All that it wrote: a script may log to standard output, and holdfast with it."""
        return "\n".join([self.errors, *(line for lines in self.printed for line in lines)])


# ---------------------------------------------------------------------- in the ranks


def prepare(modules: str) -> None:
    """Called once in the fork server."""
    import torch

    for name in modules.split(","):
        importlib.import_module(name)
    for name in ("torch.distributed.tensor", "torch.utils.data._utils.worker", "torch.utils.tensorboard"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import holdfast.adapters.replay.patches
    import holdfast.adapters.replay.script  # noqa: F401

    torch.set_num_threads(1)


def run(spec: dict[str, Any], rank: int) -> None:
    """Called in each rank that the fork server forks."""
    as_an_interpreter_ends(partial(_script, spec["script"], spec["args"]), atexit_functions=True)


def _script(script: str, args: list[str]) -> None:
    import torch

    import _holdfast_startup

    torch.set_num_threads(1)
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    sys.path.append(str(INJECTED))
    import strangers_interrupt

    strangers_interrupt.arm()
    sys.argv = [script, *args]
    _holdfast_startup.start()  # as the file holdfast.pth does, had this process not been forked
    runpy.run_path(script, run_name="__main__")


# ---------------------------------------------------------------------- outside


class Launcher:
    """Starts attempts; keeps one fork server for each set of preloaded modules and variables."""

    def __init__(self) -> None:
        self._servers: dict[tuple[object, ...], ForkServer] = {}

    def start(self, row: Row, folder: Path, logs: Path, env: dict[str, str]) -> Attempt:
        """Start one attempt of ``row`` in ``folder``; ``logs`` is an empty folder for what it prints."""
        if row.command:
            return Interpreter(row, folder, logs, env)
        return Forked(self._server(row), row, folder, logs, env)

    def close(self) -> None:
        for server in self._servers.values():
            server.close()

    def _server(self, row: Row) -> ForkServer:
        key = (row.preload, *sorted(row.env.items()))
        if key not in self._servers:
            env = {**clean_environment(), **row.env, "HOLDFAST_ENABLED": "0"}
            self._servers[key] = ForkServer(__name__, env, options={"modules": row.preload})
        return self._servers[key]


class Attempt:
    """One run of a command."""

    limit_s: float
    logs: Path
    world: int
    began: float

    def pids(self) -> list[int]:
        """The processes that were started, by rank."""
        raise NotImplementedError

    def codes(self, wait_s: float) -> list[int] | None:
        """Their exit codes; None if not all have ended in time."""
        raise NotImplementedError

    def send(self, number: int) -> None:
        for pid in self.pids():
            kill(pid, number)

    def send_at(self, pattern: str, number: int, to: str = "") -> bool:
        """Send a signal once a line that matches has been printed; False: it ended before.

        It goes to the command, or to a process below it whose title matches ``to``.
        """
        wanted = re.compile(pattern)
        while self.codes(0.005) is None:
            if time.monotonic() > self.began + self.limit_s:
                return False
            if any(wanted.search(line) for lines in self.printed() for line in lines):
                if to:
                    kill(_below(self.pids(), to), number)
                else:
                    self.send(number)
                return True
        return False

    def printed(self) -> list[list[str]]:
        return [_lines(self.logs / f"log.printed-{rank}") for rank in range(self.world)]

    def wait(self) -> Ended:
        """Wait for the end; what hangs is killed, and what outlives it too."""
        left = max(0.1, self.began + self.limit_s - time.monotonic())
        groups = self.pids()
        codes = self.codes(left)
        hung = codes is None
        if hung:
            for number in (signal.SIGUSR2, signal.SIGKILL):
                _to_groups(groups, number)
                codes = self.codes(2.0) or codes
            codes = codes or self.codes(20.0)
            assert codes is not None, "killed processes do not end"
        seconds = time.monotonic() - self.began
        until = time.monotonic() + ORPHANS_S
        while (orphans := any(_alive(group) for group in groups)) and time.monotonic() < until:
            time.sleep(0.02)
        if orphans:
            _to_groups(groups, signal.SIGKILL)
        errors = self.logs / "log"
        text = errors.read_text(errors="replace") if errors.exists() else ""
        assert codes is not None
        return Ended(codes, self.printed(), text, seconds, orphans, hung)


class Forked(Attempt):
    """Ranks of the fork server."""

    def __init__(self, server: ForkServer, row: Row, folder: Path, logs: Path, env: dict[str, str]) -> None:
        assert row.script is not None
        self.limit_s, self.logs, self.world = row.limit_s, logs, row.world
        self._server = server
        ranks = [env]
        if row.world > 1:
            self._store = jobs.agent_store()
            more = {"LOCAL_WORLD_SIZE": str(row.world), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            ranks = [jobs.rank_variables(rank, row.world, self._store.port) | more | env for rank in range(row.world)]
        pids = logs / "pids.json"
        for rank in ranks:
            rank["STRANGERS_TARGETS"] = str(pids)
        self.began = time.monotonic()
        spec = {"script": row.script.name, "args": [*row.args]}
        self._number = server.fork(
            spec,
            ranks,
            log=logs / "log",
            printed="printed",
            folder=folder,
            pids=pids,
            unset=("HOLDFAST_",),
            stacks=True,
        )
        self._pids = server.pids(self._number)

    def pids(self) -> list[int]:
        return self._pids

    def codes(self, wait_s: float) -> list[int] | None:
        return self._server.codes(self._number, wait_s)


class Interpreter(Attempt):
    """A command of its own."""

    def __init__(self, row: Row, folder: Path, logs: Path, env: dict[str, str]) -> None:
        self.limit_s, self.logs, self.world = row.limit_s, logs, 1
        path = os.pathsep.join([str(INJECTED), env["PYTHONPATH"]] if env.get("PYTHONPATH") else [str(INJECTED)])
        with open(logs / "log.printed-0", "wb") as printed, open(logs / "log", "wb") as errors:
            self.began = time.monotonic()
            self._process = subprocess.Popen(
                [sys.executable, *row.command],
                cwd=folder,
                env={**clean_environment(), **env, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=errors,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        return [self._process.pid]

    def codes(self, wait_s: float) -> list[int] | None:
        try:
            return [self._process.wait(wait_s)]
        except subprocess.TimeoutExpired:
            return None


def clean_environment() -> dict[str, str]:
    """The environment of a stranger who has not configured anything."""
    ours = ("HOLDFAST_", "CHECKPOINT_", "STRANGERS_", "PYTEST_", "PYTHONPATH", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TF_CPP_MIN_LOG_LEVEL": "3", "HF_HUB_OFFLINE": "1"}
    return {**kept, **quiet, "PYTHONUNBUFFERED": "1", "PATH": f"{Path(sys.executable).parent}:{kept.get('PATH', '')}"}


def _to_groups(pids: list[int], number: int) -> None:
    """Send a signal to the process groups of these processes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def _alive(group: int) -> bool:
    """Whether a process of the group has not ended; one that nobody has waited for has."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                return True
    return False


def _below(pids: list[int], title: str) -> int:
    """A process that one of these has started, by others or not, whose title matches."""
    parents, titles = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            number = int(path.name)
            parents[number] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            titles[number] = (path / "cmdline").read_text(errors="replace").replace("\0", " ")
    for number in sorted(titles):
        above = parents.get(number)
        while above is not None and above not in pids:
            above = parents.get(above)
        if above is not None and re.search(title, titles[number]):
            return number
    raise RuntimeError(f"no process below {pids} has a title like {title!r}")


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []
