"""Callbacks that change the weights between the last batch of an epoch and the first of the next, where something is
evaluated: averages of the weights for a validation, or a lower rate before another callback's evaluation."""

from __future__ import annotations

import argparse
import hashlib
import json
import os

import numpy as np
from keras_interrupt import preempt

if os.environ.get("KERAS_KIND") == "tf_keras":
    import tf_keras as keras
else:
    import keras

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["average", "rate"])
parser.add_argument("--interrupt", action="append", default=[])
parser.add_argument("--out")
args = parser.parse_args()

keras.utils.set_random_seed(7)
x = np.random.default_rng(5).normal(size=(80, 8)).astype("float32")
y = x.sum(1, keepdims=True)
evaluated = 0


class Interrupt(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        global evaluated
        evaluated += 1
        if f"test:{evaluated}" in args.interrupt:
            preempt()


class Average(keras.callbacks.Callback):
    """The mean of what the weights were at the ends of epochs is what is validated."""

    def __init__(self):
        super().__init__()
        self.mean = None

    def on_test_begin(self, logs=None):
        self.trained = self.model.get_weights()
        self.mean = (
            self.trained if self.mean is None else [(a + b) / 2 for a, b in zip(self.mean, self.trained, strict=True)]
        )
        self.model.set_weights(self.mean)

    def on_test_end(self, logs=None):
        self.model.set_weights(self.trained)


class Held(keras.callbacks.Callback):
    """Evaluates data of its own at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(self.model.evaluate(x, y, batch_size=20, callbacks=[Interrupt()], verbose=0))


model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.05), "mse")
held = Held()
if args.kind == "average":
    callbacks = [Average(), Interrupt()]
else:
    # Nothing is ever better by so much: each epoch lowers the rate.
    lower = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, factor=0.7, min_delta=1e6)
    callbacks = [keras.callbacks.CSVLogger("log.csv"), lower, held]
validated = {"validation_data": (x, y), "validation_batch_size": 20} if args.kind == "average" else {}
history = model.fit(x, y, batch_size=10, epochs=4, callbacks=callbacks, verbose=0, **validated)
digest = hashlib.sha256(b"".join(weights.tobytes() for weights in model.get_weights())).hexdigest()
result = {"history": {k: [float(one) for one in v] for k, v in history.history.items()}, "digest": digest}
if args.kind == "rate":
    with open("log.csv") as file:
        result |= {"losses": held.losses, "log": file.read()}
with open(args.out, "w") as file:
    json.dump(result, file)
