"""Deep Learning with Python: k-fold validation, a new model and a new ``fit`` for each fold, mean scores at the end."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(1)
rng = np.random.default_rng(3)
train_data = rng.normal(size=(120, 6)).astype("float32")
train_targets = train_data @ rng.normal(size=6).astype("float32") + 0.1 * rng.normal(size=120).astype("float32")


def get_model():
    model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dropout(0.1), layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    return model


k = 4
num_val_samples = len(train_data) // k
all_mae_histories = []
for i in range(k):
    print(f"Processing fold #{i}")
    val = slice(i * num_val_samples, (i + 1) * num_val_samples)
    partial_data = np.concatenate([train_data[: val.start], train_data[val.stop :]])
    partial_targets = np.concatenate([train_targets[: val.start], train_targets[val.stop :]])
    model = get_model()
    history = model.fit(
        partial_data,
        partial_targets,
        validation_data=(train_data[val], train_targets[val]),
        epochs=8,
        batch_size=4,
        verbose=2,
    )
    all_mae_histories.append(history.history["val_mae"])
    print(f"fold {i} mae {history.history['val_mae'][-1]:.8f}")
average_mae_history = np.mean(all_mae_histories, axis=0)
np.savetxt("average_mae.txt", average_mae_history)
print("average", " ".join(f"{value:.8f}" for value in average_mae_history))
