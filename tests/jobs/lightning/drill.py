"""Runs of scripts/lightning_train.py: real processes, real signals, forked from one that has imported Lightning.

The script does not know holdfast. Faults come from a callback that is slipped into its Trainer.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.kit import python_path
from tests.kit.ports import free_port

HERE = Path(__file__).parent
SCRIPT = HERE / "scripts/lightning_train.py"


@dataclass
class Job:
    """One attempt."""

    out: str
    args: list[str] = field(default_factory=list)
    world: int = 1
    on: bool = True
    env: dict[str, str] = field(default_factory=dict)
    faults: list[dict] = field(default_factory=list)
    package: str = "lightning.pytorch"
    patient: bool = True
    """Training waits where it is until holdfast has heard of a fault."""
    saved_first: bool = False
    """A fault waits until a checkpoint is there."""

    @property
    def dir(self) -> str:
        """Where its checkpoints are."""
        return self.env.get("HOLDFAST_DIR", f"{self.out}/root/holdfast")


@dataclass
class Outcome:
    codes: list[int]
    """Exit codes; negative: the signal that ended the process."""
    seconds: float
    results: list[dict]
    """Of the ranks that came to the end."""
    log: str
    after_fault_s: float = 0.0
    """From the injected fault to the end of the last process."""


# ---------------------------------------------------------------------- in the ranks


def run_rank(job: Job, rank: int, port: int) -> None:
    import runpy

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world, "LOCAL_WORLD_SIZE": job.world}
    place |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "drill"}
    if job.world > 1:
        os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update({"HOLDFAST_ENABLED": str(int(job.on)), "HOLDFAST_KILL_WAIT": "0", **job.env})
    if job.faults:
        _slip_in_faults(job, rank)
    sys.argv = [str(SCRIPT), job.out, "--devices", str(job.world), "--package", job.package, *job.args]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _await_attention(limit_s: float = 20.0) -> None:
    """Until holdfast has heard of it: where it is heard decides what is saved."""
    from holdfast.adapters.lightning import patches as lightning

    until = time.monotonic() + limit_s
    while lightning._current.host.engine.next_stop and time.monotonic() < until:
        time.sleep(0.001)


def _slip_in_faults(job: Job, rank: int) -> None:
    import importlib

    from holdfast.store.local import LocalBackend
    from holdfast.store.manifest import step_of
    from holdfast.testing.faults import Fault, Injector

    L = importlib.import_module(job.package)

    class Noted(Injector):
        __slots__ = ()

        def _carry_out(self, fault):
            until = time.monotonic() + 20
            while job.saved_first and not list(Path(job.dir).glob("checkpoint-*")) and time.monotonic() < until:
                time.sleep(0.01)
            Path(job.out, "fault").write_text(str(time.monotonic()))
            super()._carry_out(fault)
            if job.on and job.patient:
                _await_attention()

    injector = Noted(rank, [])

    def load_faults():
        pids = json.loads(Path(job.out, "pids.json").read_text())
        for fault in job.faults:
            injector.faults.append(Fault(**{**fault, "also": [pids[other] for other in fault.get("also", ())]}))

    class Faults(L.Callback):
        def on_train_start(self, trainer, pl_module):
            load_faults()
            injector.reached("start", trainer.global_step)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            injector.reached("forward", trainer.global_step + 1)

        def on_after_backward(self, trainer, pl_module):
            injector.reached("backward", trainer.global_step + 1)

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            injector.reached("optimizer", trainer.global_step + 1)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            injector.reached("after-optimizer", trainer.global_step)

        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
            if batch_idx == 1 and not trainer.sanity_checking:
                injector.reached("evaluation", trainer.global_step)

        def on_train_epoch_end(self, trainer, pl_module):
            injector.reached("epoch-end", trainer.global_step)

        def on_train_end(self, trainer, pl_module):
            injector.reached("end", trainer.global_step)

    init = L.Trainer.__init__

    def init_with_faults(self, *args, callbacks=(), **kwargs):
        init(self, *args, callbacks=[*callbacks, Faults()], **kwargs)

    L.Trainer.__init__ = init_with_faults
    create = LocalBackend.create

    def noted_create(self, name, path, size):
        injector.reached("save", step_of(name))
        return create(self, name, path, size)

    LocalBackend.create = noted_create


# ---------------------------------------------------------------------- the server


def serve(fd: int) -> None:
    import lightning.pytorch
    import torch
    import torch.distributed

    for module in ("dataloader", "_utils.worker"):
        __import__(f"torch.utils.data.{module}")
    torch.set_num_threads(1)
    channel = socket.socket(fileno=fd)
    file = channel.makefile("rw")
    print(json.dumps(lightning.pytorch.__version__), file=file, flush=True)
    for line in file:
        request = json.loads(line)
        job = Job(**request["job"])
        pids = [_fork(job, rank, request["port"], channel) for rank in range(job.world)]
        Path(job.out, "pids.json.tmp").write_text(json.dumps(pids))
        os.replace(Path(job.out, "pids.json.tmp"), Path(job.out, "pids.json"))
        print(json.dumps(pids), file=file, flush=True)
        codes = {}
        while len(codes) < len(pids):
            pid, status = os.wait()
            codes[pid] = os.waitstatus_to_exitcode(status)
        print(json.dumps([codes[pid] for pid in pids]), file=file, flush=True)


def _fork(job: Job, rank: int, port: int, channel: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        channel.close()
        os.setsid()
        out = os.open(f"{job.out}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        run_rank(job, rank, port)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Running:
    def __init__(self, job: Job, pids: list[int], channel: socket.socket, file) -> None:
        self.job, self.pids, self._channel, self._file = job, pids, channel, file
        self.began = time.monotonic()

    def send(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], number)

    def wait(self, limit_s: float = 120.0) -> Outcome:
        """A job that takes longer is killed, and that is a failure."""
        log = Path(self.job.out, "log")
        ready, _, _ = select.select([self._channel], [], [], limit_s)
        if not ready:
            for pid in self.pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self._file.readline()
            raise AssertionError(f"the job hung for {limit_s} s:\n{log.read_text()}")
        codes = json.loads(self._file.readline())
        results = [json.loads(path.read_text()) for path in sorted(Path(self.job.out).glob("result-*.json"))]
        now, fault = time.monotonic(), Path(self.job.out, "fault")
        after_s = now - float(fault.read_text()) if self.job.faults and fault.exists() else 0.0
        return Outcome(codes, now - self.began, results, log.read_text(), after_s)


class Server:
    """Runs jobs, one at a time."""

    def __init__(self, *, enabled: bool = True) -> None:
        """``enabled``: whether holdfast's adapter is there at all."""
        ours, theirs = socket.socketpair()
        code = f"from tests.jobs.lightning import drill; drill.serve({theirs.fileno()})"
        path = python_path()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "CHECKPOINT_"))}
        environ = {**kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "HOLDFAST_ENABLED": str(int(enabled))}
        self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=environ)
        theirs.close()
        self._channel = ours
        self._file = ours.makefile("rw")
        self.version = json.loads(self._file.readline())

    def start(self, job: Job) -> Running:
        Path(job.out).mkdir(parents=True, exist_ok=True)
        for path in Path(job.out).glob("result-*"):
            path.unlink()
        for name in ("pids.json", "fault"):
            Path(job.out, name).unlink(missing_ok=True)
        print(json.dumps({"job": asdict(job), "port": free_port()}), file=self._file, flush=True)
        return Running(job, json.loads(self._file.readline()), self._channel, self._file)

    def run(self, job: Job, limit_s: float = 120.0) -> Outcome:
        return self.start(job).wait(limit_s)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
