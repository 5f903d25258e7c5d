"""An ordinary Keras script: Keras 3 in one process, tf-keras on several workers where TF_CONFIG names them.

``--own`` adds what Keras and TensorFlow themselves offer against being stopped, as their documentation shows it. A
signal comes from inside, at a moment that a benchmark can name; nothing waits for it to be noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--own", default="", help="epoch or N: BackupAndRestore with this save_freq; or handler")
parser.add_argument("--backup", default="backup", help="where that saves")
parser.add_argument("--stop", default="", help="RANKS:MOMENT:NUMBER:SIGNAL, such as 0,1:batch_begin:7:15")
parser.add_argument("--notes", default="", help="where to note steps and the time of the signal; nothing if empty")
parser.add_argument("--step-s", type=float, default=0.0)
parser.add_argument("--then-s", type=float, default=0.0, help="of a step after the signal: there is much left to train")
parser.add_argument("--val-s", type=float, default=0.0, help="of a batch of validation")
parser.add_argument("--samples", type=int, default=96)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--validate", action="store_true")
parser.add_argument("--out")
args = parser.parse_args()

BATCH = 8
STEPS = args.samples // BATCH
rank, strategy = 0, tf.distribute.get_strategy()
if "TF_CONFIG" in os.environ:
    import tf_keras as keras

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
else:
    import keras

keras.utils.set_random_seed(7)
x = np.random.default_rng(5).normal(size=(args.samples, 8)).astype("float32")
y = (x.sum(1) > 0).astype("int32")
loss_of = {"from_logits": True}


class Moments:
    """Counts what this process comes by, stops it where it was told to, and notes each step that is complete."""

    def __init__(self) -> None:
        ranks, self.moment, number, signal = (args.stop or ":::").split(":")
        self.wanted = str(rank) in ranks.split(",")
        self.number, self.signal = int(number or 0), int(signal or 0)
        self.count = 0
        self.stopped = False
        self.file = open(f"{args.notes}-{rank}", "a", buffering=1) if args.notes else None  # noqa: SIM115

    def reached(self, moment: str) -> None:
        if not self.wanted or moment != self.moment:
            return
        self.count += 1
        if self.count == self.number:
            self.stopped = True
            assert self.file is not None
            print(f"signal {time.monotonic()}", file=self.file)
            os.kill(os.getpid(), self.signal)

    def completed(self) -> None:
        if self.file is not None:
            print(f"step {int(model.optimizer.iterations.numpy())}", file=self.file)
            time.sleep(args.then_s if self.stopped else args.step_s)


class Watch(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        moments.reached("batch_begin")

    def on_train_batch_end(self, batch, logs=None):
        moments.completed()

    def on_test_batch_begin(self, batch, logs=None):
        moments.reached("test_batch")
        time.sleep(args.val_s)

    def on_epoch_end(self, epoch, logs=None):
        moments.reached("epoch_end")


class Clock(keras.callbacks.Callback):
    """The time of all epochs after the first, in which the graph is built."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.began = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch, logs=None):
        if epoch == args.epochs - 1 and hasattr(self, "began"):
            result["seconds"] = time.perf_counter() - self.began[0]
            result["cpu_seconds"] = time.process_time() - self.began[1]


def fit():
    callbacks = []
    if args.own:
        save_freq = args.own if args.own == "epoch" else int(args.own)
        callbacks.append(keras.callbacks.BackupAndRestore(args.backup, save_freq=save_freq))
    callbacks.append(Watch() if moments.file is not None else Clock())
    more = {"validation_data": (x[:48], y[:48]), "validation_batch_size": BATCH} if args.validate else {}
    model.fit(dataset, epochs=args.epochs, callbacks=callbacks, verbose=0, **more)


def custom_loop():
    """As the documentation of PreemptionCheckpointHandler shows it, with a checkpoint every five steps besides."""
    loss = keras.losses.SparseCategoricalCrossentropy(**loss_of, reduction="none")
    epoch, step = (tf.Variable(tf.constant(0, tf.int64), name=name) for name in ("epoch", "step_in_epoch"))
    with strategy.scope():
        checkpoint = tf.train.Checkpoint(
            optimizer=model.optimizer, model=model, trained_epoch=epoch, step_in_epoch=step
        )
        handler = tf.distribute.experimental.PreemptionCheckpointHandler(
            strategy.cluster_resolver, checkpoint, args.backup
        )

    def replica_step(inputs):
        with tf.GradientTape() as tape:
            value = tf.nn.compute_average_loss(loss(inputs[1], model(inputs[0], training=True)))
        weights = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))

    @tf.function
    def train_step(batch):
        strategy.run(replica_step, args=(batch,))

    batches = strategy.experimental_distribute_dataset(dataset)
    while epoch.numpy() < args.epochs:
        iterator = iter(batches)
        while step.numpy() < STEPS:
            moments.reached("batch_begin")
            handler.run(train_step, next(iterator))
            step.assign_add(1)
            if int(model.optimizer.iterations.numpy()) % 5 == 0:
                # All workers take part in a save; what others than the chief write is not used.
                checkpoint.save(os.path.join(args.backup if rank == 0 else f"{args.backup}-{rank}", "ckpt"))
            moments.completed()
        epoch.assign_add(1)
        step.assign(0)


result: dict = {}
with strategy.scope():
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = keras.Sequential([keras.layers.Input((8,)), *layers, keras.layers.Dense(2)])
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(**loss_of),
        metrics=["accuracy"],
    )
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(args.samples, seed=3).batch(BATCH)
moments = Moments()
if args.own == "handler":
    custom_loop()
else:
    fit()

hashed = hashlib.sha256()
for variable in [*model.variables, *model.optimizer.variables]:
    copies = getattr(variable, "_values", None)
    hashed.update((copies[0] if copies else variable).numpy().tobytes())
result |= {"digest": hashed.hexdigest(), "steps": int(model.optimizer.iterations.numpy())}
with open(args.out, "w") as file:
    json.dump(result, file)
