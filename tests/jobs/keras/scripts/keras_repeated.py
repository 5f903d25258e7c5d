"""Data that is repeated after it was shuffled: ``endless`` for two calls of ``fit``, ``twice`` in each epoch."""

from __future__ import annotations

import argparse
import json
import os

import numpy as np
import tensorflow as tf
from keras_interrupt import preempt

if os.environ.get("KERAS_KIND") == "tf_keras":
    import tf_keras as keras
else:
    import keras

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["endless", "twice"])
parser.add_argument("--interrupt", action="append", default=[])
parser.add_argument("--out")
args = parser.parse_args()

keras.utils.set_random_seed(7)
x = np.random.default_rng(5).normal(size=(140, 8)).astype("float32")
y = x.sum(1, keepdims=True)
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(140)
steps = 0


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        global steps
        steps += 1
        if f"batch:{steps}" in args.interrupt:
            preempt()


model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
losses = []
for _ in range(2):
    if args.kind == "endless":
        endless = data.repeat().batch(10)
        history = model.fit(endless, steps_per_epoch=5, epochs=3, callbacks=[Interrupt()], verbose=0)
    else:
        history = model.fit(data.repeat(2).batch(10), epochs=3, callbacks=[Interrupt()], verbose=0)
    losses.append([float(one) for one in history.history["loss"]])
with open(args.out, "w") as file:
    json.dump([losses, float(np.sum(model.get_weights()[0]))], file)
