"""What tells one call of ``fit`` from another: its model, its optimizer, its data, its arguments, and who calls it.

A resumed script may make other calls than the attempt before it: one that skips what is finished begins with a later
one. So a saved state is given only to a call that is the same, as far as that can be found out without computing or
reading anything: shapes, configurations and a few elements. What cannot be found out counts as equal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from holdfast.adapters.keras import callers
from holdfast.adapters.keras.held import optimizers_of

MODEL = "model"
CONTENT = "data"
EPOCHS = "epochs"
_FRAMEWORKS = frozenset({"keras", "tf_keras", "tensorflow", "holdfast"})
_ARGUMENTS = ("batch_size", "steps_per_epoch", "shuffle", "class_weight", "validation_split")
_DATA = ("x", "y", "sample_weight", "validation_data")
_ROWS = 8
_NODES = 50
_ADDRESS_OR_DATE = re.compile(r"0x[0-9a-f]+|\d{6,}|\d+([-:T]\d+)+")
"""In a text: what another process writes otherwise."""
_LAYER_NUMBER = re.compile(r"_\d+\b")
"""In a name that Keras gives: how many of the kind this process has made before."""

Identity = dict[str, Any]


def identity_of(model: Any, arguments: Mapping[str, Any], frame: types.FrameType | None) -> Identity:
    """By part, a hash, but for the number of epochs; ``callers`` holds one for each name.

    ``frame``: where ``fit`` is called.
    """
    data = [arguments.get(name) for name in _DATA]
    return {
        MODEL: _hash(lambda: _model(model)),
        "variables": _hash(lambda: _variables(model)),
        "optimizer": _hash(lambda: _optimizers(model)),
        "arguments": _hash(lambda: [arguments.get(name) for name in _ARGUMENTS]),
        "shapes": _hash(lambda: [_shapes(one) for one in data]),
        CONTENT: _hash(lambda: [_content(one) for one in data]),
        EPOCHS: arguments.get("epochs"),
        "callers": _callers(frame, arguments),
    }


def differences(
    saved: Identity | None, identity: Identity, *, parts: Iterable[str], callers: Iterable[str]
) -> list[str]:
    """Of ``parts``, those that differ, and of ``callers`` the names that do. None saved: nothing is known to differ."""
    if saved is None:
        return []
    found = [
        part
        for part in parts
        if saved.get(part) is not None and identity.get(part) is not None and saved[part] != identity[part]
    ]
    were, are = saved.get("callers", {}), identity.get("callers", {})
    return found + [name for name in callers if name in were and name in are and were[name] != are[name]]


def asks_for_less(saved: Identity | None, identity: Identity) -> bool:
    """Whether fewer epochs are to be trained than then. A script that goes on by itself asks for those that are left,
    with what it has saved itself; more of them are no other call."""
    were, are = (saved or {}).get(EPOCHS), identity.get(EPOCHS)
    return isinstance(were, int) and isinstance(are, int) and are < were


def varying_callers(identities: Iterable[Identity | None]) -> set[str]:
    """The names that tell the saved calls from each other: a loop's variable, say, and not the date of the start."""
    values: dict[str, set[str]] = {}
    for identity in identities:
        for name, value in (identity or {}).get("callers", {}).items():
            values.setdefault(name, set()).add(value)
    return {name for name, different in values.items() if len(different) > 1}


# ---------------------------------------------------------------------- the model


def _model(model: Any) -> list[Any]:
    return [_layer(layer) for layer in model._flatten_layers()]


def _layer(layer: Any) -> list[Any]:
    config: Any = None
    # What a layer of the script's own would answer is its own affair: it may compute, print or fail.
    inner = len(list(layer._flatten_layers())) > 1
    if not inner and _is_frameworks(type(layer).__module__):
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = layer.get_config()
    return [type(layer).__name__, layer.name, config]


def _variables(model: Any) -> list[Any] | None:
    """None: the model is not built yet, or has no variables."""
    found = [[str(variable.dtype), list(variable.shape)] for variable in model.weights]
    return found or None


def _optimizers(model: Any) -> list[Any]:
    configs = [one.get_config() for one in optimizers_of(model) if _is_frameworks(type(one).__module__)]
    return [configs, getattr(model, "loss", None)]


# ---------------------------------------------------------------------- the data


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__getitem__")


def _shapes(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _shapes(one) for key, one in value.items()}
    if isinstance(value, list | tuple) and len(value) <= _NODES:
        return [_shapes(one) for one in value]
    name = type(value).__name__
    if hasattr(value, "element_spec"):
        return [str(value.element_spec), int(value.cardinality())]
    if hasattr(value, "shape"):
        return [name, [int(size) for size in value.shape], str(getattr(value, "dtype", ""))]
    with contextlib.suppress(Exception):
        return [name, len(value)]
    return name


def _content(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _content(one) for key, one in value.items()}
    if isinstance(value, list | tuple) and len(value) <= _NODES:
        return [_content(one) for one in value]
    if hasattr(value, "element_spec"):
        return _dataset(value)
    if hasattr(value, "iloc"):  # a DataFrame
        return _rows(value.iloc)
    if _is_array(value):
        return _rows(value)
    if hasattr(value, "__getitem__") and hasattr(value, "__len__") and hasattr(value, "__dict__"):
        return {name: _rows(one) for name, one in sorted(vars(value).items()) if _is_array(one)}
    if hasattr(value, "dataset"):  # a loader of torch
        return _content(vars(value.dataset).get("tensors"))
    return None


def _dataset(value: Any) -> list[Any]:
    """What a chain of datasets begins with, if that is in memory, and the numbers along it. Nothing is read."""
    found: list[Any] = []
    left = [value]
    while left and len(found) < _NODES:
        one = left.pop()
        numbers = [getattr(one, name, None) for name in ("_count", "_batch_size", "_num_shards", "_index")]
        rows = [_rows(tensor) for tensor in getattr(one, "_tensors", None) or ()]
        found.append([type(one).__name__, [int(number) for number in numbers if number is not None], rows])
        left += one._inputs() if hasattr(one, "_inputs") else []
    return found


def _rows(array: Any) -> str:
    """A few of the rows, and of each the first elements."""
    count = len(array) if hasattr(array, "__len__") else len(array.obj)
    hashed = hashlib.sha256()
    for row in sorted({number * max(1, count - 1) // (_ROWS - 1) for number in range(_ROWS)} if count else ()):
        if row < count:
            part = array[row]
            part = np.asarray(part.numpy() if hasattr(part, "numpy") else part).reshape(-1)[:256]
            hashed.update(part.tobytes() if part.dtype != object else repr(part.tolist()).encode())
    return hashed.hexdigest()[:16]


# ---------------------------------------------------------------------- the callers


def _callers(frame: types.FrameType | None, arguments: Mapping[str, Any]) -> dict[str, str]:
    found = callers.described(frame, arguments, is_frameworks=_is_frameworks)
    hashed = {name: _hash(lambda: value, ()) for name, value in found.items()}  # noqa: B023
    return {name: value for name, value in hashed.items() if value is not None}


def steady_callers(identity: Identity) -> set[str]:
    """The names that are the same in another start of the same call, whatever the attempt before it has left."""
    return set(identity.get("callers", {})) - callers.OF_THE_START


# ---------------------------------------------------------------------- hashes


def _is_frameworks(module: str) -> bool:
    return module.partition(".")[0] in _FRAMEWORKS


def _hash(
    describe: Callable[[], Any], varying: tuple[re.Pattern[str], ...] = (_ADDRESS_OR_DATE, _LAYER_NUMBER)
) -> str | None:
    """None: it cannot be described. ``varying``: what does not count in texts."""
    with contextlib.suppress(Exception):
        value = describe()
        if value is not None:
            text = json.dumps(_plain(value, varying), sort_keys=True)
            return hashlib.sha256(text.encode()).hexdigest()[:16]
    return None


def _plain(value: Any, varying: tuple[re.Pattern[str], ...]) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one, varying) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, varying) for one in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    text = str(value)
    for pattern in varying:
        text = pattern.sub("", text)
    return text
