"""Runs ordinary training scripts as real jobs, in a second instead of ten: the ranks are forked from a process that has
imported transformers already. Faults happen at an exact place, by a callback that the script knows nothing of."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.kit import python_path
from tests.kit.jobs import journal
from tests.kit.ports import free_port

HERE = Path(__file__).parent
SCRIPT = HERE / "scripts/transformers_train.py"


@dataclass
class Outcome:
    codes: list[int]
    """Exit codes; negative: the signal that ended the process."""
    seconds: float
    log: str
    result: dict | None
    """What rank 0 wrote at its end."""
    noted: dict | None = None
    """When the first fault happened, and the last step that was complete then."""
    ended: float = 0.0

    @property
    def trained(self) -> list[dict]:
        """The training's log without what depends on the clock."""
        assert self.result is not None, self.log
        timed = ("runtime", "per_second")
        history = self.result["history"]
        return [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in history]


@dataclass
class Spec:
    """One attempt."""

    dir: str
    world: int = 1
    options: list[str] = field(default_factory=list)
    args: dict = field(default_factory=dict)
    """More TrainingArguments."""
    faults: list[dict] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    script: str = str(SCRIPT)
    store: str = "rank0"
    """Where the job's key-value store lives: ``rank0`` or ``agent``."""
    slow_evaluation_s: float = 0.0
    """How long each batch of an evaluation takes."""
    slow_step_s: float = 0.0

    def plain(self, **changes) -> Spec:
        """The same without faults."""
        kept = {name: value for name, value in vars(self).items() if name not in changes}
        return Spec(**{**kept, "faults": [], "slow_evaluation_s": 0.0, "slow_step_s": 0.0, **changes})


# ---------------------------------------------------------------------- in the ranks


def train(request: dict, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    if request["faults"] or request["slow_evaluation_s"] or request["slow_step_s"]:
        _inject(request, rank)
    sys.argv = [request["script"], *request["argv"]]
    runpy.run_path(request["script"], run_name="__main__")


def _inject(request: dict, rank: int) -> None:
    import transformers

    from holdfast.store.local import LocalBackend
    from holdfast.store.manifest import step_of
    from holdfast.testing.faults import Fault, Injector, notices

    kill_wait = os.environ.get("HOLDFAST_KILL_WAIT") != "0"
    folder = request["env"].get("HOLDFAST_DIR", request["dir"])
    heard = partial(notices, folder, kill_wait=kill_wait) if request["env"].get("HOLDFAST_ENABLED") == "1" else None
    injector = Injector(rank, [Fault(**fault) for fault in request["faults"]], heard)
    noted, done = Path(request["pids"]).with_name("noted.json"), [0]

    def at(phase: str, step: int) -> None:
        for fault in injector.faults:  # ranks become processes when they are known
            if fault.rank == rank and fault.phase == phase and fault.step == step:
                pids = _pids(request)
                injector.faults[injector.faults.index(fault)] = Fault(
                    rank, step, phase, fault.action, [pids[other] for other in fault.also], fault.skew_s
                )
                with contextlib.suppress(FileExistsError), noted.open("x") as file:  # the first of all ranks
                    file.write(json.dumps({"at": time.time(), "step": done[0]}))
        injector.reached(phase, step)

    class Faults(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.seen = 0
            at("start", state.global_step)

        def on_step_begin(self, args, state, control, **kwargs):
            at("forward", state.global_step + 1)
            time.sleep(request["slow_step_s"])

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            at("optimizer", state.global_step + 1)

        def on_optimizer_step(self, args, state, control, **kwargs):
            at("after-optimizer", state.global_step + 1)

        def on_step_end(self, args, state, control, **kwargs):
            done[0] = state.global_step

        def on_log(self, args, state, control, **kwargs):
            at("log", state.global_step)

        def on_prediction_step(self, args, state, control, **kwargs):
            self.seen += 1
            if self.seen == 2:
                at("evaluation", state.global_step)
            time.sleep(request["slow_evaluation_s"])

        def on_evaluate(self, args, state, control, **kwargs):
            self.seen = 0
            at("evaluated", state.global_step)

        def on_epoch_end(self, args, state, control, **kwargs):
            at("epoch", state.global_step)

        def on_train_end(self, args, state, control, **kwargs):
            at("end", state.global_step)

    init = transformers.Trainer.__init__

    def with_faults(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.add_callback(Faults())

    transformers.Trainer.__init__ = with_faults
    create, commit = LocalBackend.create, LocalBackend.commit

    def noted_create(self, name, path, size):
        sink = create(self, name, path, size)
        at("save", step_of(name))
        return sink

    def noted_commit(self, name, manifest):
        at("commit", step_of(name))
        commit(self, name, manifest)

    LocalBackend.create, LocalBackend.commit = noted_create, noted_commit


def _pids(request: dict) -> list[int]:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError), open(request["pids"]) as file:
            return json.load(file)
        time.sleep(0.005)
    raise TimeoutError("the processes of the job are not known")


# ---------------------------------------------------------------------- the server


def serve(fd: int, holdfast_on: bool) -> None:
    import datasets  # noqa: F401
    import torch
    import torch.distributed.tensor
    from transformers import Trainer, TrainingArguments  # noqa: F401

    if holdfast_on:
        import holdfast.adapters.transformers.patches
        import holdfast.adapters.transformers.run

        holdfast.adapters.transformers.patches.install(sys.modules["transformers.trainer"])
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
        out = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        for name in [name for name in os.environ if name.startswith(("HOLDFAST_", "CHECKPOINT_"))]:
            del os.environ[name]
        if request["world"] > 1:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(request["world"]), LOCAL_RANK=str(rank))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]))
            os.environ.update(LOCAL_WORLD_SIZE=str(request["world"]))
        os.environ.update(request["env"])
        train(request, rank)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ---------------------------------------------------------------------- in the test


class Server:
    """Runs jobs, one at a time. Without ``holdfast``: transformers as it is, with its own handler."""

    def __init__(self, holdfast: bool = True) -> None:
        ours, theirs = socket.socketpair()
        code = f"from tests.jobs.transformers import drill; drill.serve({theirs.fileno()}, {holdfast})"
        command = [sys.executable, "-c", code]
        path = python_path()
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        environment.pop("HOLDFAST_ENABLED", None)
        if not holdfast:
            environment["HOLDFAST_ENABLED"] = "0"
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._channel = ours
        self._file = ours.makefile("rw")
        assert json.loads(self._file.readline()) == "ready"
        atexit.register(self.close)

    def start(self, spec: Spec) -> Job:
        out = Path(f"{spec.dir}.out")
        out.mkdir(parents=True, exist_ok=True)
        for name in ("result.json", "pids.json", "noted.json"):
            (out / name).unlink(missing_ok=True)
        agent = None
        if spec.store == "agent":
            import torch.distributed as dist

            agent = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        extra = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if agent else {}
        env = {"HOLDFAST_ENABLED": "1", "HOLDFAST_KILL_WAIT": "0", "HOLDFAST_GRACE_PERIOD": "25", **extra, **spec.env}
        target = ["--out", spec.dir, "--result", str(out / "result.json")]
        request = {
            "script": spec.script,
            "argv": [*target, *spec.options, "--args", json.dumps(spec.args)],
            "dir": spec.dir,
            "world": spec.world,
            "faults": spec.faults,
            "slow_evaluation_s": spec.slow_evaluation_s,
            "slow_step_s": spec.slow_step_s,
            "env": {name: value for name, value in env.items() if value},
            "port": agent.port if agent else free_port(),
            "log": str(out / "log"),
            "pids": str(out / "pids.json"),
        }
        print(json.dumps(request), file=self._file, flush=True)
        return Job(spec, json.loads(self._file.readline()), self._channel, self._file, agent)

    def run(self, spec: Spec, limit_s: float = 90.0) -> Outcome:
        return self.start(spec).wait(limit_s)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Job:
    def __init__(self, spec, pids, channel, file, agent) -> None:
        self.spec, self.pids, self._channel, self._file, self._agent = spec, pids, channel, file, agent
        self.began = time.monotonic()

    def send(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def alive(self) -> bool:
        """Whether no process of the job has ended."""
        return not select.select([self._channel], [], [], 0)[0]

    def log(self) -> str:
        return Path(f"{self.spec.dir}.out/log").read_text(errors="replace")

    def wait_for(self, event: str, timeout_s: float = 60.0, **fields) -> dict:
        """The first such event in the journal."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            for found in journal(self.spec.dir):
                if found["event"] == event and all(found.get(key) == value for key, value in fields.items()):
                    return found
            time.sleep(0.01)
        raise TimeoutError(f"no {event} {fields} in {timeout_s} s\n{self.log()}")

    def wait(self, limit_s: float = 90.0) -> Outcome:
        """The outcome; a job that takes longer than ``limit_s`` is killed, and that is a failure."""
        ready, _, _ = select.select([self._channel], [], [], limit_s)
        if not ready:
            log = self.log()
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._file.readline()
            events = "\n".join(json.dumps(event) for event in journal(self.spec.dir)[-20:])
            raise AssertionError(f"the job hung for {limit_s} s:\n{log}\n{events}")
        codes = json.loads(self._file.readline())
        path = Path(f"{self.spec.dir}.out/result.json")
        result = json.loads(path.read_text()) if path.exists() else None
        path = Path(f"{self.spec.dir}.out/noted.json")
        noted = json.loads(path.read_text()) if path.exists() else None
        return Outcome(codes, time.monotonic() - self.began, self.log(), result, noted, time.time())


_shared: list[Server] = []


def shared() -> Server:
    """One server for all test modules."""
    if not _shared:
        _shared.append(Server())
    return _shared[0]
