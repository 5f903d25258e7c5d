"""What a model holds besides its layers' weights: several optimizers, generators of random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.adapters.keras.tensorflow import tensorflow


def optimizers_of(model: Any) -> list[Any]:
    """The model's own optimizer, and those that it holds besides, as an adversarial model does; in a fixed order."""
    found: list[Any] = []
    for _, value in [("optimizer", getattr(model, "optimizer", None)), *sorted(vars(model).items())]:
        found += [one for one in _leaves(value) if _is_optimizer(one) and not any(one is other for other in found)]
    return found


def names_of_optimizers(model: Any) -> list[str]:
    """The attributes of the model that are an optimizer each."""
    return [name for name, value in sorted(vars(model).items()) if _is_optimizer(value)]


def generators_of(model: Any) -> list[Any]:
    """Generators of TensorFlow in attributes of the model and its layers: their state is among no layer's variables."""
    module, found = tensorflow(), list[Any]()
    for layer in model._flatten_layers() if module is not None else ():
        for _, value in sorted(vars(layer).items()):
            for one in _leaves(value):
                if isinstance(one, module.random.Generator) and not any(one is other for other in found):
                    found.append(one)
    return found


def _is_optimizer(value: Any) -> bool:
    return hasattr(type(value), "apply_gradients")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _leaves(one)
    else:
        yield value
