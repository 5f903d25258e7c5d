"""Any state dict as JSON plus named tensors, and back, without pickle.

Loading runs no code. What cannot be written this way is refused when the run starts, with the path of
the value and its type, and not at the moment of a preemption.
"""

from __future__ import annotations

import base64
from typing import Any

import torch

from holdfast.errors import StateError

_PLAIN = (str, int, float, bool, type(None))


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The JSON form of ``value``; its tensors are added to ``tensors`` under names that begin with ``name``."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        name = _unused(name, tensors)
        tensors[name] = value.detach()
        return {"$": "tensor", "name": name}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and "$" not in value:
            return {key: encode(item, f"{name}.{key}", tensors) for key, item in value.items()}
        pairs = [[encode(key, name, tensors), encode(item, f"{name}.{key}", tensors)] for key, item in value.items()]
        return {"$": "dict", "items": pairs}
    if isinstance(value, list):
        return [encode(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$": "tuple", "items": [encode(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, set | frozenset):
        ordered = sorted(value, key=repr)
        return {"$": "set", "items": [encode(item, f"{name}.{index}", tensors) for index, item in enumerate(ordered)]}
    if isinstance(value, bytes | bytearray):
        return {"$": "bytes", "base64": base64.b64encode(value).decode("ascii")}
    if kind.__module__ == "numpy":
        import numpy

        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
            name = _unused(name, tensors)
            tensors[name] = torch.from_numpy(numpy.frombuffer(value.tobytes(), dtype=numpy.uint8).copy())
            return {"$": "ndarray", "name": name, "dtype": value.dtype.str, "shape": list(value.shape)}
        if isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
            return {"$": "scalar", "dtype": value.dtype.str, "value": value.item()}
    if isinstance(value, _PLAIN):  # a subclass, such as an IntEnum or numpy.float64: its plain value is what is kept
        return next(base(value) for base in (bool, int, float, str) if isinstance(value, base))
    raise StateError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved without pickle. "
        f"Accepted are numbers, text, bytes, None, tensors, NumPy arrays, and dicts, lists, tuples and sets of them: "
        f"let state_dict() return those"
    )


def _unused(name: str, tensors: dict[str, torch.Tensor]) -> str:
    """Keys may hold dots, so that two paths can read alike: ``{"a": {"b": …}, "a.b": …}``."""
    number = 2
    unused = name
    while unused in tensors or unused == "__metadata__":
        unused = f"{name}#{number}"
        number += 1
    return unused


def decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The inverse of :func:`encode`. The tensors are those of ``tensors``, not copies."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: decode(item, tensors) for key, item in value.items()}
    if kind == "tensor":
        return tensors[value["name"]]
    if kind == "dict":
        return {decode(key, tensors): decode(item, tensors) for key, item in value["items"]}
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in value["items"])
    if kind == "set":
        return {decode(item, tensors) for item in value["items"]}
    if kind == "bytes":
        return base64.b64decode(value["base64"])
    if kind in ("ndarray", "scalar"):
        import numpy

        if kind == "scalar":
            return numpy.dtype(value["dtype"]).type(value["value"])
        raw = tensors[value["name"]].numpy().tobytes()
        return numpy.frombuffer(raw, dtype=numpy.dtype(value["dtype"])).reshape(value["shape"]).copy()
    raise StateError(f"{kind!r} is no kind of value that this version of holdfast knows")
