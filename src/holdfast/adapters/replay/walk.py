"""The walk through what a script's variables reach: tensors, arrays and generators, each under a name.

Names follow from the order of the walk, which is the same in every process that has come to the same line: depth first,
and what functions close over last. Objects of the script's own classes are looked into as deep as they go, those of
installed packages up to a depth, so that a walk does not go through all of a library.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from inspect import CO_OPTIMIZED
from types import FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, TypeVar

import torch

from holdfast.torch import generators

_MOST = 2_000_000
"""Objects that a walk looks into; about two seconds."""
_DEEP = 8
"""Objects of installed packages, one inside the other, that are looked into."""
_LONG = 4096
"""Items from which on a container is sampled for what kinds of item hold anything."""
_SAMPLES = 24
_SAMPLED = 300
"""Objects that are looked into to find out whether one item holds anything."""

_SKIPPED = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, FrameType)
_LATER = (FunctionType, MethodType, functools.partial, GeneratorType)
_MACHINERY = {"_parameters", "_buffers", "_modules"}
"""Attributes of a module that a checkpoint holds anyway."""

_HANDLED = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.utils.data.DataLoader)
_CLOSED = ("torch.", "numpy", "holdfast.", "builtins", "_")
_SCRIPTS = ("__main__", "__mp_main__")
_STDLIB = os.path.dirname(os.__file__) + os.sep
_SITES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_NOBODY_ELSE = 3
"""References to a dictionary that a frame and one variable of ours hold, and the call that counts."""

Answer = TypeVar("Answer")
Found = dict[str, Any]
Item = tuple[str, Any, int]
"""A name, what it is of, and how many objects of installed packages are around it."""


def _by_class(function: Callable[[type], Answer]) -> Callable[[type], Answer]:
    """Remember the answer for each class, by identity: the hash of a class is its metaclass's business."""
    known: dict[int, tuple[type, Answer]] = {}

    def answer(kind: type) -> Answer:
        if id(kind) not in known:
            known[id(kind)] = kind, function(kind)
        return known[id(kind)][1]

    return answer


class Walk:
    """One walk from the variables of frames."""

    def __init__(
        self,
        known: Container[int] = (),
        *,
        most: int = _MOST,
    ) -> None:
        """``known``: memory that is saved anyway."""
        self.found: Found = {}
        self.names: Found = {}
        """All names by which the walk came to something, where it has several."""
        self.cut: list[str] = []
        """What it has not looked at, in words."""
        self._known, self._most = known, most
        self._visited: set[int] = set()
        self._later: list[Item] = []
        self._kept: list[Any] = []
        """So that no identity comes twice."""

    def frames(self, frames: list[FrameType]) -> Walk:
        """From the outermost frame to the innermost."""
        for number, frame in enumerate(frames):
            for name, value in variables(frame).items():
                if not name.startswith("__"):
                    self._from(f"{number} {frame.f_code.co_qualname} {name}", value, 0)
        for name, value, depth in self._later:  # it grows
            self._walk(_held_by(name, value, depth))
        return self

    def _from(self, name: str, value: Any, depth: int) -> None:
        self._walk(iter([(name, value, depth)]))

    def _walk(self, items: Iterator[Item]) -> None:
        visited, stack = self._visited, [items]
        while stack:
            item = next(stack[-1], None)
            if item is None:
                stack.pop()
                continue
            name, value, depth = item
            sort = _sort(type(value))
            if sort == _NOTHING:
                continue
            if id(value) in visited:
                if sort in (_TENSOR, _LEAF):
                    self.names[name] = value
                continue
            if len(visited) >= self._most:
                if not self.cut:
                    self.cut.append(f"the script's variables hold more than {self._most:,} objects")
                return
            if sort == _TENSOR:
                self._tensor(name, value)
            elif sort == _LEAF:
                if not is_array(value) or value.dtype.kind in "biufc":
                    self.found[name] = value
            elif sort == _HOLDER:
                self._later.append(item)
            elif sort == _SET:
                if any(isinstance(one, torch.Tensor) for one in list(value)):  # a copy: another thread may add to it
                    self.cut.append(f"{name.split(' ', 2)[2]} is a set of tensors, which has no order")
            elif depth <= _DEEP:
                stack.append(self._inside(name, value, depth))
            else:
                continue  # it may be nearer by another way
            visited.add(id(value))
            self._kept.append(value)

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and address(tensor) not in self._known:
            self.found[name] = tensor

    def _inside(self, name: str, value: Any, depth: int) -> Iterator[Item]:
        inner = depth + _is_foreign(type(value))
        try:
            for more, item in _parts(value):
                yield f"{name}{more}", item, inner
        except Exception:  # a lazy mapping of somebody's that cannot be read now
            return


def variables(frame: FrameType) -> dict[str, Any]:
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
        wanted = _wanted(value) if len(value) > _LONG else None
        for index, item in enumerate(value.copy() if isinstance(value, deque) else value):
            if wanted is None or type(item) in wanted:
                yield f"[{index}]", item
    elif isinstance(value, Mapping):
        if len(value) > _LONG and not isinstance(value, dict):
            return  # it may be a database
        items = list(value.items())
        wanted = _wanted([item for _, item in items]) if len(items) > _LONG else None
        for index, (key, item) in enumerate(items):
            if wanted is None or type(item) in wanted:
                yield f"[{key!r}]" if isinstance(key, str | int) else f"[#{index}]", item
    elif isinstance(value, torch.nn.Module):
        for path, module in value.named_modules():
            for key, item in list(vars(module).items()):
                if key not in _MACHINERY and not key.startswith("_forward") and not key.startswith("_backward"):
                    yield f".{path}.{key}" if path else f".{key}", item
    elif not isinstance(value, _HANDLED) and _is_open(type(value)):
        for key, item in list(getattr(value, "__dict__", {}).items()):
            yield f".{key}", item
        for key in _slots(type(value)):
            if hasattr(value, key):
                yield f".{key}", getattr(value, key)


def _wanted(items: Any) -> set[type]:
    """Types of the items of a long container that hold anything, as far as samples of each tell."""
    kinds = {kind for kind in set(map(type, items)) if _sort(kind) != _NOTHING}
    wanted = {kind for kind in kinds if _sort(kind) == _TENSOR}
    for kind in kinds - wanted:
        same = [item for item in items if type(item) is kind]
        if any(_holds(item) for item in same[:: max(1, len(same) // _SAMPLES)]) or _holds(same[-1]):
            wanted.add(kind)
    return wanted


def _holds(item: Any) -> bool:
    walk = Walk(most=_SAMPLED)
    walk._from("0 _ item", item, 0)
    return bool(walk.found or walk.cut or walk._later)


def _held_by(name: str, value: Any, depth: int) -> Iterator[Item]:
    """What a function closes over, the object of a method, the arguments of a partial, a generator's variables."""
    if isinstance(value, MethodType):
        yield f"{name}.__self__", value.__self__, depth
    elif isinstance(value, functools.partial):
        yield f"{name}.func", value.func, depth
        yield f"{name}.args", value.args, depth
        yield f"{name}.keywords", value.keywords, depth
    elif isinstance(value, GeneratorType):
        if value.gi_frame is not None and not _is_installed(value.gi_code.co_filename):
            for key, item in variables(value.gi_frame).items():
                yield f"{name}<{key}>", item, depth
    elif not _is_installed(value.__code__.co_filename):
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                yield f"{name}<{key}>", cell.cell_contents, depth
            except ValueError:  # it is empty as yet
                continue
        yield f"{name}.__defaults__", value.__defaults__, depth
        yield f"{name}.__kwdefaults__", value.__kwdefaults__, depth


_NOTHING, _TENSOR, _LEAF, _HOLDER, _SET, _OBJECT = range(6)


@_by_class
def _sort(kind: type) -> int:
    """What a walk does with values of a class."""
    if issubclass(kind, _SKIPPED):
        return _NOTHING
    if issubclass(kind, torch.Tensor):
        return _TENSOR
    if _is_array_class(kind) or issubclass(kind, generators.kinds()):
        return _LEAF
    if issubclass(kind, _LATER):
        return _HOLDER  # what functions hold is looked at last
    return _SET if issubclass(kind, set | frozenset) else _OBJECT


def _is_open(kind: type) -> bool:
    module = kind.__module__
    return module in _SCRIPTS or not module.startswith(_CLOSED)


def _is_installed(file: str) -> bool:
    return file.startswith(_STDLIB) or any(site in file for site in _SITES)


@_by_class
def _slots(kind: type) -> tuple[str, ...]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                names.append(f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") else name)
    return tuple(names)


@_by_class
def _is_foreign(kind: type) -> bool:
    """Whether a class belongs to an installed package. Containers of Python's own have no depth."""
    if issubclass(kind, list | tuple | deque | dict):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and _is_installed(file)


def address(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr()) or id(tensor)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def addresses(tensors: Iterator[torch.Tensor]) -> set[int]:
    return {address(tensor) for tensor in tensors}


def is_array(value: Any) -> bool:
    return _is_array_class(type(value))


def _is_array_class(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray)
