"""An ordinary script that trains many models: one for each fold of its data, or one for each trial of a search.

``--skip`` makes it one that leaves out what an earlier start has finished; a search does so as Keras Tuner does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os

import keras
import numpy as np
from keras_interrupt import preempt

parser = argparse.ArgumentParser()
parser.add_argument("--folds", type=int, default=6)
parser.add_argument("--skip", action="store_true")
parser.add_argument("--search", action="store_true")
parser.add_argument("--interrupt", action="append", default=[])
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--out")
args = parser.parse_args()

x = np.random.default_rng(5).normal(size=(120, 8)).astype("float32")
y = (x.sum(1, keepdims=True) > 0).astype("float32")
seen = 0
trained = []


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        global seen
        seen += 1
        if f"batch:{seen}" in args.interrupt:
            preempt()


def make(width, rate):
    layers = [keras.Input((8,)), keras.layers.Dense(width, activation="relu"), keras.layers.Dropout(0.2)]
    model = keras.Sequential([*layers, keras.layers.Dense(1, activation="sigmoid")])
    model.compile(keras.optimizers.Adam(rate), "binary_crossentropy", metrics=["accuracy"])
    return model


def folds():
    """``if the file is there: continue`` is what such scripts do in order to be started again."""
    scores = {}
    for fold in range(args.folds):
        path = f"fold_{fold}.keras"
        if args.skip and os.path.exists(path):
            scores[fold] = keras.models.load_model(path).evaluate(*held_out(fold), verbose=0)
            continue
        keras.utils.set_random_seed(fold)
        kept = np.arange(len(x)) % args.folds != fold
        model = make(args.width, 0.01)
        history = model.fit(x[kept], y[kept], batch_size=20, epochs=3, callbacks=[Interrupt()], verbose=0)
        trained.append([fold, len(history.history["loss"])])
        scores[fold] = model.evaluate(*held_out(fold), verbose=0)
        model.save(path)
    return scores


def held_out(fold):
    out = np.arange(len(x)) % args.folds == fold
    return x[out], y[out]


def search():
    """A trial that was finished is in the table, and is not run again; one that was not is run anew."""
    table = {}
    if os.path.exists("oracle.json"):
        with open("oracle.json") as file:
            table = json.load(file)
    for trial, (width, rate, seed) in enumerate([(8, 0.01, 1), (8, 0.03, 1), (4, 0.01, 1), (8, 0.01, 2), (8, 0.01, 3)]):
        if str(trial) in table:
            continue
        table[str(trial)] = run_trial(f"trial_{trial}", width, rate, seed)
        with open("oracle.json", "w") as file:
            json.dump(table, file)
    return table


def run_trial(trial_id, width, rate, seed):
    keras.utils.set_random_seed(seed)
    model = make(width, rate)
    best = keras.callbacks.ModelCheckpoint(f"{trial_id}.keras", monitor="val_loss", save_best_only=True)
    fit = model.fit(x, y, batch_size=20, epochs=3, validation_split=0.2, callbacks=[best, Interrupt()], verbose=0)
    trained.append([trial_id, len(fit.history["loss"])])
    return fit.history


def weights(path):
    hashed = hashlib.sha256()
    for array in keras.models.load_model(path).get_weights():
        hashed.update(array.tobytes())
    return hashed.hexdigest()


scores = search() if args.search else folds()
files = {path: weights(path) for path in sorted(os.listdir()) if path.endswith(".keras")}
with open(args.out, "w") as file:
    json.dump({"scores": scores, "files": files}, file)
print("trained", trained)
