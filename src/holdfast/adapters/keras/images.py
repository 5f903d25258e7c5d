"""Files of a Keras checkpoint before they are on disk, made of NumPy arrays: no torch is needed to write or read them.

``*.safetensors`` holds a state of any shape: its arrays as tensors, and the rest as JSON in the file's metadata, as in
the checkpoints of PyTorch loops. Any safetensors reader loads the arrays. Loading runs no code.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from holdfast.errors import StateError
from holdfast.store.pipeline import CHUNK, ChunkPool

METADATA = "holdfast"
"""Key in a file's safetensors metadata under which holdfast keeps the JSON part of a state."""

_PAGE = 4096
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_PLAIN = (str, int, float, bool, type(None))


class BufferImage:
    """A file whose bytes are at hand."""

    def __init__(self, path: str, data: bytes | memoryview) -> None:
        self.path = path
        self._data = memoryview(data)
        self.size = self._data.nbytes

    def chunks(self, pool: ChunkPool) -> Iterator[memoryview]:
        for begin in range(0, self.size, CHUNK):
            yield self._data[begin : begin + CHUNK]


class ArrayImage:
    """A safetensors file of arrays."""

    def __init__(self, path: str, arrays: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str]) -> None:
        self.path = path
        # Wide types first: every array then begins at a multiple of its element size.
        ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)
        self.arrays = [array for _, array in ordered]
        header: dict[str, Any] = {"__metadata__": {"format": "np", **metadata}}
        offset = 0
        for name, array in ordered:
            entry = {"dtype": _NAMES[array.dtype.name], "shape": list(array.shape)}
            header[name] = {**entry, "data_offsets": [offset, offset + array.nbytes]}
            offset += array.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _PAGE)
        self.header = len(text).to_bytes(8, "little") + text
        self.size = len(self.header) + offset

    def chunks(self, pool: ChunkPool) -> Iterator[memoryview]:
        """Header and arrays, gathered into buffers of the pool."""
        chunk, used = pool.take(), 0
        target = np.frombuffer(chunk, dtype=np.uint8)
        for source in (np.frombuffer(self.header, dtype=np.uint8), *map(_flat, self.arrays)):
            begin = 0
            while begin < source.size:
                count = min(target.size - used, source.size - begin)
                target[used : used + count] = source[begin : begin + count]
                used += count
                begin += count
                if used == target.size:
                    yield chunk
                    chunk, used = pool.take(), 0
                    target = np.frombuffer(chunk, dtype=np.uint8)
        yield chunk[:used]


def _flat(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)


def tree_image(path: str, tree: Any) -> ArrayImage:
    """A file for any state."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    skeleton = encode(tree, "state", arrays)
    return ArrayImage(path, arrays, {METADATA: json.dumps(skeleton)})


def write_tree(tree: Any) -> bytes:
    """A state as the bytes of such a file."""
    image = tree_image("", tree)
    return image.header + b"".join(_flat(array).tobytes() for array in image.arrays)


def read_tree(memory: memoryview) -> Any:
    """The state in a file that lies in memory; ValueError if it is none. Its arrays are views of ``memory``."""
    length = int.from_bytes(memory[:8], "little")
    if not 0 < length <= len(memory) - 8:
        raise ValueError(f"a header of {length} bytes in a file of {len(memory)}")
    header = json.loads(bytes(memory[8 : 8 + length]))
    metadata = header.pop("__metadata__", {})
    data = memory[8 + length :]
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= len(data):
            raise ValueError(f"array {name!r} lies outside the file")
        dtype = _dtype(next(known for known, short in _NAMES.items() if short == entry["dtype"]))
        arrays[name] = np.frombuffer(data[begin:end], dtype=dtype).reshape(entry["shape"])
    return decode(json.loads(metadata[METADATA]), arrays)


def _dtype(name: str) -> np.dtype[Any]:
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        name = getattr(ml_dtypes, name)
    made: np.dtype[Any] = np.dtype(name)
    return made


def encode(value: Any, name: str, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    """The JSON form of ``value``; its arrays are added to ``arrays`` under names that begin with ``name``."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, np.ndarray) and value.dtype.name in _NAMES:
        arrays[name := _unused(name, arrays)] = value
        return {"$": "array", "name": name}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.name in _NAMES:
        return {"$": "scalar", "dtype": value.dtype.name, "value": value.item()}
    if isinstance(value, dict) and all(type(key) in (str, int, float, bool) for key in value):
        if all(type(key) is str for key in value) and "$" not in value:
            return {key: encode(item, f"{name}.{key}", arrays) for key, item in value.items()}
        return {"$": "dict", "items": [[key, encode(item, f"{name}.{key}", arrays)] for key, item in value.items()]}
    if kind is list:
        return [encode(item, f"{name}.{index}", arrays) for index, item in enumerate(value)]
    if kind in (tuple, set, frozenset):
        items = list(value) if kind is tuple else sorted(value, key=repr)
        encoded = [encode(item, f"{name}.{index}", arrays) for index, item in enumerate(items)]
        return {"$": kind.__name__, "items": encoded}
    if kind in (bytes, bytearray):
        return {"$": kind.__name__, "base64": base64.b64encode(value).decode("ascii")}
    raise StateError(f"{name} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved without running code")


def _unused(name: str, arrays: dict[str, np.ndarray[Any, Any]]) -> str:
    """Keys may hold dots, so that two paths can read alike."""
    number, unused = 2, name
    while unused in arrays or unused == "__metadata__":
        unused = f"{name}#{number}"
        number += 1
    return unused


def decode(value: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """The inverse of :func:`encode`. Arrays are those of ``arrays``, not copies."""
    if isinstance(value, list):
        return [decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: decode(item, arrays) for key, item in value.items()}
    if kind == "array":
        return arrays[value["name"]]
    if kind == "scalar":
        return _dtype(value["dtype"]).type(value["value"])
    if kind == "dict":
        return {key: decode(item, arrays) for key, item in value["items"]}
    if kind in ("tuple", "set", "frozenset"):
        made = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return made(decode(item, arrays) for item in value["items"])
    if kind in ("bytes", "bytearray"):
        data = base64.b64decode(value["base64"])
        return data if kind == "bytes" else bytearray(data)
    raise ValueError(f"{kind!r} is no kind of value that this version of holdfast knows")
