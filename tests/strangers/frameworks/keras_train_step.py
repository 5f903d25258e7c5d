"""Keras' guide "Customizing fit() with TensorFlow": a ``train_step`` of one's own, metrics as attributes."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class CustomModel(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(self.loss_fn(y, y_pred))
        self.mae_metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]


keras.utils.set_random_seed(9)
x = np.random.random((400, 16)).astype("float32")
y = x.sum(1, keepdims=True) + 0.1 * np.random.random((400, 1)).astype("float32")
inputs = keras.Input(shape=(16,))
hidden = layers.Dropout(0.2)(layers.Dense(12, activation="tanh")(inputs))
model = CustomModel(inputs, layers.Dense(1)(hidden))
model.compile(optimizer=keras.optimizers.RMSprop(0.003))
model.fit(x, y, epochs=8, batch_size=8, validation_data=(x[:80], y[:80]), verbose=2)
print("evaluated", {name: f"{value:.8f}" for name, value in model.evaluate(x, y, verbose=0, return_dict=True).items()})
model.save_weights("custom.weights.h5")
