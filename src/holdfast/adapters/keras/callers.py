"""The caller of ``fit``: the values of the variables that tell one call from the next.

These are the parameters of the functions on the way to it, the variables of the loops around it, what is counted up,
and what a ``while`` loop has set for this turn: numbers, texts, and small collections of them. What is another value at
each start, such as a date or a random name, is taken out.
"""

from __future__ import annotations

import argparse
import dataclasses
import dis
import functools
import os
import re
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from holdfast.adapters.keras import callbacks as keras_callbacks
from holdfast.base.dated import masked

OF_THE_START = frozenset({"initial_epoch", "seed"})
"""Names whose values may depend on what the attempt before has left, or on the clock."""
_PATHS = ("filepath", "log_dir", "filename", "backup_dir")
_FRAMES = 30
_NODES = 50
_LONGEST = 200
_DAY_S = 86_400
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_DEREF")
_RANDOM_NAME = re.compile(
    r"0x[0-9a-f]+|\btmp[a-z0-9_]{8}\b|[0-9a-f]{8}-?[0-9a-f]{4}-?4[0-9a-f]{3}-?[89ab][0-9a-f]{3}-?[0-9a-f]{12}"
)
"""An address, a name of ``tempfile``, a UUID."""


class _Nothing:
    """Not a plain value."""


_NOTHING = _Nothing()


def described(
    frame: types.FrameType | None, arguments: Mapping[str, Any], *, is_frameworks: Callable[[str], bool]
) -> dict[str, Any]:
    """Plain values by name, with the files that callbacks write and the seed that the script has set.

    ``frame``: where ``fit`` is called. ``is_frameworks``: whether a module is none of the script's.
    """
    found: dict[str, Any] = {"initial_epoch": arguments.get("initial_epoch"), "seed": _seed()}
    for callback in keras_callbacks.flatten(arguments.get("callbacks")):
        for name in _PATHS:
            if name in getattr(callback, "__dict__", {}):
                found[f"{type(callback).__name__}.{name}"] = _steady(str(vars(callback)[name]))
    for name, value in _variables_of(frame, is_frameworks):
        # More epochs than before are no other call.
        if not ("epoch" in name.lower() and value == arguments.get("epochs")):
            found.setdefault(name, value)
    return found


def _seed() -> Any:
    """The last seed that ``set_random_seed`` was called with."""
    keras: Any = sys.modules.get("keras.src.utils.rng_utils")
    seed = keras.get_random_seed() if hasattr(keras, "get_random_seed") else None
    tensorflow: Any = sys.modules.get("tensorflow.python.eager.context")
    return tensorflow.global_seed() if seed is None and tensorflow is not None else seed


def _variables_of(frame: types.FrameType | None, is_frameworks: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    for _ in range(_FRAMES):
        if frame is None:
            return
        code, at = frame.f_code, frame.f_lasti
        if not is_frameworks(str(frame.f_globals.get("__name__"))):
            names, values = _names_in(code), frame.f_locals
            around = [loop for loop in names.loops if loop.first <= at <= loop.last]
            targets = {name for loop in around for name in loop.targets}
            turn = [name for loop in around for offset, name in loop.stores if offset < at]
            for name in dict.fromkeys((*sorted(targets), *names.counters, *turn, *names.parameters)):
                # The numbers in a collection that is handed over may be the results of earlier calls, or durations.
                value = _plain(values.get(name, _NOTHING), floats=name in targets)
                if value is not _NOTHING:
                    yield f"{name} in {code.co_name}", value
        if code.co_name == "<module>":
            return
        frame = frame.f_back


# ---------------------------------------------------------------------- values


def _plain(value: Any, *, floats: bool, inside: bool = False) -> Any:
    """``value`` as JSON writes it, if it is small."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        return None if inside else _NOTHING
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return "a time" if abs(value - time.time()) < _DAY_S else value
    if isinstance(value, float):
        return value if floats else _NOTHING
    if isinstance(value, str):
        return _steady(value) if len(value) <= _LONGEST else _NOTHING
    if isinstance(value, argparse.Namespace | types.SimpleNamespace) or _is_record(value):
        value = dict(vars(value))
    if isinstance(value, dict) and len(value) <= _NODES:
        items = {str(key): _plain(one, floats=floats, inside=True) for key, one in value.items()}
        return {key: one for key, one in items.items() if one is not _NOTHING} or _NOTHING
    if isinstance(value, tuple) and len(value) <= _NODES:
        items_of = [_plain(one, floats=floats, inside=True) for one in value]
        return [one for one in items_of if one is not _NOTHING] or _NOTHING
    return _NOTHING


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")


def _steady(text: str) -> str:
    """Without what another start writes otherwise."""
    text = _RANDOM_NAME.sub("", text)
    return (masked(text) or text) if any(letter.isdigit() for letter in text) else text


# ---------------------------------------------------------------------- names


class _Loop(NamedTuple):
    """A loop in a function, by its first and last instruction."""

    first: int
    last: int
    targets: frozenset[str]
    """The variables of a ``for``."""
    stores: tuple[tuple[int, str], ...]
    """The places in the function where the names are set that a ``while`` sets."""


class _Names(NamedTuple):
    """The names of a function that may tell one pass through it from another."""

    parameters: tuple[str, ...]
    counters: tuple[str, ...]
    """The names that statements such as ``i += 1`` change."""
    loops: tuple[_Loop, ...]


@functools.lru_cache(maxsize=256)
def _names_in(code: types.CodeType) -> _Names:
    steps = list(dis.get_instructions(code))
    kinds = {step.offset: step.opname for step in steps}
    targets: dict[int, set[str]] = {}
    counters: list[str] = []
    stores: list[tuple[int, str]] = []
    for_loop, in_count = -1, False
    for step in steps:
        if step.opname.startswith(_STORES):
            names = step.argval if isinstance(step.argval, tuple) else (str(step.argval),)
            stores += [(step.offset, name) for name in names]
            if for_loop >= 0:
                targets[for_loop].update(names)
            counters += names if in_count else ()
            in_count = False
            continue
        in_count = step.opname == "BINARY_OP" and step.argrepr.endswith("=")
        if step.opname == "FOR_ITER":
            for_loop = step.offset
            targets[for_loop] = set()
        elif not step.opname.startswith("UNPACK_"):
            for_loop = -1
    loops = []
    for step in steps:
        if step.opname == "FOR_ITER":
            loops.append(_Loop(step.offset, step.argval, frozenset(targets[step.offset]), ()))
        elif step.opcode in dis.hasjrel and step.argval < step.offset and kinds.get(step.argval) != "FOR_ITER":
            first, last = step.argval, step.offset
            inside = {name for offset, name in stores if first <= offset <= last}
            loops.append(_Loop(first, last, frozenset(), tuple(store for store in stores if store[1] in inside)))
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return _Names(parameters, tuple(counters), tuple(loops))
