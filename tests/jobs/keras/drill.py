"""Real Keras scripts in real processes, without waiting five seconds for each import of TensorFlow.

A server imports the frameworks once, before any of them has computed anything, and scripts run in processes that are
forked from it. Everything else is as in production: the script is run by its path, switched on by its environment.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from holdfast.base.run_directory import home_of
from tests.kit import python_path

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
SETTINGS = {"HOLDFAST_ENABLED": "1", "HOLDFAST_KILL_WAIT": "0", "HOLDFAST_GRACE_PERIOD": "40"}


@dataclass
class Outcome:
    code: int
    """Exit code; negative: the signal that ended the process."""
    seconds: float
    log: str
    result: dict | None
    """What the script wrote at its end."""


# ---------------------------------------------------------------------- the server


def serve(fd: int, *modules: str) -> None:
    import importlib

    import holdfast.adapters.keras.training as adapter

    for name in modules:
        importlib.import_module(name)
    adapter.install_into_loaded()
    channel = socket.socket(fileno=fd)
    file = channel.makefile("rw")
    print(json.dumps("ready"), file=file, flush=True)
    codes: dict[int, int] = {}
    for line in file:
        request = json.loads(line)
        if "script" in request:
            answer = _fork(request, channel)
        else:
            with contextlib.suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    codes[found[0]] = os.waitstatus_to_exitcode(found[1])
            answer = codes.get(request["pid"])
        print(json.dumps(answer), file=file, flush=True)


def _fork(request: dict, channel: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        channel.close()
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(request["folder"])
        os.environ.update(request["environment"])
        code = _run(request["script"], request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(script: str, arguments: list[str]) -> int:
    import runpy
    import threading

    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)  # as for ``python SCRIPT``
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        traceback.print_exc()
        sys.last_value = error
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    return code


# ---------------------------------------------------------------------- in the test


class Job:
    def __init__(self, server: Server, pid: int, log: Path, out: Path) -> None:
        self._server, self.pid, self._log, self._out = server, pid, log, out
        self._began = time.monotonic()

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, limit_s: float = 120.0) -> Outcome:
        until = time.monotonic() + limit_s
        while (code := self._server.ask(pid=self.pid)) is None:
            if time.monotonic() > until:
                self.send(signal.SIGABRT)
                raise AssertionError(f"the script hung for {limit_s} s:\n{self.log()}")
            time.sleep(0.02)
        result = json.loads(self._out.read_text()) if self._out.exists() else None
        return Outcome(code, time.monotonic() - self._began, self.log(), result)


class Server:
    def __init__(self, *modules: str, **environment: str) -> None:
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-c",
            f"from tests.jobs.keras import drill; drill.serve({theirs.fileno()}, *{modules!r})",
        ]
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
        paths = python_path()
        env = {**os.environ, **quiet, "PYTHONPATH": paths, **environment}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env, stderr=subprocess.DEVNULL)
        theirs.close()
        self._file = ours.makefile("rw")
        assert json.loads(self._file.readline()) == "ready"
        self._number = 0
        atexit.register(self.close)

    def ask(self, **request):
        print(json.dumps(request), file=self._file, flush=True)
        return json.loads(self._file.readline())

    def start(self, script: str, *arguments: str, folder: Path, **environment: str) -> Job:
        """Run a script in ``folder``; it saves to ``folder/run`` unless the environment says otherwise."""
        self._number += 1
        log, out = folder / f"log-{self._number}", folder / f"out-{self._number}.json"
        environment = {**SETTINGS, "HOLDFAST_DIR": str(folder / "run"), **environment}
        environment.setdefault("TEST_JOURNAL", f"{home_of(environment['HOLDFAST_DIR'])}/journal.jsonl")
        pid = self.ask(
            script=str(SCRIPTS / script),
            arguments=[*arguments, "--out", str(out)],
            folder=str(folder),
            log=str(log),
            environment=environment,
        )
        return Job(self, pid, log, out)

    def run(self, script: str, *arguments: str, folder: Path, limit_s: float = 120.0, **environment: str) -> Outcome:
        return self.start(script, *arguments, folder=folder, **environment).wait(limit_s)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
