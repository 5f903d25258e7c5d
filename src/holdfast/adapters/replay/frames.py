"""The tensors that a loop's own variables hold: a hidden state, a sum, a permutation, a replay buffer.

A replay brings the script to the same line with variables of the same shape, but not of the same content, since
nothing was computed. So a checkpoint holds the content of the tensors, arrays and generators that the frames of the
loop can reach, under their names, and on resume it is put into those that are there, in place: whoever else holds
them, an iterator say, sees it too.

Only a save looks at frames; a step costs nothing. What was there when the loop began and is unchanged, such as a
dataset, is made by the script again. Of the rest small things come first, up to a limit. What is left out is named, at
the save and at the resume. Large values that still belong to a graph, the logits of the last step say, are hardly ever
read again: they become NaN.
"""

from __future__ import annotations

import copy
import os
import sys
import weakref
import zlib
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from holdfast.adapters.replay.packed import Content, pack, pack_names, unpack, unpack_names
from holdfast.adapters.replay.walk import Found, Walk, address, is_array
from holdfast.torch import generators

LIMIT = 1 << 30
"""Bytes that variables may add to a checkpoint of one rank; more where models and optimizers have more."""
_GRAPH = 64 << 20
"""Bytes of values that belong to a graph."""
_LARGE = 1 << 20
_SMALL = 1 << 16
_DATASET = 64 << 20
"""Bytes of small tensors from which on they count as data."""
_NOTED = 64 << 20
"""Bytes that are copied before an evaluation begins."""
_MANY = 100_000
"""Objects that are looked into before an evaluation. Where there are more, a save waits for its end."""
_AT_START = 300_000
"""Objects that are looked into as a loop begins."""
_HUGE = 1 << 30
"""Bytes of an array that is not read to its end to find out whether it has changed, but in many places."""
_FEW = 64
"""Generators of random numbers whose states are noted at each point."""
_LINES, _LINE = 1 << 16, 64
"""How many, and their bytes."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_STEP = f"{_TORCH}optim/optimizer.py"
"""It holds what ``optimizer.step(closure)`` is about to return."""
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep

Noted = dict[str, Any]


@dataclass(slots=True)
class Variables:
    """The content of the variables of one rank."""

    content: Content = field(default_factory=dict)
    """By name; None: it was too much."""
    shared: list[list[str]] = field(default_factory=list)
    """Names of tensors that lie in the same memory."""
    cut: list[str] = field(default_factory=list)
    """What is left out, in words."""

    def tree(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        rest, stacks = pack(self.content)
        shared = [pack_names(names) for names in self.shared]
        return {"variables": rest, "stacks": stacks, "shared": shared, "cut": self.cut}

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Variables:
        content = unpack(tree["variables"], tree.get("stacks", []))
        return cls(content, [unpack_names(names) for names in tree.get("shared", [])], tree.get("cut", []))


class Frames:
    """Finds what the frames of one thread hold."""

    def __init__(self) -> None:
        self._constant: dict[int, tuple[Any, Any]] = {}
        self._many = False
        self._generators: list[Any] = []
        """Those that the script holds as its loop begins."""
        self._drawn: dict[int, Any] = {}
        """Their states at the last point, by identity."""

    def note_start(self, frame: FrameType | None) -> None:
        """The loop begins: what is there was made without any of its modules, and will be made again.

        Small tensors are saved all the same, since ``x.data`` changes them without a trace, unless there is a whole
        dataset of them."""
        found = Walk(most=_AT_START).frames(_script_frames(frame)).found
        self._generators = [one for one in found.values() if generators.is_generator(one)][:_FEW]
        small = [one for one in found.values() if isinstance(one, torch.Tensor) and one.nbytes <= _LARGE]
        self._note_constants(found, above=0 if sum(one.nbytes for one in small) > _DATASET else _LARGE)

    def note_generators(self) -> None:
        """This is a point: a save in the middle of a step needs what the generators were here."""
        if self._generators:
            self._drawn = {id(one): generators.state_of(one) for one in self._generators}

    def note_constants(self, frame: FrameType | None) -> None:
        """In its first steps: large tensors that are there now, moved to a device say."""
        found = Walk(most=_AT_START).frames(_script_frames(frame)).found
        self._note_constants({name: one for name, one in found.items() if isinstance(one, torch.Tensor)}, above=_LARGE)

    def _note_constants(self, found: Found, *, above: int) -> None:
        for value in found.values():
            if isinstance(value, torch.Tensor) and value.nbytes > above:
                known = self._constant.get(id(value))
                if known is None or known[0]() is not value:
                    self._constant[id(value)] = (weakref.ref(value), value._version)
            elif is_array(value) and value.nbytes > _LARGE:
                self._constant[id(value)] = (weakref.ref(value), _mark(value))

    def _is_constant(self, value: Any) -> bool:
        reference, version = self._constant.get(id(value), (None, None))
        if reference is None or reference() is not value:
            return False
        return bool(version == (value._version if isinstance(value, torch.Tensor) else _mark(value)))

    def note(self, frame: FrameType | None, known: Container[int]) -> Noted | None:
        """What they hold now, for a save that may come later: small things as copies, of large ones that they were.
        None where they hold very much."""
        if self._many:
            return None
        walk = Walk(known, most=_MANY).frames(_script_frames(frame))
        if walk.cut:
            self._many = True
            return None
        noted: Noted = {}
        used = 0
        for name, value in walk.found.items():
            size = getattr(value, "nbytes", 0)
            if isinstance(value, torch.Tensor):
                if self._is_constant(value):
                    continue
                if size <= _SMALL and used + size <= _NOTED:
                    used += size
                    noted[name] = value.detach().clone()
                else:
                    noted[name] = _Unchanged(weakref.ref(value), value._version)
            elif size <= _SMALL and used + size <= _NOTED:
                used += size
                noted[name] = copy.deepcopy(_state_of(value))
            else:
                noted[name] = _Unchanged(weakref.ref(value), None)
        return noted

    def content_of(self, noted: Noted, limit: int = LIMIT) -> Variables:
        """What a checkpoint holds of variables that were noted before."""
        values: dict[str, Any] = {}
        changed = []
        for name, state in noted.items():
            values[name] = state
            if isinstance(state, _Unchanged):
                value = state.reference()
                if is_array(value):  # its content is not known at a glance
                    if self._is_constant(value):
                        del values[name]
                        continue
                    value = None
                values[name] = value if value is not None and value._version == state.version else None
                if values[name] is None:
                    changed.append(_plain(name))
        cut = [f"{_list(changed)} may have changed since the last boundary"] if changed else []
        return _limited(values, limit, cut, lambda value: value.detach() if isinstance(value, torch.Tensor) else value)

    def content(
        self, frame: FrameType | None, known: Container[int], limit: int = LIMIT, *, exact: bool = True
    ) -> Variables:
        """What a checkpoint holds of them. ``exact``: this is a point, not the middle of a step."""
        walk = Walk(known).frames(_script_frames(frame))
        found = {name: value for name, value in walk.found.items() if not self._is_constant(value)}
        if exact:
            return _limited(found, limit, walk.cut)
        drawn = [
            _plain(name) for name, one in found.items() if generators.is_generator(one) and id(one) not in self._drawn
        ]
        cut = [*walk.cut, *([f"{_list(drawn)} may have drawn since the last boundary"] if drawn else [])]
        return _limited(found, limit, cut, self._state_at_point)

    def _state_at_point(self, value: Any) -> Any:
        return self._drawn[id(value)] if id(value) in self._drawn else _state_of(value)

    def put_back(self, frame: FrameType | None, variables: Variables) -> list[str]:
        """Give the variables their content; returns the names of those that are not there, or of another kind."""
        walk = Walk().frames(_script_frames(frame))
        there = {**walk.names, **walk.found}
        together = {name: number for number, names in enumerate(variables.shared) for name in names}
        owners: dict[int, int | str] = {}
        strange = []
        for name, state in variables.content.items():
            value = there.get(name)
            if isinstance(value, torch.Tensor):
                # Answers of a replay may share memory where the real ones did not.
                mine = together.get(name, name)
                if owners.setdefault(address(value), mine) != mine:
                    value.data = value.data.clone()
            if name not in there or not _restore(value, state):
                strange.append(name)
        return strange


@dataclass(frozen=True, slots=True)
class _Unchanged:
    """A large value that was not copied. A tensor can be saved as long as it has this version."""

    reference: weakref.ref[Any]
    version: int | None


def _limited(
    found: Mapping[str, Any], limit: int, cut: list[str], state_of: Callable[[Any], Any] | None = None
) -> Variables:
    """Small things first; None for what is too much."""
    used = graph = left = 0
    variables = Variables(cut=list(cut))
    out: list[str] = []
    places: dict[int, list[str]] = {}
    for name, value in sorted(found.items(), key=lambda item: getattr(item[1], "nbytes", 0)):
        size = getattr(value, "nbytes", 0)
        variables.content[name] = None
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            graph += size
            if graph > _GRAPH:
                continue
        elif used + size > limit:
            left += size
            out.append(_plain(name))
            continue
        used += size
        if isinstance(value, torch.Tensor):
            places.setdefault(address(value), []).append(name)
        variables.content[name] = None if value is None else (state_of or _state_of)(value)
    variables.shared = [names for names in places.values() if len(names) > 1]
    if out:
        variables.cut.append(
            f"{_list(out)}, {left / 2**20:.0f} MiB, found no room: a checkpoint holds up to {limit / 2**20:.0f} MiB of "
            f"variables"
        )
    return variables


def _plain(name: str) -> str:
    """A name as in the script: ``train: memory[3]``."""
    return name.split(" ", 1)[1].replace(" ", ": ")


def _list(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _mark(array: Any) -> int | None:
    """A number that is another once an array has changed."""
    if not array.flags.writeable:
        return None
    flat = array.reshape(-1).view("u1")  # a copy where it is not contiguous
    if flat.nbytes > _HUGE:
        pitch = flat.nbytes // _LINES
        flat = flat[: pitch * _LINES].reshape(_LINES, pitch)[:, :_LINE].copy().reshape(-1)
    return zlib.crc32(flat)


def _script_frames(frame: FrameType | None) -> list[FrameType]:
    """From the outermost, without those of torch, but for an optimizer's step, and of holdfast; up to Ray, which calls
    a script's function and holds a great deal that is not the script's."""
    ray = sys.modules.get("ray")
    end = os.path.dirname(ray.__file__) + os.sep if ray is not None and ray.__file__ else None
    frames: list[FrameType] = []
    while frame is not None:
        name = frame.f_code.co_filename
        if end is not None and name.startswith(end):
            break
        if name == _STEP or not name.startswith((_TORCH, _OURS)):
            frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return value if is_array(value) else generators.state_of(value)


def _restore(value: Any, state: Any) -> bool:
    if state is None:
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            value.detach().fill_(float("nan"))
            return True
        return False
    if isinstance(value, torch.Tensor):
        return _restore_tensor(value, state)
    if is_array(value):
        if not is_array(state) or (state.shape, state.dtype) != (value.shape, value.dtype):
            return False
        if not value.flags.writeable:
            return False
        value[...] = state
    else:
        generators.restore(value, state)
    return True


def _restore_tensor(tensor: torch.Tensor, state: Any) -> bool:
    if not isinstance(state, torch.Tensor) or state.dtype != tensor.dtype:
        return False
    if state.shape == tensor.shape and 0 not in tensor.stride():
        tensor.data.copy_(state)
    else:
        tensor.data = state.to(tensor.device)  # the last batch of a pass, say, which is smaller
    return True
