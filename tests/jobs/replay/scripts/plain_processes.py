"""Processes that train under one parent, in the ways that scripts start them.

TELL: ``<member> <step> <signal> …``, what the parent is sent then, as often as there are signals. HOLD: a file that is
waited for in a step.
"""

import hashlib
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split

STEPS = 12


def say(*words):
    """A line at once: processes share the output."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def tell(name, step):
    while step == 4 and "HOLD" in os.environ and not os.path.exists(os.environ["HOLD"]):
        time.sleep(0.02)
    told, at, *signals = os.environ.get("JOB_TELL", "nobody 0").split()
    if name == told:
        time.sleep(0.05 * (step >= int(at)))  # time to hear of it
        if step == int(at):
            for one in signals:
                os.kill(os.getppid(), signal.Signals[one])
                time.sleep(0.1)


def report(name, model):
    values = model.state_dict().values()
    say(f"{name} end {hashlib.sha256(b''.join(value.numpy().tobytes() for value in values)).hexdigest()}")


def train(name, lr=0.01, model=None):
    torch.set_num_threads(1)
    torch.manual_seed(len(name))
    x = torch.randn(STEPS * 2, 4)
    model = model or nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step, batch in enumerate(DataLoader(x, 2)):
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            say(f"{name} step {step} loss {loss.item():.6f}")
        tell(name, step)
    report(name, model)


def member(number):
    train(f"member{'+' * number}", 0.01 * (number + 1))
    open(f"{os.environ['OUT']}/{number}.done", "w").close()


class Member(multiprocessing.get_context("fork").Process):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def run(self):
        member(self.number)


def processes(kind):
    context = multiprocessing.get_context("fork")
    if kind == "subclass":
        return [Member(number) for number in range(3)]
    numbers = range(3)
    if kind == "skip":
        numbers = [number for number in numbers if not os.path.exists(f"{os.environ['OUT']}/{number}.done")]
    return [context.Process(target=member, args=(number,)) for number in numbers]


def members(kind):
    started = processes(kind)
    for one in started:
        one.start()
        if kind != "parallel":
            one.join()
    for one in started:
        one.join()
    say("codes", *(one.exitcode for one in started))


def rank(number, world, file, name="rank"):
    """Unseeded: what a rank draws is its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=number, world_size=world)
    name = f"{name}-{number}"
    x = torch.arange(96.0).reshape(24, 4) / 96
    mine, _ = random_split(TensorDataset(x), [16, 8])
    say(name, "split", *mine.indices)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    for _ in range(3):
        for (batch,) in DataLoader(mine, 4, shuffle=True):
            optimizer.zero_grad()
            (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            tell(name, step)
            step += 1
    report(name, model.module)
    dist.barrier()
    dist.destroy_process_group()


def group(name="rank", method="fork"):
    file = f"{os.environ['OUT']}/store-{time.monotonic_ns()}"  # another one in each attempt
    torch.multiprocessing.start_processes(rank, args=(2, file, name), nprocs=2, start_method=method)


def hogwild():
    context = multiprocessing.get_context("fork")
    model = nn.Linear(4, 1)
    model.share_memory()
    for number in range(2):
        one = context.Process(target=train, args=(f"worker{'+' * number}", 0.01, model))
        one.start()
        one.join()


def sleeper():
    time.sleep(60)


def main(kind, *more):
    if kind in ("turn", "parallel", "subclass", "skip"):
        members(kind)
    elif kind == "pool":
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(member, range(3))
    elif kind == "executor":
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
            list(pool.map(member, range(3)))
    elif kind == "hogwild":
        hogwild()
    elif kind == "os.fork":
        if not os.fork():
            member(1)
            os._exit(0)
        os.wait()
    elif kind == "group":
        group()
    elif kind == "spawn":
        group(method="spawn")
    elif kind == "groups":
        group("first")
        group("second")
    elif kind == "idle":
        one = multiprocessing.get_context("fork").Process(target=sleeper, daemon=True)
        one.start()
        say(f"idle {one.pid}")
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "script":
        train("script", float(more[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
