"""Keras' guide "Writing a training loop from scratch in PyTorch": a Keras model as a module, an optimizer of torch."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

keras.utils.set_random_seed(4)
rng = np.random.default_rng(2)
x_train = rng.normal(size=(240, 8)).astype("float32")
y_train = (x_train.sum(1) > 0).astype("int64")
train_dataset = torch.utils.data.TensorDataset(torch.from_numpy(x_train), torch.from_numpy(y_train))
train_dataloader = torch.utils.data.DataLoader(train_dataset, batch_size=8, shuffle=True)
model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(2)]
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loss_fn = torch.nn.CrossEntropyLoss()
train_acc_metric = keras.metrics.SparseCategoricalAccuracy()
for epoch in range(4):
    for step, (inputs, targets) in enumerate(train_dataloader):
        logits = model(inputs, training=True)
        loss = loss_fn(logits, targets)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        train_acc_metric.update_state(targets, logits.detach())
        if step % 10 == 0:
            print(f"epoch {epoch} step {step}: {loss.detach().item():.8f}")
    print(f"epoch {epoch} accuracy {float(train_acc_metric.result()):.6f}")
    train_acc_metric.reset_state()
torch.save(model.state_dict(), "model.pt")
