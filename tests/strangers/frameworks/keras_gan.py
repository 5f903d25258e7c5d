"""Keras' example of a DCGAN: a model of two networks and two optimizers, a callback that draws samples."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(21)


class GAN(keras.Model):
    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real):
        batch_size = tf.shape(real)[0]
        noise = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
        combined = tf.concat([self.generator(noise), real], axis=0)
        labels = tf.concat([tf.ones((batch_size, 1)), tf.zeros((batch_size, 1))], axis=0)
        labels += 0.05 * keras.random.uniform(tf.shape(labels), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined, training=True))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))

        noise = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros((batch_size, 1)), self.discriminator(self.generator(noise)))
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class GANMonitor(keras.callbacks.Callback):
    def __init__(self, num_img=3, latent_dim=6):
        self.num_img = num_img
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(42)

    def on_epoch_end(self, epoch, logs=None):
        noise = keras.random.normal((self.num_img, self.latent_dim), seed=self.seed_generator)
        np.save(f"generated_{epoch}.npy", np.asarray(self.model.generator(noise)))
        print(f"epoch {epoch} d_loss {float(logs['d_loss']):.8f} g_loss {float(logs['g_loss']):.8f}")


latent_dim = 6
discriminator = keras.Sequential(
    [keras.Input((16,)), layers.Dense(24), layers.LeakyReLU(0.2), layers.Dropout(0.2), layers.Dense(1, "sigmoid")]
)
generator = keras.Sequential([keras.Input((latent_dim,)), layers.Dense(24, "relu"), layers.Dense(16, "tanh")])
rng = np.random.default_rng(0)
waves = np.sin(np.linspace(0, 6, 16) + rng.uniform(0, 6, (320, 1))).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices(waves).shuffle(320, seed=4).batch(8)
gan = GAN(discriminator, generator, latent_dim)
gan.compile(
    d_optimizer=keras.optimizers.Adam(0.002),
    g_optimizer=keras.optimizers.Adam(0.002),
    loss_fn=keras.losses.BinaryCrossentropy(),
)
gan.fit(dataset, epochs=8, verbose=0, callbacks=[GANMonitor(latent_dim=latent_dim)])
generator.save_weights("generator.weights.h5")
