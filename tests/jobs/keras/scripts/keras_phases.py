"""An ordinary script that trains several times: a head, then all of a model, then a second model on what the first
says. What it does between the trainings depends on what they left."""

from __future__ import annotations

import argparse
import hashlib
import json

import keras
import numpy as np
import tensorflow as tf
from keras_interrupt import preempt

parser = argparse.ArgumentParser()
parser.add_argument("--interrupt", action="append", default=[])
parser.add_argument("--more-epochs", type=int, default=0)
parser.add_argument("--out")
args = parser.parse_args()

keras.utils.set_random_seed(3)
x = np.random.default_rng(5).normal(size=(64, 8)).astype("float32")
y = (x.sum(1) > 0).astype("int32")
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64).batch(8)
seen = 0


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        global seen
        seen += 1
        if f"batch:{seen}" in args.interrupt:
            preempt()


def small(base=None):
    return keras.Sequential([keras.Input((8,)), *(base or []), keras.layers.Dropout(0.3), keras.layers.Dense(2)])


loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
trained = []
body = keras.layers.Dense(16, activation="relu")
body.trainable = False
first = small([body])
first.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
history = first.fit(dataset, epochs=2, callbacks=[Interrupt()], verbose=0)
trained.append([history.history, history.epoch, first.evaluate(x, y, verbose=0), float(np.random.random())])
if "between" in args.interrupt:
    preempt()

body.trainable = True
first.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0, restore_best_weights=True)
history = first.fit(dataset, epochs=8, initial_epoch=4, callbacks=[Interrupt(), stop], verbose=0)
trained.append([history.history, history.epoch, stop.stopped_epoch, first.evaluate(x, y, verbose=0)])

second = small()
second.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
labels = first.predict(x, verbose=0).argmax(1)
history = second.fit(x, labels, batch_size=8, epochs=2 + args.more_epochs, callbacks=[Interrupt()], verbose=0)
trained.append([history.history, history.epoch])

hashed = hashlib.sha256()
for model in (first, second):
    for variable in [*model.variables, *model.optimizer.variables]:
        hashed.update(np.asarray(variable.numpy()).tobytes())
with open(args.out, "w") as file:
    json.dump({"digest": hashed.hexdigest(), "trained": trained}, file)
