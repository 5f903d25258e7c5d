"""Runs ordinary PyTorch scripts as real jobs, in a second instead of five: the ranks are forked from a process that has
imported torch already. Faults come at an exact place, by hooks that the script knows nothing of."""

from __future__ import annotations

import builtins
import contextlib
import os
import runpy
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from tests.kit import jobs
from tests.kit.fork_server import ForkServer, as_an_interpreter_ends, pids_in

SCRIPTS = Path(__file__).parent / "scripts"


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
class Outcome(jobs.Outcome):
    printed: list[list[str]]
    """By rank: the lines that the script printed."""


# ---------------------------------------------------------------------- in the ranks


def prepare() -> None:
    import torch
    import torch.distributed
    import torch.distributed.tensor

    with contextlib.suppress(ImportError):
        import accelerate
        import accelerate.utils  # noqa: F401

    import holdfast.adapters.replay.patches
    import holdfast.adapters.replay.script  # noqa: F401

    torch.set_num_threads(1)


def run(request: dict, rank: int) -> None:
    as_an_interpreter_ends(partial(_train, Spec(**request), rank))


def _train(spec: Spec, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    if spec.faults:
        _inject(spec, rank)
    if "ROOM" in os.environ:  # bytes for variables in a checkpoint
        import holdfast.adapters.replay.loop

        holdfast.adapters.replay.loop.LIMIT = int(os.environ["ROOM"])
    path = SCRIPTS / f"{spec.script}.py"
    sys.argv = [str(path), *spec.options]
    if os.environ["HOLDFAST_ENABLED"] != "0":
        import holdfast.adapters.replay.patches

        holdfast.adapters.replay.patches.install(torch)
    runpy.run_path(str(path), run_name="__main__")


def _inject(spec: Spec, rank: int) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from holdfast.testing import notices, report_saves

    heard = partial(notices, os.environ["HOLDFAST_DIR"], kill_wait=os.environ["HOLDFAST_KILL_WAIT"] != "0")
    pending = [fault for fault in spec.faults if fault.get("rank", 0) == rank]
    counts: dict[str, int] = {}

    def reached(place: str) -> None:
        for fault in [fault for fault in pending if place == fault["at"] or place.startswith(fault["at"] + " ")]:
            pending.remove(fault)
            if fault.get("action") == "RAISE":
                raise RuntimeError(f"injected at {place}")
            number = signal.Signals["SIG" + fault.get("action", "TERM")]
            pids = pids_in(f"{spec.dir}.out/pids.json")
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

    def noted_print(*args, **options):
        real_print(*args, **options)
        reached(" ".join(map(str, args)))

    def noted_backward(self, *args, **options):
        count("backward")
        backward(self, *args, **options)

    builtins.print, torch.Tensor.backward = noted_print, noted_backward
    report_saves(lambda phase, step: reached(f"{phase} {step}"))
    register_optimizer_step_pre_hook(lambda *_: count("optimizer"))
    register_optimizer_step_post_hook(lambda *_: count("after-optimizer"))


# ---------------------------------------------------------------------- in the test


class Server(ForkServer):
    """Runs jobs, one at a time."""

    def __init__(self) -> None:
        super().__init__(__name__, jobs.other_variables())

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
        store, ranks = None, [env]
        if spec.world > 1:  # as under torchrun: the launcher keeps the store of the job
            store = jobs.agent_store()
            more = {"LOCAL_WORLD_SIZE": str(spec.world), "TORCHELASTIC_USE_AGENT_STORE": "True", **env}
            ranks = [jobs.rank_variables(rank, spec.world, store.port) | more for rank in range(spec.world)]
        log = out / "log"
        number = self.fork(
            asdict(spec), ranks, log=log, printed="printed", folder=out, pids=out / "pids.json", stacks=True
        )
        job = Job(self, number, log=log, folder=spec.dir)
        job.spec, job.store = spec, store
        return job

    def run(self, spec: Spec, limit_s: float = 120.0) -> Outcome:
        return self.start(spec).wait(limit_s)


class Job(jobs.Job[Outcome]):
    hang_signals = (signal.SIGUSR2, signal.SIGKILL)  # the first makes ranks write their stacks
    spec: Spec
    store: object

    def outcome(self, codes: list[int], seconds: float) -> Outcome:
        printed = [
            Path(f"{self.spec.dir}.out/log.printed-{rank}").read_text().splitlines() for rank in range(self.spec.world)
        ]
        return Outcome(codes, seconds, self.log(), printed)
