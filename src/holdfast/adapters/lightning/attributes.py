"""What a LightningModule and callbacks of one's own remember in plain attributes: a hidden state, a list of losses.

Lightning's checkpoint holds none of it, unless the script writes it there. Only attributes that have changed since
training began are saved, so that what the script configures anew at a later start counts. Objects of the script's own
classes and generators of random numbers that they hold are looked into. Datasets, samplers and loaders are not: they
are ahead of the step that is saved.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from holdfast.errors import StateError
from holdfast.torch import generators
from holdfast.torch.codec import encode

_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "transformers")
_MOST = 100_000
"""Elements of containers that are looked at."""
_OBJECTS = 10_000
"""Things that are looked at in search of objects of the script."""
_DATA = (torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.utils.data.Sampler)
_STDLIB = os.path.dirname(os.__file__) + os.sep
_STATE = "state"

Values = dict[str, dict[str, Any]]

_made: dict[type, frozenset[str]] = {}


class Attributes:
    """The attributes of one fit's objects, by the object's name."""

    def __init__(self, trainer: Any) -> None:
        self._holders = dict(_holders(trainer))
        self._alive: list[Any] = []
        """What signatures name by its address."""
        self._before = {
            (name, key): (value, _signature(value, self._alive))
            for name, holder in self._holders.items()
            for key, value in _own(holder)
        }

    def take(self) -> Values:
        """Copies of those that have changed."""
        found: Values = {}
        for name, key, value in self._changed():
            if _can_be_saved(value):
                found.setdefault(name, {})[key] = _copy(value)
        return found

    def unsaved(self) -> list[str]:
        """Those that have changed and cannot be saved, in words."""
        return [
            f"{name}.{key} ({type(value).__name__}) is not saved"
            for name, key, value in self._changed()
            if not _can_be_saved(value) and not callable(value) and not isinstance(value, torch.optim.Optimizer)
        ]

    def _changed(self) -> Iterator[tuple[str, str, Any]]:
        for name, holder in self._holders.items():
            for key, value in _own(holder):
                before, signature = self._before.get((name, key)), _signature(value)
                if before is None or signature != before[1] or (signature is None and value is not before[0]):
                    yield name, key, value

    def put(self, saved: Values, device: Any) -> None:
        """Let the objects go on with what was saved."""
        for name, values in saved.items():
            holder = self._holders.get(name)
            for key, value in values.items() if holder is not None else ():
                if generators.is_generator(holder):
                    generators.restore(holder, value)
                    continue
                current, value = vars(holder).get(key), _to(value, device)
                if type(current) is list and type(value) is list:
                    current[:] = value  # the script may hold it too
                elif type(current) is dict and type(value) is dict:
                    current.clear()
                    current.update(value)
                else:
                    setattr(holder, key, value)


def _holders(trainer: Any) -> Iterator[tuple[str, Any]]:
    """What has attributes of its own, by names that are the same in every process of the script."""
    roots = list(_roots(trainer))
    seen = {id(holder) for _, holder in roots}
    waiting = [(f"{name}.{key}", value) for name, holder in roots for key, value in _own(holder)]
    yield from roots
    for name, value in waiting:  # it grows
        if len(waiting) > _OBJECTS:
            return
        if type(value) in (list, tuple):
            waiting += [(f"{name}[{number}]", item) for number, item in enumerate(value)]
        elif type(value) is dict:
            waiting += [(f"{name}[{key!r}]", item) for key, item in value.items() if isinstance(key, str | int)]
        elif id(value) in seen:
            continue
        elif generators.is_generator(value):
            seen.add(id(value))
            yield name, value
        elif _is_of_the_script(value):
            seen.add(id(value))
            yield name, value
            waiting += [(f"{name}.{key}", item) for key, item in _own(value)]


def _roots(trainer: Any) -> Iterator[tuple[str, Any]]:
    root = trainer.lightning_module
    for name, module in root.named_modules():
        if module is root or _is_users(module):
            yield f"module.{name}" if name else "module", module
    for number, callback in enumerate(trainer.callbacks):
        if _is_users(callback):
            yield f"callback {number}, {type(callback).__name__}", callback


def _is_users(thing: Any) -> bool:
    return type(thing).__module__.partition(".")[0] not in _LIBRARIES


def _is_of_the_script(thing: Any) -> bool:
    """Whether its class is one of the script's own, with attributes that make up its state."""
    if isinstance(thing, (type, torch.nn.Module, torch.Tensor, *_DATA)) or not hasattr(thing, "__dict__"):
        return False
    module = type(thing).__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    if module in ("__main__", "__mp_main__"):
        return True
    return file is not None and not file.startswith(_STDLIB) and "site-packages" not in file


def _own(holder: Any) -> list[tuple[str, Any]]:
    """Attributes that no base class of the framework makes; of a generator its state."""
    if generators.is_generator(holder):
        return [(_STATE, generators.state_of(holder))]
    made = _made_by_base(type(holder)) if isinstance(holder, torch.nn.Module) else frozenset()
    return [(key, value) for key, value in vars(holder).items() if key not in made and not key.startswith("_hparams")]


def _made_by_base(kind: type) -> frozenset[str]:
    if kind not in _made:
        base = next(
            one
            for one in kind.__mro__
            if one.__name__ in ("LightningModule", "Module") and one.__module__.partition(".")[0] in _LIBRARIES
        )
        _made[kind] = frozenset(vars(base()))
    return _made[kind]


def _can_be_saved(value: Any) -> bool:
    try:
        encode(value, "", {})
    except (StateError, TypeError, ValueError, RecursionError):
        return False
    return True


def _signature(value: Any, alive: list[Any] | None = None) -> Any:
    """Changes when the value does; None for what is too large to look at, or of a kind that is not looked into."""
    try:
        return _signed(value, [_MOST], [] if alive is None else alive)
    except (_Unsigned, RecursionError):
        return None


class _Unsigned(Exception):
    pass


def _signed(value: Any, left: list[int], alive: list[Any]) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise _Unsigned
    if isinstance(value, torch.ByteTensor) and value.numel() <= _MOST:  # the state of a generator, made anew each time
        return ("bytes", value.numpy().tobytes())
    if isinstance(value, torch.Tensor):
        alive.append(value)
        return ("tensor", id(value), value._version)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        left[0] -= value.nbytes
        if left[0] < 0:
            raise _Unsigned
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if type(value) in (bool, int, float, str, bytes, type(None)):
        return (type(value).__name__, value)
    if type(value) in (list, tuple):
        return (type(value).__name__, tuple(_signed(item, left, alive) for item in value))
    if type(value) is dict:
        return ("dict", tuple((key, _signed(item, left, alive)) for key, item in value.items()))
    alive.append(value)
    return ("object", id(value))


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return _mapped(_copy, value)


def _to(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else _mapped(lambda item: _to(item, device), value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if type(value) is dict:
        return {key: function(item) for key, item in value.items()}
    return type(value)(map(function, value)) if type(value) in (list, tuple) else value
