"""Real training jobs for tests: real processes, real signals, real files, in a second instead of ten.

A server process imports torch once; the ranks of a job are forked from it. Everything else is as in
production: gloo, DDP, DataLoader workers, holdfast.Run with its default threads and handlers.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from tests.kit import python_path
from tests.kit.jobs import journal, last_events
from tests.kit.ports import free_port

HERE = Path(__file__).parent


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
class Outcome:
    codes: list[int]
    """Exit codes; negative: the signal that ended the process."""
    seconds: float
    results: dict[int, dict]
    """By rank: what a rank that finished wrote."""
    log: str
    after_notice_s: float | None = None
    """From the first notice to the end of the last process."""

    @property
    def digest(self):
        return self.results[0]["digest"]


# ---------------------------------------------------------------------- in the ranks


def train(spec: Spec, rank: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    import holdfast
    from holdfast.testing.faults import Fault, Injector, notices

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
    _inject_into_saves(injector)
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


def _inject_into_saves(injector):
    """Tell the injector when a file of a checkpoint is begun, and when the commit begins."""
    from holdfast.store.local import LocalBackend
    from holdfast.store.manifest import step_of

    create, commit = LocalBackend.create, LocalBackend.commit

    def noted_create(self, name, path, size):
        sink = create(self, name, path, size)
        injector.reached("save", step_of(name))
        return sink

    def noted_commit(self, name, manifest):
        injector.reached("commit", step_of(name))
        commit(self, name, manifest)

    LocalBackend.create, LocalBackend.commit = noted_create, noted_commit


# ---------------------------------------------------------------------- the server


def serve(fd: int) -> None:
    import torch
    import torch.distributed
    import torch.distributed.fsdp
    import torch.distributed.tensor

    with contextlib.suppress(ImportError):
        import torchdata.stateful_dataloader  # noqa: F401

    import holdfast.torch.run  # noqa: F401

    torch.set_num_threads(1)
    channel = socket.socket(fileno=fd)
    file = channel.makefile("rw")
    print(json.dumps("ready"), file=file, flush=True)
    for line in file:
        request = json.loads(line)
        spec = Spec(**request["spec"])
        pids = [_fork(spec, rank, request["port"], channel) for rank in range(spec.world)]
        print(json.dumps(pids), file=file, flush=True)
        codes = {}
        while len(codes) < len(pids):
            pid, status = os.wait()
            if pid in pids:
                codes[pid] = os.waitstatus_to_exitcode(status)
        print(json.dumps([codes[pid] for pid in pids]), file=file, flush=True)


def _fork(spec: Spec, rank: int, port: int, channel: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        channel.close()
        os.setsid()
        out = os.open(f"{spec.dir}.out/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(spec.world), LOCAL_RANK=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **spec.env)
        if spec.store == "agent":
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        import logging

        logging.basicConfig(level=logging.INFO, format=f"%(relativeCreated)d [{rank}] %(message)s")
        if spec.in_thread:
            code = _in_thread(spec, rank)
        else:
            train(spec, rank)
            code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _in_thread(spec: Spec, rank: int) -> int:
    import threading

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


# ---------------------------------------------------------------------- in the test


class Server:
    """Runs jobs, one at a time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", f"from tests.jobs.torch import drill; drill.serve({theirs.fileno()})"]
        path = python_path()
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._channel = ours
        self._file = ours.makefile("rw")
        self._job: Job | None = None
        assert json.loads(self._file.readline()) == "ready"
        atexit.register(self.close)

    def start(self, spec: Spec) -> Job:
        if self._job is not None and not self._job.over:
            self._job.abandon()  # of a test that failed: its end is not that of the next one
        os.makedirs(f"{spec.dir}.out", exist_ok=True)
        for path in Path(f"{spec.dir}.out").glob("rank-*"):
            path.unlink()
        agent = None
        if spec.store == "agent":
            import torch.distributed as dist

            agent = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port = agent.port if agent else free_port()
        print(json.dumps({"spec": asdict(spec), "port": port}), file=self._file, flush=True)
        self._job = Job(spec, json.loads(self._file.readline()), self._channel, self._file, agent)
        return self._job

    def run(self, spec: Spec, limit_s: float = 60.0) -> Outcome:
        return self.start(spec).wait(limit_s)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Job:
    def __init__(self, spec, pids, channel, file, agent) -> None:
        self.spec, self.pids, self._channel, self._file, self._agent = spec, pids, channel, file, agent
        self.began = time.monotonic()
        self.over = False

    def abandon(self) -> None:
        """Kill it, and hear of its end."""
        self.send(signal.SIGKILL, *range(len(self.pids)))
        self._file.readline()
        self.over = True

    def send(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            try:
                os.kill(self.pids[rank], number)
            except ProcessLookupError:
                pass

    def wait_for(self, event: str, timeout_s: float = 30.0, **fields) -> dict:
        """The first event of this kind of this attempt in the journal."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            for found in journal(self.spec.dir):
                if found["event"] == event and all(found.get(key) == value for key, value in fields.items()):
                    return found
            time.sleep(0.01)
        raise TimeoutError(f"no {event} {fields} in {timeout_s} s\n{self.log()}")

    def log(self) -> str:
        return Path(f"{self.spec.dir}.out/log").read_text()

    def wait(self, limit_s: float = 60.0) -> Outcome:
        """The outcome; a job that takes longer than ``limit_s`` is killed, and that is a failure."""
        import select

        ready, _, _ = select.select([self._channel], [], [], limit_s)
        if not ready:
            log = self.log()
            self.abandon()
            raise AssertionError(f"the job hung for {limit_s} s:\n{log}\n{last_events(self.spec.dir)}")
        codes = json.loads(self._file.readline())
        ended = time.time()
        self.over = True
        results = {
            int(path.stem.removeprefix("rank-")): json.loads(path.read_text())
            for path in Path(f"{self.spec.dir}.out").glob("rank-*.json")
        }
        notices = [event["t"] for event in journal(self.spec.dir) if event["event"] == "notice"]
        after_notice_s = ended - notices[0] if notices else None
        return Outcome(codes, time.monotonic() - self.began, results, self.log(), after_notice_s)
