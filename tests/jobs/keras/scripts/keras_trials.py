"""An ordinary script that skips what an earlier start of it has finished, with calls of ``fit`` that look alike.

``count`` counts in a ``while`` loop, ``name`` hands a name to a function, ``left`` trains the epochs that are left.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import keras
import numpy as np
from keras_interrupt import preempt

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["count", "name", "left"])
parser.add_argument("--interrupt", action="append", default=[])
parser.add_argument("--out")
args = parser.parse_args()

x = np.random.default_rng(5).normal(size=(80, 8)).astype("float32")
y = x.sum(1, keepdims=True)
steps = 0
table = {}
if os.path.exists("table.json"):
    with open("table.json") as file:
        table = json.load(file)


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        global steps
        steps += 1
        if f"batch:{steps}" in args.interrupt:
            preempt()


class Count(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.save_weights("left.weights.h5")
        note("epochs", table.get("epochs", 0) + 1)


def note(name, value):
    table[name] = value
    with open("table.json", "w") as file:
        json.dump(table, file)
    if f"noted:{len(table)}" in args.interrupt:
        preempt()
        time.sleep(60)


def train(seed, epochs=2, callbacks=()):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    if os.path.exists("left.weights.h5"):
        model.load_weights("left.weights.h5")
    model.fit(x, y, batch_size=20, epochs=epochs, callbacks=[*callbacks, Interrupt()], verbose=0)
    return [float(np.sum(weights)) for weights in model.get_weights()]


def count():
    trial = len(table)
    while trial < 4:
        keras.utils.set_random_seed(trial)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        history = model.fit(x, y, batch_size=20, epochs=2, callbacks=[Interrupt()], verbose=0)
        note(str(trial), history.history["loss"])
        trial += 1


def run(name):
    if name not in table:
        note(name, train(ord(name)))


if args.kind == "count":
    count()
elif args.kind == "name":
    run("a")
    run("b")
    run("c")
else:
    train(1, epochs=6 - table.get("epochs", 0), callbacks=[Count()])
with open(args.out, "w") as file:
    json.dump(table, file)
