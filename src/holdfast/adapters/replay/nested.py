"""Tensors inside of what modules are given and answer, and of batches: nested tuples, lists, dicts and objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

_PLAIN = (int, bool, str, type(None))


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with its tensors changed: nested tuples, lists, dicts, dataclasses and objects with attributes."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    if isinstance(value, tuple):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # transformers' ModelOutput is a dict as well, which its constructor fills.
        names = [field.name for field in dataclasses.fields(value) if field.init]
        try:
            return type(value)(**{name: mapped(getattr(value, name), change) for name in names})
        except TypeError:
            pass
    if isinstance(value, Mapping):
        changed = copy.copy(value)
        for key, item in value.items():
            changed[key] = mapped(item, change)  # type: ignore[index]
        return changed
    if hasattr(value, "__dict__"):
        changed = copy.copy(value)
        for key, item in vars(value).items():
            if isinstance(item, torch.Tensor | list | tuple | dict):
                object.__setattr__(changed, key, mapped(item, change))
        return changed
    return value


def shape_of(value: Any, leading: list[torch.Tensor]) -> Any:
    """What of an argument decides the shape of the answer. Its tensors that lead backward are added to ``leading``."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            leading.append(value)
        return value.shape, value.dtype, value.requires_grad
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return tuple((key, shape_of(item, leading)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(shape_of(item, leading) for item in value)
    return type(value)


def clone_batch(batch: Any) -> Any:
    """A batch of its own, for a script that keeps it."""
    return mapped(batch, lambda tensor: tensor.clone())
