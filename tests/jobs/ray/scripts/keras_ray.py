"""An ordinary script for Ray's TensorflowTrainer: tf-keras under MultiWorkerMirroredStrategy."""

import argparse
import hashlib
import json
import os
import time

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train_func(config):
    import numpy as np
    import tensorflow as tf
    import tf_keras as keras

    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = ray.train.get_context().get_world_rank()
    keras.utils.set_random_seed(7)
    x = np.random.default_rng(5).normal(size=(96, 8)).astype("float32")
    y = (x.sum(1) > 0).astype("int32")
    with strategy.scope():
        layers = [keras.layers.Dense(16, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
        model = keras.Sequential([keras.layers.Input((8,)), *layers, keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])

    class Steps(keras.callbacks.Callback):
        """Says how far it is, and waits where the test wants to find it."""

        def on_train_batch_end(self, batch, logs=None):
            step = int(model.optimizer.iterations.numpy())
            with open(os.path.join(config["out"], f"steps-{rank}"), "a") as file:
                file.write(f"{step} {os.getpid()} {ray.get_runtime_context().get_node_id()}\n")
            while str(step) in config["gates"] and not os.path.exists(os.path.join(config["out"], f"gate-{step}")):
                time.sleep(0.01)

        def on_epoch_end(self, epoch, logs=None):
            ray.train.report({"epoch": epoch, "loss": logs["loss"]})

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96, seed=3).batch(8)
    history = model.fit(dataset, epochs=2, callbacks=[Steps()], verbose=0)
    hashed = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        hashed.update(variable._values[0].numpy().tobytes())
    result = {
        "digest": hashed.hexdigest(),
        "history": {name: list(map(float, v)) for name, v in history.history.items()},
    }
    with open(os.path.join(config["out"], f"result-{rank}.json"), "w") as file:
        json.dump(result, file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    parser.add_argument("--out", required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--name")
    parser.add_argument("--max-failures", type=int, default=0)
    parser.add_argument("--gates", nargs="*", default=[])
    options = parser.parse_args()
    ray.init(address=options.address)
    TensorflowTrainer(
        train_func,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
    ).fit()


if __name__ == "__main__":
    main()
