"""An ordinary tf-keras script for several workers, which TF_CONFIG makes known to each other."""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import time

import numpy as np
import tensorflow as tf
import tf_keras as keras
from keras_interrupt import preempt

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="dataset")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--validate", action="store_true")
parser.add_argument("--step-s", type=float, default=0.0)
parser.add_argument("--kill", help="RANK:MOMENT:NUMBER[:SIGNAL]")
parser.add_argument("--linger-s", type=float, default=0.0, help="at the beginning of every epoch but the first")
parser.add_argument("--behind-s", type=float, default=0.0, help="rank 0, at the end of every validation")
parser.add_argument("--late", action="store_true", help="`applied` is a moment too: the weights have changed")
parser.add_argument("--between", action="store_true", help="so is `exchanged`: gradients are, and the logs are not")
parser.add_argument("--out")
args = parser.parse_args()

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id
keras.utils.set_random_seed(7)
x = np.random.default_rng(5).normal(size=(96, 8)).astype("float32")
y = (x.sum(1) > 0).astype("int32")
seen: dict[str, int] = {}


class Interrupt(keras.callbacks.Callback):
    """Sends this rank a signal at a moment such as ``1:batch_end:17`` (rank 1, its 17th of this process)."""

    def reached(self, name):
        seen[name] = seen.get(name, 0) + 1
        wanted = (args.kill or "").split(":")
        if wanted[:3] == [str(rank), name, str(seen[name])]:
            if name in ("applied", "exchanged"):  # long enough for the other worker to be there too
                time.sleep(1.0)
            preempt(int(wanted[3]) if len(wanted) > 3 else signal.SIGTERM)

    def on_train_begin(self, logs=None):
        print("begins", flush=True)

    def on_epoch_begin(self, epoch, logs=None):
        self.reached("epoch_begin")
        if epoch:
            time.sleep(args.linger_s)

    def on_epoch_end(self, epoch, logs=None):
        self.reached("epoch_end")

    def on_train_batch_begin(self, batch, logs=None):
        self.reached("batch_begin")

    def on_train_batch_end(self, batch, logs=None):
        self.reached("batch_end")
        if args.step_s:
            time.sleep(args.step_s)

    def on_test_batch_begin(self, batch, logs=None):
        self.reached("test_batch")

    def on_test_end(self, logs=None):
        if rank == 0:
            time.sleep(args.behind_s)
            self.reached("test_end")
            time.sleep(args.behind_s)


def noted(moment):
    def note(value):
        interrupt.reached(moment)
        return value

    return note


class Between(keras.Sequential):
    """A worker does not put its logs together with those of the others before that moment; gradients do not wait."""

    def compute_metrics(self, x, y, y_pred, sample_weight):
        moment = tf.py_function(noted("exchanged"), [tf.reduce_sum(y_pred)], tf.float32)
        with tf.control_dependencies([moment]):
            return super().compute_metrics(x, y, y_pred, sample_weight)


class Late(keras.Sequential):
    """Between the moment at which a step has changed the weights and the one at which workers put their logs together
    there is one more."""

    def train_step(self, data):
        logs = super().train_step(data)
        changed = tf.reduce_sum(self.trainable_variables[0])  # read after it was written
        moment = tf.py_function(noted("applied"), [changed], tf.float32)
        with tf.control_dependencies([moment]):
            return {name: tf.identity(value) for name, value in logs.items()}


interrupt = Interrupt()
with strategy.scope():
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    kind = Late if args.late else Between if args.between else keras.Sequential
    model = kind([keras.layers.Input((8,)), *layers, keras.layers.Dense(2)])
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96, seed=3).batch(8)
more = {}
if args.validate:
    more["validation_data"] = tf.data.Dataset.from_tensor_slices((x[:48], y[:48])).batch(8)
history = model.fit(
    dataset if args.data == "dataset" else dataset.repeat(),
    epochs=args.epochs,
    steps_per_epoch=None if args.data == "dataset" else 10,
    callbacks=[interrupt],
    verbose=0,
    **more,
)

hashed = hashlib.sha256()
for variable in [*model.variables, *model.optimizer.variables]:
    hashed.update(variable._values[0].numpy().tobytes())
result = {
    "digest": hashed.hexdigest(),
    "history": history.history,
    "iterations": int(model.optimizer.iterations.numpy()),
}
with open(args.out, "w") as file:
    json.dump(result, file, default=float)
print(result["digest"])
