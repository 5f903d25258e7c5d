"""The random state of a process that trains with Keras, but for that of the model: of Python, NumPy, torch, TensorFlow.

Only what is loaded already is asked: nothing is imported here.
"""

from __future__ import annotations

import random
import sys
from typing import Any, cast

import numpy as np


def capture() -> dict[str, Any]:
    """The random state of this process, now."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}}
    legacy: Any = np.random.get_state(legacy=False)
    if legacy["bit_generator"] == "MT19937":
        state["numpy"] = {
            "key": legacy["state"]["key"].copy(),
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        }
    torch = _torch()
    if torch is not None:
        state["torch"] = torch.get_rng_state().numpy().copy()
    for name, generator in _tensorflow_generators().items():
        state[name] = generator.state.numpy()
    return state


def doubts() -> list[str]:
    kind = cast(Any, np.random.get_state(legacy=False))["bit_generator"]
    return [] if kind == "MT19937" else [f"np.random draws from {kind}, whose state is not saved; MT19937 is"]


def restore(state: dict[str, Any]) -> None:
    """Make this process continue the random streams of ``state``."""
    if "python" in state:
        random.setstate(_python_state(state["python"]))
    if "numpy" in state:
        saved = state["numpy"]
        words = {"key": np.array(saved["key"], np.uint32), "pos": saved["pos"]}
        np.random.set_state({"bit_generator": "MT19937", "state": words, **_normals(saved)})
    torch = _torch()
    if "torch" in state and torch is not None:
        torch.set_rng_state(torch.from_numpy(np.array(state["torch"])))
    for name, generator in _tensorflow_generators().items():
        if name in state:
            generator.state.assign(state[name])


def drawn_since(before: dict[str, Any], shuffled: int) -> frozenset[str]:
    """The streams that were drawn from since ``before``, but for a shuffle of so many things with Python's own."""
    expected = {**before, "python": _after_shuffle(before["python"], shuffled)}
    return frozenset(name for name, value in capture().items() if not same(value, expected.get(name)))


def _after_shuffle(state: dict[str, Any], count: int) -> dict[str, Any]:
    generator = random.Random()
    generator.setstate(_python_state(state))
    generator.shuffle(list(range(count)))
    version, words, gauss = generator.getstate()
    return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}


def _python_state(saved: dict[str, Any]) -> tuple[Any, ...]:
    return saved["version"], tuple(saved["words"].tolist()), saved["gauss"]


def _normals(saved: dict[str, Any]) -> dict[str, Any]:
    return {"has_gauss": saved["has_gauss"], "gauss": saved["gauss"]}


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return bool(np.array_equal(one, other))


def _torch() -> Any:
    """torch, where Keras computes with it."""
    return sys.modules.get("torch") if "keras.src.backend.torch" in sys.modules else None


_shuffles: Any = None


def shuffle_generator() -> Any:
    """The generator with which arrays are shuffled where the script sets no seed."""
    global _shuffles
    if _shuffles is None:
        _shuffles = sys.modules["tensorflow"].random.Generator.from_non_deterministic_state()
    return _shuffles


def _tensorflow_generators() -> dict[str, Any]:
    """That one, and what ``tf.random.get_global_generator()`` has made, if anybody has asked for them."""
    module = sys.modules.get("tensorflow.python.ops.stateful_random_ops")
    found = {"tensorflow": getattr(module, "global_generator", None), "shuffles": _shuffles}
    return {name: generator for name, generator in found.items() if generator is not None}
