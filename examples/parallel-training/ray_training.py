"""The same training on several workers: Ray Train's TensorFlow trainer with ``MultiWorkerMirroredStrategy``.

Each step takes the same images as the baseline's, divided among the workers, which add up their gradients before the
weights change. Writes ``ray_results_<N>workers.json``.

It has no line about checkpoints. ``HOLDFAST_ENABLED=1`` in the environment of this script makes it survive the loss of
a worker: the others and Ray go on from the same step. The nodes need the packages, but neither this folder nor the
data.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

import data
import model
import training
from options import Job, add_options, check_batch, job_of, wanted_of, whole
from workers import address_of, resources_of, send_by_value, wait_for_room


def time_exchange(strategy: Any, network: Any) -> float:
    """Seconds to add up the gradients of all workers once, with nothing else to do; 0 for one worker."""
    import tensorflow as tf

    if strategy.num_replicas_in_sync == 1:
        return 0.0
    gradients = [tf.zeros(weights.shape) for weights in network.trainable_weights]

    @tf.function(autograph=False)  # type: ignore[untyped-decorator, unused-ignore]
    def exchange() -> Any:
        return strategy.run(
            lambda: tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        )

    exchange()
    began = time.perf_counter()
    for _ in range(training.ROUNDS):
        exchange()
    return (time.perf_counter() - began) / training.ROUNDS


def train_func(config: dict[str, Any]) -> dict[str, Any]:
    """What each worker does. Ray hands out what that of rank 0 returns."""
    job = Job(**config["job"])
    context = ray.train.get_context()
    cores = training.take_cores(job, context.get_world_rank())
    import tensorflow as tf
    import tf_keras as keras

    try:
        training.begin(job)
    except training.RefusedError as error:
        return {"refused": str(error)}  # an exception would be tried again
    images: data.Images = ray.get(config["images"])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def batches(x: Any, y: Any, seed: int | None = None) -> Any:
        return data.batches(x, y, job.batch_size, shuffle_seed=seed, threads=job.cpus)

    class Report(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            ray.train.report({"epoch": epoch + 1, **{name: float(value) for name, value in (logs or {}).items()}})

    try:
        with strategy.scope():
            network = config["build"](
                images.shape, images.classes, filters=job.filters, learning_rate=job.learning_rate
            )
        model.check(network, job.model)
    except model.ModelError as error:
        return {"refused": str(error)}
    measured = batches(images.x_train, images.y_train, job.seed)
    input_seconds = training.time_input(strategy.experimental_distribute_dataset(measured))
    exchange_seconds = time_exchange(strategy, network)
    clock = training.make_clock(config["began"])
    history = network.fit(
        batches(images.x_train, images.y_train, job.seed),
        validation_data=batches(images.x_validation, images.y_validation),
        epochs=job.epochs,
        callbacks=[*training.make_callbacks(job), Report(), clock],
        verbose=2 if context.get_world_rank() == 0 else 0,
    )
    tested = time.time()
    test = network.evaluate(batches(images.x_test, images.y_test), verbose=0, return_dict=True)
    return training.result_of(
        job,
        network,
        history,
        clock,
        (test["loss"], test["accuracy"], time.time() - tested),
        training_type="ray_distributed",
        num_workers=context.get_world_size(),
        cores=cores,
        input_seconds_per_epoch=input_seconds,
        exchange_seconds_per_step=exchange_seconds,
    )


def main() -> int:
    began = time.time()
    parser = argparse.ArgumentParser(description="Train the network on several workers with Ray Train.")
    add_options(parser)
    add = parser.add_argument
    add("--num-workers", type=whole(1), default=2, help="processes that train (default 2)")
    add("--address", help="of the Ray cluster (default: RAY_ADDRESS, else a new one of this machine alone)")
    add("--storage-path", help="storage that all nodes share, for Ray Train (default: SAVE_PATH/ray)")
    add("--run-name", help="the same name again goes on where the last job stopped (default: from workers and clock)")
    add("--cluster-timeout", type=whole(0), default=60, help="seconds to wait for room for all workers (default 60)")
    add("--max-failures", type=whole(0), default=3, help="workers that may die without a notice (default 3)")
    arguments = parser.parse_args()
    job, workers = job_of(arguments), arguments.num_workers
    try:
        images = data.load(wanted_of(arguments))
        check_batch(job, images, workers)
        build = model.find(job.model)
        training.prepare(arguments.save_path)
        ray.init(address=address_of(arguments.address), log_to_driver=True)
        cluster = wait_for_room(workers, resources_of(job), arguments.cluster_timeout)
    except (data.DataError, model.ModelError, training.RefusedError, ConnectionError) as error:
        parser.error(str(error))
    print(
        f"cluster: {cluster['ray_cluster_cpus']} CPUs on {cluster['ray_cluster_nodes']} nodes with the head, "
        f"{cluster['ray_cluster_memory_bytes'] / 2**30:.1f} GiB of memory",
        flush=True,
    )
    send_by_value(job)
    storage = arguments.storage_path or os.path.join(arguments.save_path, "ray")
    trained = TensorflowTrainer(
        train_func,
        train_loop_config={"job": job.as_dict(), "build": build, "images": ray.put(images), "began": began},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=job.gpus > 0, resources_per_worker=resources_of(job)),
        run_config=RunConfig(
            name=arguments.run_name or f"parallel-{workers}-{int(began)}",
            storage_path=storage if "://" in storage else os.path.abspath(storage),
            failure_config=FailureConfig(max_failures=arguments.max_failures),
        ),
    ).fit()
    if "refused" in trained.return_value:
        parser.error(trained.return_value["refused"])
    result = {**trained.return_value, **cluster, "data": images.describe()}
    path = training.write(arguments.save_path, f"ray_results_{workers}workers.json", result)
    training.say(result)
    print(f"written: {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
