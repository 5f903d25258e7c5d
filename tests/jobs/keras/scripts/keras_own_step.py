"""Models that write their own step, as the examples of Keras do: a variational autoencoder, and an adversarial one with
two optimizers. Neither has a ``call``."""

from __future__ import annotations

import argparse
import hashlib
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
parser.add_argument("kind", choices=["vae", "gan", "call"])
parser.add_argument("--eager", action="store_true")
parser.add_argument("--interrupt", action="append", default=[])
parser.add_argument("--out")
args = parser.parse_args()

keras.utils.set_random_seed(7)
x = np.random.default_rng(5).normal(size=(96, 8)).astype("float32")
seen = 0
three = hasattr(keras, "ops")


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        global seen
        seen += 1
        if f"batch:{seen}" in args.interrupt:
            preempt()

    def on_epoch_end(self, epoch, logs=None):
        if f"epoch:{epoch}" in args.interrupt:
            preempt()


def dense(*widths, inputs):
    layers = [keras.layers.Dense(width, activation="relu") for width in widths[:-1]]
    return keras.Sequential([keras.layers.Input((inputs,)), *layers, keras.layers.Dense(widths[-1])])


class Sampling(keras.layers.Layer):
    def __init__(self, **named):
        super().__init__(**named)
        self.seed_generator = keras.random.SeedGenerator(1337) if three else tf.random.Generator.from_seed(1337)

    def call(self, inputs):
        mean, log_var = inputs
        shape = tf.shape(mean)
        noise = keras.random.normal(shape, seed=self.seed_generator) if three else self.seed_generator.normal(shape)
        return mean + tf.exp(0.5 * log_var) * noise


class VAE(keras.Model):
    """https://keras.io/examples/generative/vae/"""

    def __init__(self):
        super().__init__()
        inputs = keras.layers.Input((8,))
        hidden = keras.layers.Dense(16, activation="relu")(inputs)
        mean, log_var = keras.layers.Dense(2, name="mean")(hidden), keras.layers.Dense(2, name="log_var")(hidden)
        self.encoder = keras.Model(inputs, [mean, log_var, Sampling()([mean, log_var])])
        self.decoder = dense(16, 8, inputs=2)
        self.total = keras.metrics.Mean(name="loss")
        self.kl = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total, self.kl]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_var, z = self.encoder(data)
            error = tf.reduce_mean(tf.square(data - self.decoder(z)))
            kl = tf.reduce_mean(-0.5 * (1 + log_var - tf.square(mean) - tf.exp(log_var)))
            total = error + kl
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
        self.total.update_state(total)
        self.kl.update_state(kl)
        return {"loss": self.total.result(), "kl_loss": self.kl.result()}


class GAN(keras.Model):
    """https://keras.io/examples/generative/dcgan_overriding_train_step/"""

    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = dense(16, 1, inputs=8), dense(16, 8, inputs=4)
        if three:
            self.seed_generator = keras.random.SeedGenerator(1337)
        else:
            self.seed_generator = tf.random.Generator.from_seed(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn, **named):
        super().compile(**named)
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_metric, self.g_metric = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_metric, self.g_metric]

    def noise(self, count):
        if three:
            return keras.random.normal((count, 4), seed=self.seed_generator)
        return self.seed_generator.normal((count, 4))

    def train_step(self, real):
        count = tf.shape(real)[0]
        both = tf.concat([self.generator(self.noise(count)), real], axis=0)
        labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros((count, 1)), self.discriminator(self.generator(self.noise(count))))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {"d_loss": self.d_metric.result(), "g_loss": self.g_metric.result()}


class WithCall(keras.Model):
    """https://keras.io/guides/custom_train_step_in_tensorflow/"""

    def __init__(self):
        super().__init__()
        self.inner, self.drop = dense(16, 8, inputs=8), keras.layers.Dropout(0.3)
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs, training=None):
        return self.drop(self.inner(inputs), training=training)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(data - self(data, training=True)))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


eager = {"run_eagerly": args.eager}
adam = keras.optimizers.Adam
if args.kind == "gan":
    model = GAN()
    loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(d_optimizer=adam(0.003), g_optimizer=adam(0.001), loss_fn=loss_fn, **eager)
else:
    model = VAE() if args.kind == "vae" else WithCall()
    model.compile(optimizer=adam(0.01), **eager)
dataset = tf.data.Dataset.from_tensor_slices(x).shuffle(96).batch(8)
history = model.fit(dataset, epochs=3, callbacks=[Interrupt()], verbose=0)

hashed = hashlib.sha256()
optimizers = [model.d_optimizer, model.g_optimizer] if args.kind == "gan" else [model.optimizer]
for variable in [*model.variables, *(variable for one in optimizers for variable in one.variables)]:
    hashed.update(variable.numpy().tobytes())
with open(args.out, "w") as file:
    json.dump({"digest": hashed.hexdigest(), "history": history.history}, file, default=float)
