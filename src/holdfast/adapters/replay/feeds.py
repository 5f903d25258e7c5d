"""The state that datasets, samplers and collate functions keep for themselves: counts, and generators they draw from.

A replay asks a dataset for a sample only, and a sampler for nothing, so what they count and draw does not come out
right by itself. It is noted at each point and as each pass begins, and put back on arrival: as the pass began, before
it is continued, since its order is drawn again; then as it was at the point.

Only what works in the script's own process is looked at: samplers, and datasets and collate functions of loaders
without workers. A worker's state is the worker's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Container, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from holdfast.adapters.replay.walk import _is_open
from holdfast.torch import generators
from holdfast.torch.data.stateful import is_stateful_dataloader

_MOST = 1000
"""Objects of one loader that are looked into."""
_LONG = 64
"""Items from which on a container is data."""
_PLAIN = (bool, int, float, str, type(None))
_ABSENT = object()
_CLOSED = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, DataLoader, type)

State = dict[str, dict[str, Any]]
"""By the name of an object: its attributes that have changed since it was found, and the states of its generators."""


class Feeds:
    """Finds the objects that feed the loaders of a script, and notes what they keep."""

    def __init__(self) -> None:
        self._loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._found: dict[str, weakref.ref[Any]] = {}
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """Of the same, by identity."""
        self._first: State = {}
        """What they held when they were found."""
        self._starts: dict[int, State] = {}
        """What they held as a pass began, by its number."""
        self._now: State = {}

    def begin_pass(self, loader: Any, number: int, open_now: Container[int]) -> None:
        """A pass over ``loader`` begins. ``number``: of the pass, the same in a replay. ``open_now``: of those that are
        not over."""
        if loader not in self._loaders and isinstance(loader, DataLoader) and not is_stateful_dataloader(loader):
            self._loaders.add(loader)
            self._find(loader, number)
        if self._found:
            self._starts = {one: state for one, state in self._starts.items() if one in open_now}
            self._starts[number] = self._state()

    def _find(self, loader: Any, number: int) -> None:
        for path, one in _feeding(loader):
            if self._known.get(id(one)) is one:
                continue
            try:
                name = f"{number} {path}"
                self._found[name] = weakref.ref(one)
            except TypeError:
                continue
            self._known[id(one)] = one
            self._first[name] = _held_by(one)

    def note(self) -> None:
        """This is a point."""
        if self._found:
            self._now = self._state()

    def _state(self) -> State:
        state: State = {}
        for name, reference in [*self._found.items()]:
            one = reference()
            if one is None:
                del self._found[name], self._first[name]
                continue
            first = self._first[name]
            held = _held_by(one).items()
            state[name] = {
                key: value for key, value in held if type(value) not in _PLAIN or first.get(key, _ABSENT) != value
            }
        return {name: changed for name, changed in state.items() if changed}

    @property
    def changed(self) -> bool:
        """Whether anything was kept at the last point."""
        return bool(self._now)

    # ------------------------------------------------------------------ a checkpoint, and a resume

    def tree(self, going_on: Container[int]) -> dict[str, Any]:
        """As a checkpoint holds it. ``going_on``: numbers of the passes that it continues."""
        starts = {str(number): state for number, state in self._starts.items() if number in going_on}
        return {"now": self._now, "starts": starts}

    def put_start(self, saved: Mapping[str, Any], number: int) -> None:
        """Be as this pass began, which is about to be continued."""
        self._put(saved.get("starts", {}).get(str(number)))

    def put_now(self, saved: Mapping[str, Any]) -> None:
        """Be as at the point."""
        self._starts |= {int(number): state for number, state in saved.get("starts", {}).items()}
        self._put(saved.get("now"))

    def _put(self, state: State | None) -> None:
        if state is None:
            return
        for name, reference in self._found.items():
            one = reference()
            if one is None:
                continue
            attributes = vars(one)
            for key, value in {**self._first[name], **state.get(name, {})}.items():
                there = attributes.get(key)
                if generators.is_generator(there):
                    generators.restore(there, value)
                elif type(value) in _PLAIN and (type(there) in _PLAIN or key in state.get(name, {})):
                    attributes[key] = value


def _held_by(one: Any) -> dict[str, Any]:
    held: dict[str, Any] = {}
    for key, value in vars(one).items():
        if type(value) in _PLAIN:
            held[key] = value
        elif generators.is_generator(value):
            held[key] = generators.state_of(value)
    return held


def _feeding(loader: Any) -> Iterator[tuple[str, Any]]:
    """The objects that feed a loader, each with its path, but for torch's own, which a position describes."""
    here = ("dataset", "collate_fn") if loader.num_workers == 0 else ()
    waiting = [(name, getattr(loader, name, None)) for name in ("sampler", "batch_sampler", *here)]
    visited: set[int] = set()
    while waiting and len(visited) < _MOST:
        path, value = waiting.pop(0)
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, list | tuple | dict):
            if len(value) <= _LONG:
                items = value.items() if isinstance(value, dict) else enumerate(value)
                waiting += [(f"{path}[{key}]", item) for key, item in items]
        elif isinstance(value, MethodType):
            waiting.append((f"{path}.__self__", value.__self__))
        elif isinstance(value, functools.partial):
            waiting += [(f"{path}.func", value.func), (f"{path}.args", value.args)]
        elif hasattr(value, "__dict__") and not isinstance(value, _CLOSED):
            own = _is_open(type(value))
            if own:
                yield path, value
            if own or isinstance(value, Dataset | Sampler | BatchSampler):
                waiting += [(f"{path}.{key}", item) for key, item in vars(value).items()]
