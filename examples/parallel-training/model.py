"""The network that both trainings train: there is one definition of it, so that they cannot differ.

Three convolution blocks of 64, 128 and 256 filters with batch normalisation and dropout, and a dense layer of 512:
3.25 million parameters for images of 32×32×3. Another one: ``--model module:function``.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

FILTERS = 64
"""Of the first block; the second has twice as many, the third four times."""
OURS = "model:build_model"


class ModelError(Exception):
    """The network cannot be built as asked. The message says why."""


def build_model(image_shape: tuple[int, ...], classes: int, *, filters: int = FILTERS, learning_rate: float) -> Any:
    """Compiled for ``fit``. Under a strategy: call it inside ``strategy.scope()``."""
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
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module_name, _, function_name = name.partition(":")
    refused = f"--model={name!r} is not accepted"
    if not module_name or not function_name:
        raise ModelError(f"{refused}; it must be module:function, such as {OURS}")
    loaded = "tensorflow" in sys.modules
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ModelError(f"{refused}: {module_name} cannot be imported: {error!r}") from None
    if "tensorflow" in sys.modules and not loaded:
        raise ModelError(f"{refused}: {module_name} imports TensorFlow, which must wait until the function is called")
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ModelError(f"{refused}: {module_name} has no function {function_name}")
    try:
        inspect.signature(function).bind((32, 32, 3), 10, filters=FILTERS, learning_rate=1e-3)
    except TypeError as error:
        raise ModelError(
            f"{refused}: it is called with an image's shape, the number of classes, filters= and learning_rate=, and "
            f"does not take that: {error}"
        ) from None
    return function  # type: ignore[no-any-return, unused-ignore]


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
