"""A script that asks for holdfast in code, with one callback for one of its two trainings."""

from __future__ import annotations

import argparse
import json

import keras
import numpy as np
from keras_interrupt import preempt

from holdfast.keras import JITCheckpoint

parser = argparse.ArgumentParser()
parser.add_argument("--interrupt", type=int)
parser.add_argument("--out")
args = parser.parse_args()

keras.utils.set_random_seed(7)
x = np.random.default_rng(5).normal(size=(96, 8)).astype("float32")
y = x.sum(1, keepdims=True)
seen = 0


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        global seen
        seen += 1
        if seen == args.interrupt:
            preempt()


def model():
    made = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
    made.compile("adam", "mse")
    return made


first = model().fit(x, y, batch_size=8, epochs=1, verbose=0)
holdfast = JITCheckpoint("kept", save_every="1 epoch", settings={"kill_wait": 0.0})
second = model().fit(x, y, batch_size=8, epochs=3, callbacks=[Interrupt(), holdfast], verbose=0)
with open(args.out, "w") as file:
    json.dump([first.history, second.history], file)
