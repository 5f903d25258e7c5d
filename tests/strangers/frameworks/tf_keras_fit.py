"""TensorFlow 2 tutorials with tf-keras: ``Sequential``, HDF5 weights of each epoch, a learning rate scheduler."""

import numpy as np
import tensorflow as tf
import tf_keras as keras

keras.utils.set_random_seed(6)
rng = np.random.default_rng(6)
x = rng.normal(size=(320, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = keras.Sequential(
    [
        keras.layers.Dense(16, activation="relu", input_shape=(8,)),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1),
    ]
)
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(320, seed=3).batch(8)
history = model.fit(
    dataset,
    epochs=10,
    verbose=2,
    callbacks=[
        keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.9),
        keras.callbacks.ModelCheckpoint("weights.{epoch:02d}.h5", save_weights_only=True, save_freq="epoch"),
        keras.callbacks.CSVLogger("training.log", separator=";"),
    ],
)
print("history", " ".join(f"{value:.8f}" for value in history.history["loss"]))
print("evaluated", [f"{value:.8f}" for value in model.evaluate(x, y, verbose=0)])
