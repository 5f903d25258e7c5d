"""From a notice to the decision on every rank, with up to 1,024 simulated ranks on one real TCPStore server.

A rank is a thread with connections and an agreement of its own, blocked until the call. A few processes
share the threads; all of them share this machine's cores, which a real job's ranks would not.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from bench import Bench, Row, job_store, seconds

RANKS = (8, 64, 256, 1024)
PROCESSES = 4
LIMIT_S = 1.0


def measure(bench: Bench) -> list[Row]:
    # torch asks for the name of whoever connects, for its log. Thousands of such questions can take a name server
    # minutes; told to make no attempt, the resolver does not ask.
    os.environ["RES_OPTIONS"] = "attempts:0"
    server = job_store()
    ranks = RANKS[:2] if bench.smoke else RANKS
    found = {world: _rounds(server.port, world, bench.rounds(5, 3)) for world in ranks}
    first, largest = ranks[0], ranks[-1]
    last = statistics.median(found[largest])
    growth = last / statistics.median(found[first])
    return [
        Row(
            f"notice → decision on all of {largest:,} ranks",
            seconds(found[largest]),
            f"≤ {LIMIT_S:g} s",
            last <= LIMIT_S,
            {"seconds": found[largest]},
        ),
        Row(
            f"  growth from {first} to {largest:,} ranks ({largest // first} × the ranks)",
            f"{growth:.0f} ×: " + ", ".join(f"{world:,}: {seconds(times)}" for world, times in found.items()),
            values={str(world): times for world, times in found.items()},
        ),
    ]


def _rounds(port: int, world: int, rounds: int) -> list[float]:
    """Seconds until the last rank knows the decision, for each round."""
    context = get_context("spawn")
    pipes, processes = [], []
    for number in range(PROCESSES):
        ours, theirs = context.Pipe()
        ranks = list(range(number, world, PROCESSES))
        processes.append(context.Process(target=_ranks, args=(theirs, port, ranks, world, rounds), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        latest = []
        for _ in range(rounds):
            _answers(pipes)
            time.sleep(0.5)  # from "about to wait" to waiting
            pipes[0].send("call")
            latest.append(max(_answers(pipes)))
        return latest
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answers(pipes: list[Connection]) -> list[Any]:
    answers = {}
    while len(answers) < len(pipes):
        for pipe in wait([pipe for pipe in pipes if pipe not in answers], timeout=120) or _give_up():
            answers[pipe] = pipe.recv()
    return list(answers.values())


def _give_up() -> list[Any]:
    raise TimeoutError("the simulated ranks do not answer")


def _ranks(pipe: Connection, port: int, ranks: list[int], world: int, rounds: int) -> None:
    """In a process: some of the ranks, each on a thread."""
    import torch.distributed as dist

    from holdfast.agree import Agreement, Call
    from holdfast.agree.torch_board import TorchBoard

    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    agreements = [Agreement(TorchBoard(store, f"{world}/"), rank, world, silence_s=60.0) for rank in ranks]
    ready, done = threading.Barrier(len(ranks) + 1), threading.Barrier(len(ranks) + 1)
    decided = [0.0] * len(ranks)

    def take_part(index: int) -> None:
        agreement = agreements[index]
        for _ in range(rounds):
            ready.wait()
            called_at = float(agreement.wait_for_call().detail)
            decision = agreement.decide(100 + agreement.rank)
            decided[index] = time.monotonic() - called_at
            assert decision.step == 99 + world
            assert not decision.rescue
            done.wait()

    for index in range(len(ranks)):
        threading.Thread(target=take_part, args=(index,), daemon=True).start()
    for number in range(rounds):
        ready.wait()
        pipe.send("ready")
        if ranks[0] == 0:
            pipe.recv()
            agreements[0].call(Call(number, "stop", 0, "signal", detail=str(time.monotonic())))
        done.wait()
        pipe.send(max(decided))
