"""An ordinary Keras script. It knows nothing of holdfast; what it does is chosen by arguments, so that one serves many
tests. ``--interrupt`` sends it a real SIGTERM from inside, at a moment that a test can name."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random

import numpy as np
from keras_interrupt import preempt

if os.environ.get("KERAS_KIND") == "tf_keras":
    import tf_keras as keras

    read = keras.backend.get_value
else:
    import keras

    read = keras.ops.convert_to_numpy

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="dataset")
parser.add_argument("--model", default="plain")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--steps-per-epoch", type=int)
parser.add_argument("--steps-per-execution", type=int, default=1)
parser.add_argument("--jit", action="store_true")
parser.add_argument("--eager", action="store_true")
parser.add_argument("--cosine", action="store_true")
parser.add_argument("--callbacks", action="store_true")
parser.add_argument("--validate", action="store_true")
parser.add_argument("--optimizer", default="adam")
parser.add_argument("--interrupt", action="append", default=[])
parser.add_argument("--fail", default="", help="at such a moment, with an error")
parser.add_argument("--out")
args = parser.parse_args()

SAMPLES, BATCH = 96, 8
keras.utils.set_random_seed(7)
source = np.random.default_rng(5)
x = source.normal(size=(SAMPLES, 8)).astype("float32")
y = (x.sum(1) > 0).astype("int32")


seen: dict[str, int] = {}


class Interrupt(keras.callbacks.Callback):
    """Preempts at moments such as ``batch_end:17`` (the 17th of this process), ``test_batch:3``, ``epoch_end:2``."""

    def reached(self, name):
        seen[name] = seen.get(name, 0) + 1
        moment = f"{name}:{seen[name]}"
        if moment in args.interrupt:
            preempt()
        if moment == args.fail:
            raise RuntimeError("as told")

    def on_train_begin(self, logs=None):
        self.reached("train_begin")

    def on_train_batch_begin(self, batch, logs=None):
        self.reached("batch_begin")

    def on_train_batch_end(self, batch, logs=None):
        self.reached("batch_end")

    def on_test_batch_begin(self, batch, logs=None):
        self.reached("test_batch")

    def on_epoch_end(self, epoch, logs=None):
        self.reached("epoch_end")

    def on_train_end(self, logs=None):
        self.reached("train_end")


class Remembers(keras.callbacks.Callback):
    """A callback with a memory of its own, which draws random numbers too."""

    def __init__(self):
        super().__init__()
        self.batches = 0
        self.noise = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches % 5 == 0:
            self.noise.append(random.random())


class Batches(keras.utils.Sequence if hasattr(keras.utils, "Sequence") else object):
    """Shuffles its own indices between epochs, as the documentation of Keras shows it."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(SAMPLES)

    def __len__(self):
        return SAMPLES // BATCH

    def __getitem__(self, index):
        chosen = self.order[index * BATCH : (index + 1) * BATCH]
        return x[chosen], y[chosen]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def generator():
    for number in itertools.count():
        if args.fail == f"data:{number}":
            raise RuntimeError("no more data, as told")
        chosen = np.random.permutation(SAMPLES)[:BATCH]
        yield x[chosen], y[chosen]


def data():
    kind = args.data
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH}
    if kind == "sequence":
        return {"x": Batches()}
    if kind == "generator":
        return {"x": generator()}
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES)
    if kind == "unknown":
        return {"x": dataset.filter(lambda a, b: a[0] > -9).batch(BATCH)}
    dataset = dataset.batch(BATCH)
    return {"x": dataset.repeat() if kind == "repeat" else dataset}


def model():
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    layers += [keras.layers.Dense(2)]
    if args.model == "plain":
        layers.insert(0, keras.Input((8,)) if hasattr(keras, "Input") else keras.layers.Input((8,)))
    made = keras.Sequential(layers)
    rate = 0.01
    if args.cosine:
        rate = keras.optimizers.schedules.CosineDecay(0.02, 100)
    kinds = {"adam": keras.optimizers.Adam, "sgd": keras.optimizers.SGD}
    made.compile(
        optimizer=kinds[args.optimizer](learning_rate=rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=args.steps_per_execution,
        jit_compile=args.jit,
        run_eagerly=args.eager,
    )
    return made


made = model()
callbacks = [Remembers(), Interrupt()]
if args.callbacks:
    callbacks.append(keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=0.05))
    callbacks.append(keras.callbacks.EarlyStopping(monitor="loss", patience=3, restore_best_weights=True))
more = {}
if args.validate:
    more["validation_data"] = (x[:48], y[:48])
history = made.fit(
    **data(), epochs=args.epochs, steps_per_epoch=args.steps_per_epoch, callbacks=callbacks, verbose=0, **more
)

hashed = hashlib.sha256()
for variable in [*made.variables, *made.optimizer.variables]:
    hashed.update(read(variable).tobytes())
result = {"digest": hashed.hexdigest(), "history": history.history, "epochs": history.epoch}
result["remembers"] = [callbacks[0].batches, callbacks[0].noise]
result["iterations"] = int(read(made.optimizer.iterations))
if args.out:
    with open(args.out, "w") as file:
        json.dump(result, file, default=float)
print(result["digest"])
