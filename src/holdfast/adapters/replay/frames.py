"""The tensors that a loop's own variables hold: a hidden state, a sum, a permutation, a batch fetched ahead.

A replay brings the script to the same line with variables of the same shape, but not of the same content, since
nothing was computed. So a checkpoint holds the content of the tensors, arrays and generators that the frames of the
loop can reach, under their names, and on resume it is put into those that are there, in place: whoever else holds
them, an iterator say, sees it too.

Only a save looks at frames; a step costs nothing. Small things come first, up to a limit, since what is large (the
logits of the last step) is hardly ever read again; what was left out becomes NaN on resume where it can, or is named.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import weakref
from collections import deque
from collections.abc import Container, Iterator, Mapping
from inspect import CO_OPTIMIZED
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

LIMIT = 64 << 20
"""Bytes that variables may add to a checkpoint of one rank."""

_LARGE = 1 << 20
_SMALL = 1 << 16
_DEEP = 6
_LONG = 4096
_VISITS = 100_000
_TORCH = os.path.dirname(torch.__file__) + os.sep
_STEP = f"{_TORCH}optim/optimizer.py"
"""It holds what ``optimizer.step(closure)`` is about to return."""

_NOBODY_ELSE = 3
"""References to a dictionary that a frame and one variable of ours hold, and the call that counts."""

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_SKIPPED = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, FunctionType, MethodType, FrameType)
_MACHINERY = {"_parameters", "_buffers", "_modules"}
"""Attributes of a module that a checkpoint holds anyway."""

_HANDLED = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.utils.data.DataLoader)
_CLOSED = ("torch.", "numpy", "holdfast.", "builtins", "_")

Found = dict[str, Any]
Noted = dict[str, Any]


class Frames:
    """Finds what the frames of one thread hold."""

    def __init__(self) -> None:
        self._constant: dict[int, tuple[Any, int]] = {}

    def note_constants(self, frame: FrameType | None) -> None:
        """Large tensors that are there now, such as a dataset, are made by the script again; if they stay as they are,
        no checkpoint need hold them."""
        for value in self.find(frame).values():
            if isinstance(value, torch.Tensor) and value.nbytes > _LARGE:
                self._constant[id(value)] = (weakref.ref(value), value._version)

    def find(self, frame: FrameType | None, known: Container[int] = ()) -> Found:
        """By name, what the frames from ``frame`` outward reach; ``known``: memory that is saved anyway."""
        found: Found = {}
        visited: set[int] = set()
        for number, one in enumerate(reversed(list(_script_frames(frame)))):
            for name, value in _variables(one).items():
                if not name.startswith("__"):
                    self._walk(value, f"{number} {one.f_code.co_qualname} {name}", 0, found, visited, known)
        return found

    def _walk(self, value: Any, path: str, depth: int, found: Found, visited: set[int], known: Container[int]) -> None:
        if isinstance(value, _SKIPPED) or id(value) in visited or len(visited) > _VISITS:
            return
        visited.add(id(value))
        if isinstance(value, torch.Tensor):
            if type(value) is torch.Tensor and _address(value) not in known and not self._is_constant(value):
                found[path] = value
            return
        if _is_array(value) or _is_generator(value):
            found[path] = value
            return
        if depth < _DEEP:
            for name, item in _parts(value):
                self._walk(item, f"{path}{name}", depth + 1, found, visited, known)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        reference, version = self._constant.get(id(tensor), (lambda: None, -1))
        return reference() is tensor and bool(version == tensor._version)

    def note(self, frame: FrameType | None, known: Container[int]) -> Noted:
        """What they hold now, for a save that may come later: small things as copies, of large ones that they were."""
        noted: Noted = {}
        for path, value in self.find(frame, known).items():
            if not isinstance(value, torch.Tensor):
                noted[path] = copy.deepcopy(_state_of(value)) if getattr(value, "nbytes", 0) <= _SMALL else None
            elif value.nbytes <= _SMALL:
                noted[path] = value.detach().clone()
            else:
                noted[path] = (weakref.ref(value), value._version)
        return noted

    def content(self, frame: FrameType | None, known: Container[int]) -> dict[str, Any]:
        """What a checkpoint holds of them."""
        return _limited({path: _state_of(value) for path, value in self.find(frame, known).items()})

    def put_back(self, frame: FrameType | None, content: Mapping[str, Any]) -> list[str]:
        """Give the variables their content; returns the names of those that are not there, or of another kind."""
        found = self.find(frame)
        return [path for path, state in content.items() if path not in found or not _restore(found[path], state)]


def content_of(noted: Noted) -> dict[str, Any]:
    """What a checkpoint holds of variables that were noted before."""
    content: dict[str, Any] = {}
    for path, state in noted.items():
        if isinstance(state, tuple):
            reference, version = state
            tensor = reference()
            state = tensor.detach() if tensor is not None and tensor._version == version else None
        content[path] = state
    return _limited(content)


def _limited(content: dict[str, Any]) -> dict[str, Any]:
    """Small things first; None for what is too much."""
    used = 0
    limited = {}
    for path, state in sorted(content.items(), key=lambda item: getattr(item[1], "nbytes", 0)):
        used += getattr(state, "nbytes", 0)
        limited[path] = state if used <= LIMIT else None
    return limited


def _script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Outward, without those of torch, but for an optimizer's step, and of holdfast; up to Ray, which calls a script's
    function and holds a great deal that is not the script's."""
    ray = sys.modules.get("ray")
    end = os.path.dirname(ray.__file__) + os.sep if ray is not None and ray.__file__ else None
    while frame is not None:
        name = frame.f_code.co_filename
        if end is not None and name.startswith(end):
            return
        if name == _STEP or not name.startswith((_TORCH, _OURS)):
            yield frame
        frame = frame.f_back


def _variables(frame: FrameType) -> dict[str, Any]:
    """What the variables of a frame hold. CPython keeps the dictionary that it makes of them as long as the frame runs,
    and with it what the variables no longer hold, the logits of the first step say: it is emptied, unless the script
    has it too, from ``locals()``."""
    there = frame.f_locals
    held = dict(there)
    if frame.f_code.co_flags & CO_OPTIMIZED and type(there) is dict and sys.getrefcount(there) <= _NOBODY_ELSE:
        there.clear()
    return held


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The things inside ``value``, with what to add to its name."""
    if isinstance(value, list | tuple | deque):
        if len(value) <= _LONG:
            for index, item in enumerate(value):
                yield f"[{index}]", item
    elif isinstance(value, Mapping):
        if len(value) <= _LONG:
            for key, item in list(value.items()):
                if isinstance(key, str | int):
                    yield f"[{key!r}]", item
    elif isinstance(value, torch.nn.Module):
        for name, module in value.named_modules():
            for key, item in list(vars(module).items()):
                if key not in _MACHINERY and not key.startswith("_forward") and not key.startswith("_backward"):
                    yield f".{name}.{key}" if name else f".{key}", item
    elif not isinstance(value, _HANDLED) and not type(value).__module__.startswith(_CLOSED):
        for key, item in list(getattr(value, "__dict__", {}).items()):
            yield f".{key}", item


def _address(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr()) or id(tensor)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def addresses(tensors: Iterator[torch.Tensor]) -> set[int]:
    return {_address(tensor) for tensor in tensors}


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc"


def _is_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds = (*kinds, numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, kinds)


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if _is_array(value):
        return value
    if hasattr(value, "bit_generator"):
        return value.bit_generator.state
    return value.get_state(legacy=False)


def _restore(value: Any, state: Any) -> bool:
    if state is None:
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            value.detach().fill_(float("nan"))
            return True
        return False
    if isinstance(value, torch.Tensor):
        return _restore_tensor(value, state)
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif _is_array(value):
        if not _is_array(state) or (state.shape, state.dtype) != (value.shape, value.dtype):
            return False
        if not value.flags.writeable:
            return False
        value[...] = state
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = state
    else:
        value.set_state(state)
    return True


def _restore_tensor(tensor: torch.Tensor, state: Any) -> bool:
    if not isinstance(state, torch.Tensor) or state.dtype != tensor.dtype:
        return False
    if state.shape == tensor.shape and 0 not in tensor.stride():
        tensor.data.copy_(state)
    else:
        tensor.data = state.to(tensor.device)  # the last batch of a pass, say, which is smaller
    return True
