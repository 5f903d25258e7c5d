"""The network that both trainings train: there is one definition of it, so that they cannot differ.

Three convolution blocks of 64, 128 and 256 filters with batch normalisation and dropout, and a dense layer of 512:
3.25 million parameters for images of 32×32×3. Another one: ``--model module:function``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import own

FILTERS = 64
"""Of the first block; the second has twice as many, the third four times."""
OURS = "model:build_model"
SMALLEST = 8
"""Pixels each way."""


class ModelError(Exception):
    """The network cannot be built as asked. The message says why."""


def build_model(image_shape: tuple[int, ...], classes: int, *, filters: int = FILTERS, learning_rate: float) -> Any:
    """Compiled for ``fit``. Under a strategy: call it inside ``strategy.scope()``."""
    if min(image_shape[:2]) < SMALLEST:
        raise ModelError(
            f"--model={OURS!r} is not accepted with images of {'×'.join(map(str, image_shape))}: each of its three "
            f"blocks halves them; they must be at least {SMALLEST}×{SMALLEST}"
        )
    import tf_keras as keras

    layers = keras.layers
    model = keras.Sequential(name="parallel_cnn")
    model.add(layers.Input(image_shape))
    for block in range(3):
        for _ in range(2):
            model.add(layers.Conv2D(filters * 2**block, 3, padding="same", activation="relu"))
            # Keras' own momentum of 0.99 needs hundreds of steps to forget how it began; a short run has not so many.
            model.add(layers.BatchNormalization(momentum=0.9))
        model.add(layers.MaxPooling2D())
        model.add(layers.Dropout(0.25))
    model.add(layers.Flatten())
    model.add(layers.Dense(512, activation="relu"))
    model.add(layers.BatchNormalization(momentum=0.9))
    model.add(layers.Dropout(0.5))
    model.add(layers.Dense(classes))
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def find(name: str) -> Callable[..., Any]:
    """The function that ``--model`` names. It takes what :func:`build_model` takes; see :func:`check` for the rest.

    Its module is looked for beside this one and in the working folder. It must be a single file: that is what Ray's
    workers get.
    """
    try:
        function = own.find("--model", name, OURS)
    except own.OwnError as error:
        raise ModelError(str(error)) from None
    try:
        inspect.signature(function).bind((32, 32, 3), 10, filters=FILTERS, learning_rate=1e-3)
    except TypeError as error:
        raise ModelError(
            f"--model={name!r} is not accepted: it is called with an image's shape, the number of classes, filters= "
            f"and learning_rate=, and does not take that: {error}"
        ) from None
    return function


def check(network: Any, name: str) -> None:
    """Raise unless a network is compiled, with the accuracy that the results are about."""
    import tensorflow as tf

    compiled = getattr(network, "compiled_metrics", None)
    metrics = tf.nest.flatten(getattr(compiled, "_user_metrics", None))
    if "accuracy" not in [one if isinstance(one, str) else getattr(one, "name", None) for one in metrics]:
        how = "is not compiled" if compiled is None else "is compiled without it"
        raise ModelError(
            f"--model={name!r} is not accepted: the network must be compiled with metrics=['accuracy'], and {how}"
        )
