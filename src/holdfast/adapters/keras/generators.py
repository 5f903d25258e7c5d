"""The state of generators of random numbers that are attributes of something: Python, NumPy, Keras, TensorFlow."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np


def capture(generator: Any) -> Any:
    """Its state as plain values and arrays of their own; None if it is no generator that can be set back."""
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}
    if isinstance(generator, np.random.Generator):
        return _copied(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _copied(generator.get_state(legacy=False))
    if _has_state_variable(generator):
        return _read(generator.state)
    return None


def restore(generator: Any, state: Any) -> None:
    """Let it go on from ``state``, which :func:`capture` returned for one of the same kind."""
    if isinstance(generator, random.Random):
        generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    elif _has_state_variable(generator):
        generator.state.assign(np.array(state))


def _has_state_variable(generator: Any) -> bool:
    """Keras' ``SeedGenerator`` and TensorFlow's ``tf.random.Generator`` keep their state in a variable."""
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(generator).__mro__}
    return bool(names & {"keras.SeedGenerator", "tensorflow.Generator"}) and hasattr(generator.state, "assign")


def _read(variable: Any) -> np.ndarray[Any, Any]:
    convert = getattr(getattr(sys.modules.get("keras"), "ops", None), "convert_to_numpy", None)
    value = variable.numpy() if hasattr(variable, "numpy") or convert is None else convert(variable)
    return np.array(value)


def _copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return state.copy() if isinstance(state, np.ndarray) else state
