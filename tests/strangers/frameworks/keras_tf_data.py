"""TensorFlow's guides of ``tf.data``: map, cache, shuffle, batch, prefetch; a functional model with two inputs."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf

AUTOTUNE = tf.data.AUTOTUNE
keras.utils.set_random_seed(77)
rng = np.random.default_rng(7)
numbers, kinds = rng.normal(size=(360, 5)).astype("float32"), rng.integers(0, 6, 360)
targets = (numbers.sum(1) + kinds * 0.5).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices(({"numbers": numbers, "kind": kinds}, targets))
val_ds = dataset.take(60).batch(20).cache()
train_ds = (
    dataset.skip(60)
    .map(lambda inputs, y: ({**inputs, "numbers": inputs["numbers"] / 2.0}, y), num_parallel_calls=AUTOTUNE)
    .cache()
    .shuffle(300, reshuffle_each_iteration=True)
    .batch(6)
    .prefetch(AUTOTUNE)
)
numbers_in = keras.Input((5,), name="numbers")
kind_in = keras.Input((), dtype="int32", name="kind")
merged = keras.layers.concatenate([numbers_in, keras.layers.Embedding(6, 3)(kind_in)])
hidden = keras.layers.Dropout(0.1)(keras.layers.Dense(16, activation="relu")(merged))
model = keras.Model([numbers_in, kind_in], keras.layers.Dense(1)(hidden))
schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 50, 0.9)
model.compile(keras.optimizers.Adam(schedule), "mse", metrics=["mae"])
history = model.fit(train_ds, validation_data=val_ds, epochs=10, verbose=2)
print("history", " ".join(f"{value:.8f}" for value in history.history["val_loss"]))
model.save("model.keras")
