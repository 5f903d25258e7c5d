"""Keras' guide "Writing a training loop from scratch in TensorFlow": ``GradientTape`` in a ``tf.function``."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(2)
rng = np.random.default_rng(2)
x_train = rng.normal(size=(400, 8)).astype("float32")
y_train = (x_train.sum(1) > 0).astype("int32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])
optimizer = keras.optimizers.SGD(0.05)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
train_acc_metric = keras.metrics.SparseCategoricalAccuracy()
train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(400, seed=1).batch(8)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss_value = loss_fn(y, logits)
    grads = tape.gradient(loss_value, model.trainable_weights)
    optimizer.apply(grads, model.trainable_weights)
    train_acc_metric.update_state(y, logits)
    return loss_value


for epoch in range(30):
    for step, (x_batch_train, y_batch_train) in enumerate(train_dataset):
        loss_value = train_step(x_batch_train, y_batch_train)
    print(f"epoch {epoch}: loss {float(loss_value):.8f}, accuracy {float(train_acc_metric.result()):.6f}")
    train_acc_metric.reset_state()
model.save_weights("tape.weights.h5")
