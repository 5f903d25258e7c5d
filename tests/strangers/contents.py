"""Compares what two binary files hold, where their bytes may differ by alignment, by archive names or by a date."""

from __future__ import annotations

import enum
import io
import json
import math
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PASSING = ("date_saved", "shared_object_id")
"""Keys whose values say when a file was written, or are addresses of that process."""


def same(one: Path, one_folder: Path, other: Path, other_folder: Path) -> bool:
    """Whether both hold the same, each below its working folder; False for files of a kind that is not known here."""
    read = _READERS.get(one.suffix)
    if read is None:
        return False
    ones, others = (
        _placed(read(path.read_bytes()), str(folder)) for path, folder in ((one, one_folder), (other, other_folder))
    )
    return _same(ones, others)


def _placed(value: Any, folder: str) -> Any:
    """The same with the name of the working folder taken out of texts."""
    if isinstance(value, str):
        return value.replace(folder, "<folder>")
    if type(value) is dict:
        return {_placed(key, folder): _placed(each, folder) for key, each in value.items()}
    return [_placed(each, folder) for each in value] if type(value) is list else value


def _pickled(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _safetensors(data: bytes) -> Any:
    from safetensors import deserialize

    begin = 8 + int.from_bytes(data[:8], "little")
    tensors = {name: sorted(entry.items()) for name, entry in sorted(deserialize(data))}
    return [tensors, json.loads(data[8:begin]).get("__metadata__")]


def _hdf5(data: bytes) -> Any:
    import h5py

    found: dict[str, Any] = {}
    with h5py.File(io.BytesIO(data), "r") as file:

        def visit(name: str, item: Any) -> None:
            found[name] = [item[()] if isinstance(item, h5py.Dataset) else None, dict(item.attrs)]

        visit("", file)
        file.visititems(visit)
    return found


def _keras(data: bytes) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: _entry(name, archive.read(name)) for name in archive.namelist()}


def _entry(name: str, data: bytes) -> Any:
    if name.endswith(".h5"):
        return _hdf5(data)
    return json.loads(data) if name.endswith(".json") else data


_READERS: dict[str, Callable[[bytes], Any]] = {
    ".safetensors": _safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _pickled),
    ".h5": _hdf5,
    ".keras": _keras,
}


def _same(one: Any, other: Any) -> bool:
    if type(one).__name__ != type(other).__name__:
        return False
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(key in PASSING or _same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "dtype") and hasattr(one, "shape"):
        return bool(one.dtype == other.dtype and one.shape == other.shape and _bytes(one) == _bytes(other))
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if hasattr(one, "__dict__") and not isinstance(one, type | enum.Enum) and not callable(one):
        return _same(vars(one), vars(other))
    return bool(one == other)


def _bytes(array: Any) -> bytes:
    """Its elements."""
    import numpy as np
    import torch

    if isinstance(array, torch.Tensor):
        array = array.detach().contiguous().flatten().view(torch.uint8).numpy() if array.numel() else np.empty(0)
    array = np.asarray(array)
    return repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
