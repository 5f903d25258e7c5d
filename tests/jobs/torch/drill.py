"""Real training jobs for tests: real processes, real signals, real files, in a second instead of ten.

The ranks are forked from a process that has imported torch (see :mod:`tests.kit.fork_server`). Everything else is as in
production: gloo, DDP, DataLoader workers, holdfast.Run with its default threads and handlers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from tests.kit import jobs
from tests.kit.fork_server import ForkServer
from tests.kit.ports import free_port


@dataclass
class Spec:
    """One attempt of a job."""

    dir: str
    world: int = 2
    epochs: int = 3
    samples: int = 96
    batch: int = 4
    workers: int = 0
    accumulate: int = 1
    dropout: float = 0.2
    batchnorm: bool = False
    augment: bool = False
    stateful: bool = False
    fsdp: bool = False
    scaler: bool = False
    save_every: str = "never"
    evaluate_every: int = 0
    isolate_evaluation: bool = False
    evaluation_s: float = 0.0
    step_s: float = 0.0
    settings: dict = field(default_factory=dict)
    faults: list = field(default_factory=list)
    store: str = "rank0"
    """Where the job's key-value store lives: ``rank0`` or ``agent``."""
    in_thread: bool = False
    width: int = 16
    device: str = "cpu"
    frozen: bool = False
    clock_jump_s: float = 0.0
    env: dict = field(default_factory=dict)


@dataclass
class Outcome(jobs.Outcome):
    results: dict[int, dict]
    """By rank: what a rank that finished wrote."""
    after_notice_s: float | None = None
    """From the first notice to the end of the last process."""

    @property
    def digest(self):
        return self.results[0]["digest"]


# ---------------------------------------------------------------------- in the ranks


def prepare() -> None:
    import torch
    import torch.distributed
    import torch.distributed.fsdp
    import torch.distributed.tensor

    with contextlib.suppress(ImportError):
        import torchdata.stateful_dataloader  # noqa: F401

    import holdfast.torch.run  # noqa: F401

    torch.set_num_threads(1)


def run(request: dict, rank: int) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(relativeCreated)d [{rank}] %(message)s")
    spec = Spec(**request)
    if spec.in_thread:
        sys.exit(_in_thread(spec, rank))
    train(spec, rank)


def _in_thread(spec: Spec, rank: int) -> int:
    import holdfast

    holdfast.listen()
    codes = []

    def run():
        try:
            train(spec, rank)
            codes.append(0)
        except SystemExit as leaving:
            codes.append(leaving.code)
        except BaseException:
            traceback.print_exc()
            codes.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return codes[0]


def train(spec: Spec, rank: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    import holdfast
    from holdfast.testing import Fault, Injector, notices, report_saves

    torch.set_num_threads(1)
    if spec.clock_jump_s:
        _make_the_clock_jump(spec.clock_jump_s)
    if spec.world > 1:
        dist.init_process_group("gloo", init_method="env://")
    pids = _exchange_pids(spec, rank)
    settings = {"kill_wait": 0.0, "grace_period": 20.0, "dir": spec.dir, **spec.settings}
    heard = partial(notices, settings["dir"], kill_wait=settings["kill_wait"] > 0)
    injector = Injector(rank, [_fault(Fault, item, pids) for item in spec.faults], heard)
    torch.manual_seed(7)
    layers = [torch.nn.Linear(8, spec.width)]
    if spec.batchnorm:
        layers.append(torch.nn.BatchNorm1d(spec.width))
    layers += [torch.nn.ReLU(), torch.nn.Dropout(spec.dropout), torch.nn.Linear(spec.width, 2)]
    model = torch.nn.Sequential(*layers).to(spec.device)
    if spec.device != "cpu":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    if spec.frozen:
        model[0].requires_grad_(False)
    if spec.fsdp:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import init_device_mesh

        wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (spec.world,)))
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model) if spec.world > 1 else model
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=10_000)
    scaler = torch.amp.GradScaler("cpu", enabled=True) if spec.scaler else None
    torch.manual_seed(1000 + rank)
    dataset = Data(spec)
    sampler = DistributedSampler(dataset, spec.world, rank, seed=3) if spec.world > 1 else None
    kind = DataLoader
    if spec.stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader as kind
    loader = kind(dataset, spec.batch, shuffle=sampler is None, sampler=sampler, num_workers=spec.workers)
    counters = {"seen": 0}
    objects = {"model": wrapped, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "counters": counters}
    in_flight = 0

    optimizer.register_step_pre_hook(lambda *_: injector.reached("optimizer", in_flight))
    optimizer.register_step_post_hook(lambda *_: injector.reached("after-optimizer", in_flight))
    model[-1 if spec.frozen else 0].weight.register_hook(lambda grad: injector.reached("backward", in_flight))
    model[-1].register_forward_hook(lambda *_: model.training and injector.reached("forward", in_flight))
    report_saves(injector.reached)
    _inject_into_rounds(injector)
    started = time.monotonic()
    injector.reached("start", 0)
    trace = []
    with holdfast.Run(save_every=spec.save_every, settings=settings, **objects) as run:
        restored_s = time.monotonic() - started
        first = run.steps
        for epoch in run.epochs(spec.epochs):
            if sampler is not None:
                sampler.set_epoch(epoch)
            micro = 0
            for x, y in run.batches(loader):
                in_flight = run.steps + 1
                counters["seen"] += len(x)
                x, y = x.to(spec.device), y.to(spec.device)
                loss = torch.nn.functional.cross_entropy(wrapped(x), y) / spec.accumulate
                (scaler.scale(loss) if scaler else loss).backward()
                micro += 1
                if micro % spec.accumulate:
                    continue
                if scaler:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                run.step(loss=loss)
                trace.append([run.steps, float(loss.detach())])
                if spec.evaluate_every and run.steps % spec.evaluate_every == 0:
                    evaluate(spec, model, wrapped, injector, run)
                if spec.step_s:
                    time.sleep(spec.step_s)
            scheduler.step()
        in_flight = run.steps
        injector.reached("end", run.steps)
    digest = digest_of(wrapped, optimizer, counters)
    result = {"digest": digest, "steps": run.steps, "first": first, "resumed": run.resumed_from, "trace": trace}
    result["restored_s"] = restored_s
    Path(f"{spec.dir}.out", f"rank-{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def _make_the_clock_jump(seconds):
    """After a second, the wall clock of this process is set by so much."""
    real, began = time.time, time.monotonic()
    time.time = lambda: real() + (seconds if time.monotonic() - began > 0.2 else 0.0)


def evaluate(spec, model, wrapped, injector, run):
    import contextlib

    import torch
    from torch.utils.data import DataLoader

    with run.evaluation() if spec.isolate_evaluation else contextlib.nullcontext():
        model.eval()
        # Making an iterator with shuffling draws from the random state, as evaluations in the wild do.
        for index, (x, _) in enumerate(DataLoader(Data(spec), 8, shuffle=True)):
            with torch.no_grad():
                model(x.to(spec.device))
            if index == 1:
                injector.reached("evaluation", run.steps)
                time.sleep(spec.evaluation_s)
        model.train()


class Data:
    def __init__(self, spec):
        import torch

        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(spec.samples, 8, generator=generator)
        self.y = (self.x.sum(1) > 0).long()
        self.augment = spec.augment

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        import torch

        x = self.x[index]
        return (x + 0.1 * torch.randn(8) if self.augment else x), self.y[index]


def digest_of(model, optimizer, counters) -> str:
    """All bits of this rank's end state."""
    import torch
    from torch.distributed.tensor import DTensor

    hashed = hashlib.sha256()
    parameters = {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}
    states = [(i, n, t) for i, s in enumerate(optimizer.state.values()) for n, t in s.items()]
    for name, value in sorted(parameters.items()) + [(f"{i}.{n}", t) for i, n, t in states]:
        full = value.full_tensor() if isinstance(value, DTensor) else value
        hashed.update(name.encode() + full.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    hashed.update(json.dumps(counters).encode())
    return hashed.hexdigest()


def _exchange_pids(spec, rank):
    if spec.world == 1:
        return {0: os.getpid()}
    import torch.distributed as dist

    pids = [None] * spec.world
    dist.all_gather_object(pids, os.getpid())
    return dict(enumerate(pids))


def _fault(kind, item, pids):
    item = dict(item)
    item["also"] = [pids[other] for other in item.get("also", ())]
    return kind(**item)


def _inject_into_rounds(injector):
    """Tell the injector that a round was called, by its number, from 0; this rank has not answered yet."""
    from holdfast.agree import Agreement

    decide = Agreement.decide

    def noted_decide(self, *args, **kwargs):
        injector.reached("round", self.round)
        return decide(self, *args, **kwargs)

    Agreement.decide = noted_decide


# ---------------------------------------------------------------------- in the test


class Server(ForkServer):
    """Runs jobs, one at a time."""

    def __init__(self) -> None:
        super().__init__(__name__, os.environ)
        self._job: Job | None = None

    def start(self, spec: Spec) -> Job:
        if self._job is not None:
            self._job.abandon()  # of a test that failed: its end is not that of the next one
        out = Path(f"{spec.dir}.out")
        out.mkdir(parents=True, exist_ok=True)
        for path in out.glob("rank-*"):
            path.unlink()
        store = jobs.agent_store() if spec.store == "agent" else None
        port = store.port if store else free_port()
        more = {**spec.env, **({"TORCHELASTIC_USE_AGENT_STORE": "True"} if store else {})}
        ranks = [jobs.rank_variables(rank, spec.world, port) | more for rank in range(spec.world)]
        log = out / "log"
        self._job = Job(self, self.fork(asdict(spec), ranks, log=log), log=log, folder=spec.dir)
        self._job.spec, self._job.store = spec, store
        return self._job

    def run(self, spec: Spec, limit_s: float = 60.0) -> Outcome:
        return self.start(spec).wait(limit_s)


class Job(jobs.Job[Outcome]):
    limit_s = 60.0
    spec: Spec
    store: object

    def outcome(self, codes: list[int], seconds: float) -> Outcome:
        ended = time.time()
        results = {
            int(path.stem.removeprefix("rank-")): json.loads(path.read_text())
            for path in Path(f"{self.spec.dir}.out").glob("rank-*.json")
        }
        notices = [event["t"] for event in jobs.journal(self.spec.dir) if event["event"] == "notice"]
        return Outcome(codes, seconds, self.log(), results, ended - notices[0] if notices else None)
