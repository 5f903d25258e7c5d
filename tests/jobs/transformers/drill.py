"""Runs ordinary training scripts as real jobs, in a second instead of ten: the ranks are forked from a process that has
imported transformers already. Faults happen at an exact place, by a callback that the script knows nothing of."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from tests.kit import jobs
from tests.kit.fork_server import ForkServer
from tests.kit.ports import free_port

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass
class Outcome(jobs.Outcome):
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
    script: str = str(SCRIPTS / "transformers_train.py")
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


def prepare(holdfast: bool) -> None:
    import datasets  # noqa: F401
    import torch
    import torch.distributed.tensor
    from transformers import Trainer, TrainingArguments  # noqa: F401

    if holdfast:
        import holdfast.adapters.transformers.run
        from holdfast.adapters.transformers import patches

        patches.install(sys.modules["transformers.trainer"])
    torch.set_num_threads(1)


def run(request: dict, rank: int) -> None:
    import torch

    spec = Spec(**request)
    torch.set_num_threads(1)
    if spec.faults or spec.slow_evaluation_s or spec.slow_step_s:
        _inject(spec, rank)
    target = ["--out", spec.dir, "--result", f"{spec.dir}.out/result.json"]
    sys.argv = [spec.script, *target, *spec.options, "--args", json.dumps(spec.args)]
    runpy.run_path(spec.script, run_name="__main__")


def _inject(spec: Spec, rank: int) -> None:
    import transformers

    from holdfast.testing import Fault, notices, report_saves
    from tests.kit.faults import JobInjector

    out, done = Path(f"{spec.dir}.out"), [0]

    class Noted(JobInjector):
        __slots__ = ()

        def inject(self, fault):
            with contextlib.suppress(FileExistsError), (out / "noted.json").open("x") as file:  # the first of all ranks
                file.write(json.dumps({"at": time.time(), "step": done[0]}))
            super().inject(fault)

    kill_wait = os.environ.get("HOLDFAST_KILL_WAIT") != "0"
    folder = os.environ.get("HOLDFAST_DIR", spec.dir)
    heard = partial(notices, folder, kill_wait=kill_wait) if os.environ.get("HOLDFAST_ENABLED") == "1" else None
    injector = Noted(rank, [Fault(**fault) for fault in spec.faults], heard)
    injector.pids = out / "pids.json"

    class Faults(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.seen = 0
            injector.reached("start", state.global_step)

        def on_step_begin(self, args, state, control, **kwargs):
            injector.reached("forward", state.global_step + 1)
            time.sleep(spec.slow_step_s)

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            injector.reached("optimizer", state.global_step + 1)

        def on_optimizer_step(self, args, state, control, **kwargs):
            injector.reached("after-optimizer", state.global_step + 1)

        def on_step_end(self, args, state, control, **kwargs):
            done[0] = state.global_step

        def on_log(self, args, state, control, **kwargs):
            injector.reached("log", state.global_step)

        def on_prediction_step(self, args, state, control, **kwargs):
            self.seen += 1
            if self.seen == 2:
                injector.reached("evaluation", state.global_step)
            time.sleep(spec.slow_evaluation_s)

        def on_evaluate(self, args, state, control, **kwargs):
            self.seen = 0
            injector.reached("evaluated", state.global_step)

        def on_epoch_end(self, args, state, control, **kwargs):
            injector.reached("epoch", state.global_step)

        def on_train_end(self, args, state, control, **kwargs):
            injector.reached("end", state.global_step)

    init = transformers.Trainer.__init__

    def with_faults(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.add_callback(Faults())

    transformers.Trainer.__init__ = with_faults
    report_saves(injector.reached)


# ---------------------------------------------------------------------- in the test


class Server(ForkServer):
    """Runs jobs, one at a time. Without ``holdfast``: transformers as it is, with its own handler."""

    def __init__(self, holdfast: bool = True) -> None:
        environ = {name: value for name, value in os.environ.items() if name != "HOLDFAST_ENABLED"}
        environ |= {"HF_HUB_OFFLINE": "1", **({} if holdfast else {"HOLDFAST_ENABLED": "0"})}
        super().__init__(__name__, environ, options={"holdfast": holdfast})

    def start(self, spec: Spec) -> Job:
        out = Path(f"{spec.dir}.out")
        out.mkdir(parents=True, exist_ok=True)
        for name in ("result.json", "pids.json", "noted.json"):
            (out / name).unlink(missing_ok=True)
        store = jobs.agent_store() if spec.store == "agent" else None
        extra = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if store else {}
        env = {"HOLDFAST_ENABLED": "1", "HOLDFAST_KILL_WAIT": "0", "HOLDFAST_GRACE_PERIOD": "25", **extra, **spec.env}
        env = {name: value for name, value in env.items() if value}
        ranks = [env]
        if spec.world > 1:
            port = store.port if store else free_port()
            more = {"LOCAL_WORLD_SIZE": str(spec.world), **env}
            ranks = [jobs.rank_variables(rank, spec.world, port) | more for rank in range(spec.world)]
        log = out / "log"
        unset = ("HOLDFAST_", "CHECKPOINT_")
        number = self.fork(asdict(spec), ranks, log=log, pids=out / "pids.json", unset=unset)
        job = Job(self, number, log=log, folder=spec.dir)
        job.spec, job.store = spec, store
        return job

    def run(self, spec: Spec, limit_s: float = 90.0) -> Outcome:
        return self.start(spec).wait(limit_s)


class Job(jobs.Job[Outcome]):
    limit_s = 90.0
    spec: Spec
    store: object

    def outcome(self, codes: list[int], seconds: float) -> Outcome:
        result, noted = (
            json.loads(path.read_text()) if path.exists() else None
            for path in (Path(f"{self.spec.dir}.out", name) for name in ("result.json", "noted.json"))
        )
        return Outcome(codes, seconds, self.log(), result, noted, time.time())


_shared: list[Server] = []


def shared() -> Server:
    """One server for all test modules."""
    if not _shared:
        _shared.append(Server())
    return _shared[0]
