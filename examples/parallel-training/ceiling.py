"""How much faster several processes can be than one, if they need not talk to each other.

Cores share caches, memory and often the heat that they may make, and a virtual core may be half of a real one. So two
processes are rarely twice as fast as one, whatever trains in them. What N processes that train the same network on
their own reach together is the ceiling for N workers that also have to exchange gradients. They run where the workers
run: on a Ray cluster. Written to ``ceiling_<N>workers.json``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
import ray.exceptions

import data
import model
import training
from options import Job, add_options, job_of, wanted_of, whole
from workers import NEW, address_of, resources_of, send_by_value

ROUNDS = 3
STEPS = 3
"""In each round."""
_LIMIT_S = 600.0
Form = tuple[tuple[int, ...], int]
"""The shape of an image, and the number of classes."""


class Process:
    """One of those that train on their own."""

    def __init__(self, rank: int, workers: int, job: Job, build: Callable[..., Any], form: Form) -> None:
        training.take_cores(job, rank)
        training.begin(job)
        import tensorflow as tf

        shape, classes = form
        self._network = build(shape, classes, filters=job.filters, learning_rate=job.learning_rate)
        sizes = (job.batch_size, job.batch_size // workers)
        self._inputs = {size: (tf.random.normal((size, *shape)), tf.zeros((size,), tf.int32)) for size in sizes}
        for size in sizes:
            self.step_seconds(size)

    def step_seconds(self, size: int) -> float:
        began = time.perf_counter()
        for _ in range(STEPS):
            self._network.train_on_batch(*self._inputs[size])
        return (time.perf_counter() - began) / STEPS


def measure(job: Job, workers: int, build: Callable[..., Any], form: Form) -> dict[str, Any]:
    """The first alone with the whole batch and with its part, then all of them with their parts."""
    resources = resources_of(job)
    remote = ray.remote(Process).options(
        num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), scheduling_strategy="SPREAD"
    )
    processes = [remote.remote(rank, workers, job, build, form) for rank in range(workers)]
    whole_batch, part = job.batch_size, job.batch_size // workers

    def seconds(some: list[Any], size: int) -> float:
        """Of the slowest."""
        answers: list[float] = ray.get([one.step_seconds.remote(size) for one in some], timeout=_LIMIT_S)
        return max(answers)

    seconds(processes, part)
    rounds = [
        (seconds(processes[:1], whole_batch), seconds(processes[:1], part), seconds(processes, part))
        for _ in range(ROUNDS)
    ]
    alone_whole, alone_part, together = map(statistics.median, zip(*rounds, strict=True))
    return {
        "num_workers": workers,
        "ceiling": workers * alone_part / together,
        "step_seconds_whole_batch_alone": alone_whole,
        "step_seconds_part_alone": alone_part,
        "step_seconds_part_together": together,
        "job": job.as_dict(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what several processes reach that do not talk, against one.")
    add_options(parser)
    parser.add_argument("--num-workers", type=whole(1), default=2, help="processes at once (default 2)")
    parser.add_argument(
        "--address", help="of the Ray cluster (default: RAY_ADDRESS, else a new one of this machine alone)"
    )
    arguments = parser.parse_args()
    job, workers = job_of(arguments), arguments.num_workers
    if job.batch_size % workers:
        parser.error(
            f"--batch-size={job.batch_size} is not accepted with --num-workers={workers}; it must be a multiple"
        )
    cluster = address_of(arguments.address)
    try:
        build = model.find(job.model)
        form = data.form_of(wanted_of(arguments))
        training.prepare(arguments.save_path)
        ray.init(
            address=cluster,
            num_cpus=workers * job.cpus if cluster == NEW else None,
            runtime_env={"env_vars": {"HOLDFAST_ENABLED": "0"}},  # there is nothing to save
        )
    except (data.DataError, model.ModelError, training.RefusedError, ConnectionError) as error:
        parser.error(str(error))
    send_by_value(job)
    try:
        result = measure(job, workers, build, form)
    except ray.exceptions.RayError as error:
        print(f"the ceiling cannot be measured: {error}", file=sys.stderr)
        return 1
    path = training.write(arguments.save_path, f"ceiling_{workers}workers.json", result)
    print(f"ceiling of this machine for {workers} processes: {result['ceiling']:.2f}\nwritten: {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
