"""Keras guides: ``fit`` with ``ModelCheckpoint``, ``CSVLogger``, ``EarlyStopping``, ``ReduceLROnPlateau``."""

import keras
import numpy as np

keras.utils.set_random_seed(812)
rng = np.random.default_rng(5)
labels = rng.integers(0, 3, 480)
features = rng.normal(size=(480, 8)).astype("float32") * 1.5
features[np.arange(480), labels] += 2

model = keras.Sequential(
    [
        keras.Input((8,)),
        keras.layers.Dense(24, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(3, activation="softmax"),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(
    features,
    labels,
    batch_size=8,
    epochs=14,
    validation_split=0.2,
    verbose=2,
    callbacks=[
        keras.callbacks.ModelCheckpoint("best.keras", monitor="val_loss", save_best_only=True),
        keras.callbacks.CSVLogger("training.csv"),
        keras.callbacks.EarlyStopping(patience=6, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=2),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: print(f"epoch {epoch} loss {logs['loss']:.8f} {logs['val_loss']:.8f}")
        ),
    ],
)
print("epochs", len(history.history["loss"]), [f"{rate:.6f}" for rate in history.history["learning_rate"]])
print("evaluated", [f"{value:.8f}" for value in model.evaluate(features, labels, verbose=0)])
model.save_weights("final.weights.h5")
