"""Training that is not ``fit``, and ``fit`` on a backend that holdfast does not know."""

from __future__ import annotations

import argparse
import json
import os

import numpy as np
import tensorflow as tf

if os.environ.get("KERAS_KIND") == "tf_keras":
    import tf_keras as keras
else:
    import keras

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["tape", "train_on_batch", "fit"])
parser.add_argument("--backend")
parser.add_argument("--out")
args = parser.parse_args()

if args.backend:  # what a process has where it is installed
    from holdfast.adapters.keras.training import _hooks

    _hooks["keras"].framework.backend = args.backend

keras.utils.set_random_seed(7)
x = np.random.default_rng(5).normal(size=(32, 8)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.01)


@tf.function
def step(batch, target):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(target - model(batch, training=True)))
    weights = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))  # noqa: B905
    return loss


losses = []
if args.kind == "tape":
    losses = [float(step(x, y)) for _ in range(5)]
else:
    model.compile("adam", "mse")
if args.kind == "train_on_batch":
    losses = [float(model.train_on_batch(x, y)) for _ in range(5)]
if args.kind == "fit":
    losses = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"]
with open(args.out, "w") as file:
    json.dump(losses, file)
