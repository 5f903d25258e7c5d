"""Runs ordinary PyTorch scripts as real jobs, in a second instead of five: the ranks are forked from a process that has
imported torch already. Faults come at an exact place, by hooks that the script knows nothing of."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.kit import python_path

HERE = Path(__file__).parent


@dataclass
class Spec:
    """One attempt."""

    dir: str
    script: str
    world: int = 1
    faults: list[dict] = field(default_factory=list)
    """``at``: the beginning of a line that is printed, or ``backward 7``, ``optimizer 7``, ``after-optimizer 7`` (the
    seventh time), ``save 12``, ``commit 12`` (of a step). With ``rank``, ``action``, ``also``, ``skew_s``."""
    env: dict[str, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)

    def plain(self, **changes) -> Spec:
        """The same without faults."""
        return Spec(**{**vars(self), "faults": [], **changes})


@dataclass
class Outcome:
    codes: list[int]
    """Exit codes; negative: the signal that ended the process."""
    seconds: float
    printed: list[list[str]]
    """By rank: the lines that the script printed."""
    log: str


# ---------------------------------------------------------------------- in the ranks


def train(request: dict, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    if request["faults"]:
        _inject(request, rank)
    if os.environ["HOLDFAST_ENABLED"] != "0":
        import holdfast.adapters.replay.follower

        holdfast.adapters.replay.follower.install(torch)
    path = HERE / "scripts" / f"{request['script']}.py"
    sys.argv = [str(path), *request["options"]]
    runpy.run_path(str(path), run_name="__main__")


def _inject(request: dict, rank: int) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from holdfast.store.local import LocalBackend
    from holdfast.store.manifest import step_of
    from holdfast.testing.faults import notices

    heard = partial(notices, os.environ["HOLDFAST_DIR"], kill_wait=os.environ["HOLDFAST_KILL_WAIT"] != "0")
    pending = [fault for fault in request["faults"] if fault.get("rank", 0) == rank]
    counts: dict[str, int] = {}

    def reached(place: str) -> None:
        for fault in [fault for fault in pending if place == fault["at"] or place.startswith(fault["at"] + " ")]:
            pending.remove(fault)
            if fault.get("action") == "RAISE":
                raise RuntimeError(f"injected at {place}")
            number = signal.Signals["SIG" + fault.get("action", "TERM")]
            pids = _pids(request)
            for other in fault.get("also", ()):
                threading.Timer(fault.get("skew_s", 0.0), os.kill, (pids[other], number)).start()
            before = heard()
            os.kill(os.getpid(), number)
            until = time.monotonic() + 20
            while heard() == before and time.monotonic() < until:  # else a tiny training would be over by then
                time.sleep(0.002)

    def count(place: str) -> None:
        counts[place] = counts.get(place, 0) + 1
        reached(f"{place} {counts[place]}")

    real_print, backward = builtins.print, torch.Tensor.backward
    create, commit = LocalBackend.create, LocalBackend.commit

    def noted_print(*args, **options):
        real_print(*args, **options)
        reached(" ".join(map(str, args)))

    def noted_backward(self, *args, **options):
        count("backward")
        backward(self, *args, **options)

    def noted_create(self, name, path, size):
        sink = create(self, name, path, size)
        reached(f"save {step_of(name)}")
        return sink

    def noted_commit(self, name, manifest):
        reached(f"commit {step_of(name)}")
        commit(self, name, manifest)

    builtins.print, torch.Tensor.backward = noted_print, noted_backward
    LocalBackend.create, LocalBackend.commit = noted_create, noted_commit
    register_optimizer_step_pre_hook(lambda *_: count("optimizer"))
    register_optimizer_step_post_hook(lambda *_: count("after-optimizer"))


def _pids(request: dict) -> list[int]:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError), open(request["pids"]) as file:
            return json.load(file)
        time.sleep(0.005)
    raise TimeoutError("the processes of the job are not known")


# ---------------------------------------------------------------------- the server


def serve(fd: int) -> None:
    import torch
    import torch.distributed
    import torch.distributed.tensor

    with contextlib.suppress(ImportError):
        import accelerate
        import accelerate.utils  # noqa: F401

    import holdfast.adapters.replay.follower
    import holdfast.adapters.replay.script  # noqa: F401

    torch.set_num_threads(1)
    channel = socket.socket(fileno=fd)
    file = channel.makefile("rw")
    print(json.dumps("ready"), file=file, flush=True)
    for line in file:
        request = json.loads(line)
        pids = [_fork(request, rank, channel) for rank in range(request["world"])]
        temporary = f"{request['pids']}.tmp"
        Path(temporary).write_text(json.dumps(pids))
        os.replace(temporary, request["pids"])
        print(json.dumps(pids), file=file, flush=True)
        codes = {}
        while len(codes) < len(pids):
            pid, status = os.wait()
            if pid in pids:
                codes[pid] = os.waitstatus_to_exitcode(status)
        print(json.dumps([codes[pid] for pid in pids]), file=file, flush=True)


def _fork(request: dict, rank: int, channel: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        channel.close()
        os.setsid()
        os.chdir(os.path.dirname(request["log"]))
        for number, name in ((1, f"{request['log']}.printed-{rank}"), (2, request["log"])):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        if request["world"] > 1:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(request["world"]), LOCAL_RANK=str(rank))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]))
            os.environ.update(LOCAL_WORLD_SIZE=str(request["world"]), TORCHELASTIC_USE_AGENT_STORE="True")
        os.environ.update(request["env"])
        faulthandler.register(signal.SIGUSR2)
        # As at the end of an interpreter: the error is printed and kept, then threads are told to end.
        try:
            train(request, rank)
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException as error:
            traceback.print_exc()
            sys.last_value = error
        sys.stdout.flush()
        threading._shutdown()
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ---------------------------------------------------------------------- in the test


class Server:
    """Runs jobs, one at a time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", f"from tests.jobs.replay import drill; drill.serve({theirs.fileno()})"]
        path = python_path()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "CHECKPOINT_"))}
        environment = {**kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._channel = ours
        self._file = ours.makefile("rw")
        assert json.loads(self._file.readline()) == "ready"
        atexit.register(self.close)

    def start(self, spec: Spec) -> Job:
        out = Path(f"{spec.dir}.out")
        out.mkdir(parents=True, exist_ok=True)
        for path in out.glob("log.printed-*"):
            path.unlink()
        (out / "pids.json").unlink(missing_ok=True)
        env = {
            "HOLDFAST_ENABLED": "1",
            "HOLDFAST_DIR": spec.dir,
            "HOLDFAST_KILL_WAIT": "0",
            "HOLDFAST_GRACE_PERIOD": "25",
            "OUT": str(out),
            **spec.env,
        }
        store = None
        if spec.world > 1:  # as under torchrun: the launcher keeps the store of the job
            import torch.distributed as dist

            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        request = {
            "script": spec.script,
            "options": spec.options,
            "world": spec.world,
            "faults": spec.faults,
            "env": env,
            "port": store.port if store is not None else 0,
            "log": str(out / "log"),
            "pids": str(out / "pids.json"),
        }
        print(json.dumps(request), file=self._file, flush=True)
        return Job(spec, json.loads(self._file.readline()), self._channel, self._file, store)

    def run(self, spec: Spec, limit_s: float = 120.0) -> Outcome:
        return self.start(spec).wait(limit_s)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Job:
    def __init__(self, spec: Spec, pids: list[int], channel: socket.socket, file, store) -> None:
        self.spec, self.pids, self._channel, self._file, self._store = spec, pids, channel, file, store
        self.began = time.monotonic()

    def log(self) -> str:
        return Path(f"{self.spec.dir}.out/log").read_text(errors="replace")

    def wait(self, limit_s: float = 120.0) -> Outcome:
        """The outcome; a job that takes longer than ``limit_s`` is killed, and that is a failure."""
        ready, _, _ = select.select([self._channel], [], [], limit_s)
        if not ready:
            for number in (signal.SIGUSR2, signal.SIGKILL):  # the first makes them write their stacks
                for pid in self.pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(1.0)
            self._file.readline()
            raise AssertionError(f"the job hung for {limit_s} s:\n{self.log()}")
        codes = json.loads(self._file.readline())
        printed = [
            Path(f"{self.spec.dir}.out/log.printed-{rank}").read_text().splitlines() for rank in range(self.spec.world)
        ]
        return Outcome(codes, time.monotonic() - self.began, printed, self.log())
