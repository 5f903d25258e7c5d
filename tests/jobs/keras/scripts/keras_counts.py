"""A script that sets no seed. The model counts how often it has seen each sample, so that one can tell afterwards
whether every epoch went through the data once."""

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
parser.add_argument("--data", default="dataset")
parser.add_argument("--interrupt", type=int)
parser.add_argument("--out")
args = parser.parse_args()

SAMPLES, EPOCHS = 96, 3
x = np.arange(SAMPLES, dtype="float32").reshape(-1, 1)
y = np.random.default_rng(5).normal(size=(SAMPLES, 1)).astype("float32")
seen = 0


class Count(keras.layers.Layer):
    def build(self, shape):
        zeros = keras.initializers.Zeros()
        self.counts = self.add_weight(name="counts", shape=(SAMPLES,), initializer=zeros, trainable=False)

    def call(self, inputs, training=False):
        if training:
            numbers = tf.cast(inputs[:, 0], tf.int32)
            self.counts.assign_add(tf.math.bincount(numbers, minlength=SAMPLES, dtype=tf.float32))
        return inputs / SAMPLES


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        global seen
        seen += 1
        if seen == args.interrupt:
            preempt()


count = Count()
model = keras.Sequential([keras.layers.Input((1,)), count, keras.layers.Dense(1)])
model.compile("sgd", "mse")
if args.data == "arrays":
    data = {"x": x, "y": y, "batch_size": 8}
else:
    data = {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES).batch(8)}
model.fit(**data, epochs=EPOCHS, callbacks=[Interrupt()], verbose=0)
with open(args.out, "w") as file:
    json.dump({"counts": count.counts.numpy().tolist()}, file)
