"""An ordinary Keras script: Keras 3, or tf-keras with ``KERAS_KIND=tf_keras``."""

from __future__ import annotations

import os

import numpy as np

from record import Record

if os.environ.get("KERAS_KIND") == "tf_keras":
    import tf_keras as keras
else:
    import keras

keras.utils.set_random_seed(7)
x = np.random.default_rng(5).normal(size=(48, 8)).astype("float32")
y = (x.sum(1) > 0).astype("int32")
model = keras.Sequential(
    [
        keras.layers.Input((8,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(2),
    ]
)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
record = Record()


class Recorder(keras.callbacks.Callback):
    def steps(self) -> int:
        return int(np.asarray(model.optimizer.iterations))

    def on_train_batch_begin(self, batch, logs=None):
        record.begin(self.steps() + 1, model.get_weights())

    def on_train_batch_end(self, batch, logs=None):
        record.end(self.steps(), model.get_weights())


model.fit(x, y, batch_size=4, epochs=3, callbacks=[Recorder()], verbose=0)
record.close(model.get_weights())
