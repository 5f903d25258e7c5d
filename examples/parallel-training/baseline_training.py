"""The baseline: plain ``model.fit`` in one process. Writes ``baseline_results.json``.

It has no line about checkpoints. ``HOLDFAST_ENABLED=1`` in its environment makes it survive a preemption: SIGTERM saves
in the middle of an epoch, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import data
import model
import training
from options import Job, add_options, check_batch, job_of, wanted_of


def train(job: Job, images: data.Images, build: Callable[..., Any], began: float) -> dict[str, Any]:
    cores = training.take_cores(job, 0)
    training.begin(job)

    def batches(x: Any, y: Any, seed: int | None = None) -> Any:
        return data.batches(x, y, job.batch_size, shuffle_seed=seed, threads=job.cpus)

    network = build(images.shape, images.classes, filters=job.filters, learning_rate=job.learning_rate)
    model.check(network, job.model)
    input_seconds = training.time_input(batches(images.x_train, images.y_train, job.seed))
    clock = training.make_clock(began)
    history = network.fit(
        batches(images.x_train, images.y_train, job.seed),
        validation_data=batches(images.x_validation, images.y_validation),
        epochs=job.epochs,
        callbacks=[*training.make_callbacks(job), clock],
        verbose=2,
    )
    tested = time.time()
    test = network.evaluate(batches(images.x_test, images.y_test), verbose=0, return_dict=True)
    return training.result_of(
        job,
        network,
        history,
        clock,
        (test["loss"], test["accuracy"], time.time() - tested),
        training_type="baseline",
        num_workers=1,
        cores=cores,
        input_seconds_per_epoch=input_seconds,
    )


def main() -> int:
    began = time.time()
    parser = argparse.ArgumentParser(description="Train the network in one process.")
    add_options(parser)
    arguments = parser.parse_args()
    job = job_of(arguments)
    try:
        images = data.load(wanted_of(arguments))
        check_batch(job, images, 1)
        training.prepare(arguments.save_path)
        trained = train(job, images, model.find(job.model), began)
    except (data.DataError, model.ModelError, training.RefusedError) as error:
        parser.error(str(error))
    result = {**trained, "data": images.describe()}
    path = training.write(arguments.save_path, "baseline_results.json", result)
    training.say(result)
    print(f"written: {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
