"""Runs of scripts/lightning_train.py: real processes, real signals, forked from one that has imported Lightning.

The script does not know holdfast. Faults come from a callback that is slipped into its Trainer.
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.kit import jobs
from tests.kit.fork_server import ForkServer
from tests.kit.ports import free_port

SCRIPT = Path(__file__).parent / "scripts/lightning_train.py"


@dataclass
class Spec:
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
class Outcome(jobs.Outcome):
    results: list[dict]
    """Of the ranks that came to the end."""
    after_fault_s: float = 0.0
    """From the injected fault to the end of the last process."""


# ---------------------------------------------------------------------- in the ranks


def prepare() -> str:
    import lightning.pytorch
    import torch
    import torch.distributed

    for module in ("dataloader", "_utils.worker"):
        __import__(f"torch.utils.data.{module}")
    torch.set_num_threads(1)
    return lightning.pytorch.__version__


def run(request: dict, rank: int) -> None:
    spec = Spec(**request)
    if spec.faults:
        _slip_in_faults(spec, rank)
    sys.argv = [str(SCRIPT), spec.out, "--devices", str(spec.world), "--package", spec.package, *spec.args]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _await_attention(package: str, limit_s: float = 20.0) -> None:
    """Until holdfast has heard of it: where it is heard decides what is saved."""
    from holdfast.adapters.lightning.wrappers import wrappers_of

    until = time.monotonic() + limit_s
    while wrappers_of(package).fit.host.engine.next_stop and time.monotonic() < until:
        time.sleep(0.001)


def _slip_in_faults(spec: Spec, rank: int) -> None:
    from holdfast.testing import Fault, report_saves
    from tests.kit.faults import JobInjector

    L = importlib.import_module(spec.package)

    class Noted(JobInjector):
        __slots__ = ()

        def inject(self, fault):
            until = time.monotonic() + 20
            while spec.saved_first and not list(Path(spec.dir).glob("checkpoint-*")) and time.monotonic() < until:
                time.sleep(0.01)
            Path(spec.out, "fault").write_text(str(time.monotonic()))
            super().inject(fault)
            if spec.on and spec.patient:
                _await_attention(spec.package)

    injector = Noted(rank)
    injector.pids = f"{spec.out}/pids.json"

    class Faults(L.Callback):
        def on_train_start(self, trainer, pl_module):
            injector.faults += [Fault(**fault) for fault in spec.faults]
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
    report_saves(injector.reached)


# ---------------------------------------------------------------------- in the test


class Server(ForkServer):
    """Runs jobs, one at a time."""

    def __init__(self, *, enabled: bool = True) -> None:
        """``enabled``: whether holdfast's adapter is there at all."""
        more = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "HOLDFAST_ENABLED": str(int(enabled))}
        super().__init__(__name__, {**jobs.other_variables(), **more})
        self.version: str = self.ready

    def start(self, spec: Spec) -> Job:
        out = Path(spec.out)
        out.mkdir(parents=True, exist_ok=True)
        for path in out.glob("result-*"):
            path.unlink()
        for name in ("pids.json", "fault"):
            (out / name).unlink(missing_ok=True)
        port, log = free_port(), out / "log"
        more = {"LOCAL_WORLD_SIZE": str(spec.world), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "drill"}
        settings = {"HOLDFAST_ENABLED": str(int(spec.on)), "HOLDFAST_KILL_WAIT": "0", **spec.env}
        ranks = [
            (jobs.rank_variables(rank, spec.world, port) | more if spec.world > 1 else {}) | settings
            for rank in range(spec.world)
        ]
        number = self.fork(asdict(spec), ranks, log=log, pids=out / "pids.json")
        job = Job(self, number, log=log, folder=spec.dir)
        job.spec = spec
        return job

    def run(self, spec: Spec, limit_s: float = 120.0) -> Outcome:
        return self.start(spec).wait(limit_s)


class Job(jobs.Job[Outcome]):
    spec: Spec

    def outcome(self, codes: list[int], seconds: float) -> Outcome:
        now = time.monotonic()
        results = [json.loads(path.read_text()) for path in sorted(Path(self.spec.out).glob("result-*.json"))]
        fault = Path(self.spec.out, "fault")
        after_s = now - float(fault.read_text()) if self.spec.faults and fault.exists() else 0.0
        return Outcome(codes, seconds, self.log(), results, after_s)


_shared: list[Server] = []


def shared() -> Server:
    """One server for all test modules."""
    if not _shared:
        _shared.append(Server())
    return _shared[0]
