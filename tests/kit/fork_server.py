"""A process that imports a framework once and forks the ranks of real jobs from there: a second instead of ten.

A drill is a module with two functions. ``prepare(**options)`` runs once, in the server: it imports what the ranks will
need, before anything has computed. ``run(spec, rank)`` runs in each rank. Everything else is as in production: the
ranks are real processes, each in a session of its own, with real signals and real files.

The server stays single-threaded, since it forks: it waits for requests and for the end of ranks with one ``select``.
Both directions of the channel are lines of JSON::

    {"job": 3, "spec": {…}, "ranks": [{…}, {…}], …}      a request
    {"job": 3, "pids": [71, 72]}                         its ranks are running
    {"job": 3, "codes": [0, 143]}                        all of them have ended
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import _holdfast_startup
from tests.kit import python_path

# ---------------------------------------------------------------------- in the server


class _Channel:
    """Lines of JSON over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = b""

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next message; None if none comes in time. EOFError: the other side has ended."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._received:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self.socket], [], [], left)[0]:
                return None
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError("the other side of the channel has ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


def serve(fd: int, module: str, options: dict[str, Any]) -> None:
    """Fork the ranks of the jobs that are asked for at the other end of ``fd``, until it is closed."""
    drill = importlib.import_module(module)
    ready = drill.prepare(**options)
    channel = _Channel(socket.socket(fileno=fd))
    channel.send({"ready": ready})
    watched = selectors.DefaultSelector()
    watched.register(channel.socket, selectors.EVENT_READ)
    jobs: dict[int, list[int]] = {}
    codes: dict[int, int] = {}
    while True:
        for key, _ in watched.select():
            if key.fileobj is channel.socket:
                try:
                    request = channel.receive()
                except EOFError:
                    return
                assert request is not None
                pids = [_fork(drill.run, request, rank, channel, watched) for rank in range(len(request["ranks"]))]
                for pid in pids:
                    watched.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                if request["pids"]:
                    _write_pids(request["pids"], pids)
                jobs[request["job"]] = pids
                channel.send({"job": request["job"], "pids": pids})
            else:
                codes[key.data] = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                watched.unregister(key.fileobj)
                os.close(key.fd)
        for job in [job for job, pids in jobs.items() if all(pid in codes for pid in pids)]:
            channel.send({"job": job, "codes": [codes.pop(pid) for pid in jobs.pop(job)]})


def _write_pids(path: str, pids: list[int]) -> None:
    Path(f"{path}.tmp").write_text(json.dumps(pids))
    os.replace(f"{path}.tmp", path)


def _fork(
    run: Callable[[dict[str, Any], int], None],
    request: dict[str, Any],
    rank: int,
    channel: _Channel,
    watched: selectors.BaseSelector,
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for key in list(watched.get_map().values()):
            os.close(key.fd)
        channel.socket.detach()
        watched.close()
        os.setsid()
        if request["folder"]:
            os.chdir(request["folder"])
            _holdfast_startup.FOLDER = os.getcwd()  # as if the process had been started here
        mine = request["ranks"][rank]
        for number, name in ((1, mine["stdout"]), (2, mine["stderr"])):
            opened = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(opened, number)
            os.close(opened)
        for name in [name for name in os.environ if name.startswith(tuple(request["unset"]))]:
            del os.environ[name]
        os.environ.update(mine["env"])
        if request["stacks"]:
            faulthandler.register(signal.SIGUSR2)
        run(request["spec"], rank)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ---------------------------------------------------------------------- in a rank


def as_an_interpreter_ends(run: Callable[[], None], *, atexit_functions: bool = False) -> None:
    """Run a script to its end as an interpreter does: the error is printed and kept, then threads are told to end.

    A rank that is forked leaves by ``os._exit``, which does none of this.
    """
    code: object = None
    try:
        run()
    except SystemExit as leaving:
        code = leaving.code
    except BaseException as error:
        traceback.print_exc()
        sys.last_value = error
        code = 1
    sys.stdout.flush()
    threading._shutdown()  # type: ignore[attr-defined]
    if atexit_functions:
        atexit._run_exitfuncs()
    raise SystemExit(code)


def pids_in(path: str | os.PathLike[str], timeout_s: float = 20.0) -> list[int]:
    """The processes of a job by rank, from the file that the server writes once all of them are forked."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        try:
            found: list[int] = json.loads(Path(path).read_text())
            return found
        except FileNotFoundError:
            time.sleep(0.005)
    raise TimeoutError(f"the processes of the job are not known after {timeout_s:g} s: there is no {path}")


# ---------------------------------------------------------------------- in the test


class ForkServer:
    """The server, seen from the test: it starts jobs of the drill ``module``."""

    def __init__(
        self,
        module: str,
        environ: Mapping[str, str],
        *,
        options: dict[str, Any] | None = None,
        stderr: IO[Any] | int | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        code = f"from tests.kit import fork_server; fork_server.serve({theirs.fileno()}, {module!r}, {options or {}!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            env={**environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"},
            stderr=stderr,
        )
        theirs.close()
        self._channel = _Channel(ours)
        self._running: dict[int, list[int]] = {}
        self._ended: dict[int, list[int]] = {}
        self._jobs = 0
        ready = self._channel.receive()
        assert ready is not None
        self.ready: Any = ready["ready"]
        """What the drill's ``prepare`` returned."""
        atexit.register(self.close)

    def fork(
        self,
        spec: dict[str, Any],
        ranks: list[dict[str, str]],
        *,
        log: Path,
        printed: str = "",
        folder: Path | None = None,
        pids: Path | None = None,
        unset: tuple[str, ...] = (),
        stacks: bool = False,
    ) -> int:
        """Start a job and return its number.

        ``ranks``: the environment variables of each. ``log``: both outputs of all ranks; with ``printed``, the standard
        output of rank N goes to the log's name with ``.printed-N`` instead. ``unset``: variables that ranks do not get
        from the server, by the beginnings of their names. ``stacks``: SIGUSR2 makes a rank write its stacks to the log.
        """
        self._jobs += 1
        number = self._jobs
        outputs = [{"stdout": f"{log}.{printed}-{rank}" if printed else str(log)} for rank in range(len(ranks))]
        self._channel.send(
            {
                "job": number,
                "spec": spec,
                "ranks": [
                    {"env": env, "stderr": str(log), **output} for env, output in zip(ranks, outputs, strict=True)
                ],
                "folder": str(folder) if folder else None,
                "pids": str(pids) if pids else None,
                "unset": unset,
                "stacks": stacks,
            }
        )
        while number not in self._running and number not in self._ended:
            self._receive(None)
        return number

    def pids(self, number: int) -> list[int]:
        """The processes of a job by rank; none once all of them have ended."""
        return self._running.get(number, [])

    def codes(self, number: int, timeout_s: float = 0.0) -> list[int] | None:
        """The exit codes of a job by rank, negative for a signal; None if it has not ended in time."""
        until = time.monotonic() + timeout_s
        while number not in self._ended:
            if not self._receive(max(0.0, until - time.monotonic())):
                return None
        return self._ended[number]

    def close(self) -> None:
        """Kill the server, and the ranks that still run."""
        if self._process.poll() is None:
            while self._receive(0.0):
                pass
            for pids in self._running.values():
                for pid in pids:
                    kill(pid)
        self._process.kill()
        self._process.wait()

    def _receive(self, timeout_s: float | None) -> bool:
        message = self._channel.receive(timeout_s)
        if message is None:
            return False
        if "pids" in message:
            self._running[message["job"]] = message["pids"]
        else:
            del self._running[message["job"]]
            self._ended[message["job"]] = message["codes"]
        return True


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
