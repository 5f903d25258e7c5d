"""What callbacks remember: the patience of an early stop, a best value, the history, a counter of the user's own.

Their attributes are saved as far as they are plain values, arrays and generators of random numbers, and put back into
the callbacks that the script makes anew. What cannot be saved that way and looks as if it could change is named,
so that somebody can be told.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from holdfast.adapters.keras import generators
from holdfast.adapters.keras.images import encode
from holdfast.errors import StateError

_OF_THE_LOOP = frozenset({"model", "_model", "params", "validation_data", "_supports_tf_logs", "_chief_worker_only"})
_MADE_BY_KERAS = frozenset({"History", "ProgbarLogger"})
_OF_THE_FILE = frozenset({"append_header"})
"""What a ``CSVLogger`` knows of the file that it found at the beginning."""
_KNOWN = frozenset({"keras", "tf_keras", "keras_tuner", "tensorflow", "ray", "holdfast"})
"""Modules of callbacks of which everything that changes is saved."""
_ONLY_READ = frozenset(
    {"BackupAndRestore", "CSVLogger", "History", "ModelCheckpoint", "ProgbarLogger", "RemoteMonitor", "TensorBoard"}
)
"""Callbacks of the framework that leave the weights as they are when an epoch ends."""
_CONSTANT = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type, np.ufunc)


def flatten(callbacks: Any) -> list[Any]:
    """The callbacks in what a script hands to ``fit``: none, one, or lists of them."""
    if callbacks is None:
        return []
    if isinstance(callbacks, list | tuple):
        return [one for item in callbacks for one in flatten(item)]
    inner = getattr(callbacks, "callbacks", None)
    if isinstance(inner, list):
        return flatten(inner)
    return [callbacks]


def capture(callbacks: Iterable[Any]) -> list[dict[str, Any]]:
    """The attributes of each callback. Lists and dicts are copied, arrays are not: nobody changes them in place."""
    return [
        {
            "class": _name(callback),
            "attributes": _attributes(callback),
            "functions": _functions(callback),
            "generators": _generators(callback),
        }
        for callback in callbacks
    ]


def restore(callbacks: Sequence[Any], saved: Sequence[dict[str, Any]]) -> list[str]:
    """Put attributes back; returns what did not fit, in words."""
    problems = []
    were = sorted({state["class"] for state in saved} - _MADE_BY_KERAS)
    now = sorted({_name(callback) for callback in callbacks} - _MADE_BY_KERAS)
    if were != now:
        problems.append(f"the callbacks were {were} and are {now}: those that are there still remember what they did")
    left = list(saved)
    for callback in callbacks:
        state = next((state for state in left if state["class"] == _name(callback)), None)
        if state is None:
            continue
        left.remove(state)
        for name, value in state["attributes"].items():
            if name not in _kept_out(callback):
                _put_back(callback, name, value)
        for name, value in state["functions"].items():
            setattr(callback, name, _function(value))
        for name, value in state.get("generators", {}).items():
            generators.restore(vars(callback).get(name), value)
    return problems


def unsaved(callbacks: Iterable[Any]) -> list[str]:
    """Attributes of the user's own callbacks that are not saved and may well change, as ``Class.attribute``."""
    found = []
    for callback in callbacks:
        if _is_known(callback):
            continue
        known = _attributes(callback).keys() | _generators(callback).keys()
        for name, value in vars(callback).items():
            if name not in known and name not in _OF_THE_LOOP and _may_change(value):
                found.append(f"{type(callback).__name__}.{name} ({type(value).__name__})")
    return found


def change_weights(callbacks: Iterable[Any]) -> bool:
    """True if one of them may change weights or rates between an epoch's last batch and the first of the next."""
    return any(not _is_known(one) or type(one).__name__ not in _ONLY_READ for one in callbacks)


def keep_files(callbacks: Iterable[Any]) -> None:
    """A log that the interrupted attempt has written is continued, not begun anew."""
    for callback in callbacks:
        if type(callback).__name__ == "CSVLogger" and getattr(callback, "append", None) is False:
            callback.append = True


def _is_known(callback: Any) -> bool:
    return type(callback).__module__.split(".")[0] in _KNOWN


def _name(callback: Any) -> str:
    return type(callback).__qualname__


def _attributes(callback: Any) -> dict[str, Any]:
    if type(callback).__name__ == "ProgbarLogger":  # what it shows is made anew
        return {}
    attributes = {}
    for name, value in vars(callback).items():
        if name in _kept_out(callback):
            continue
        try:
            encode(value, name, {})
        except (StateError, TypeError, ValueError, RecursionError):
            continue
        attributes[name] = _copy(value)
    return attributes


def _kept_out(callback: Any) -> frozenset[str]:
    return _OF_THE_LOOP | _OF_THE_FILE if type(callback).__name__ == "CSVLogger" else _OF_THE_LOOP


def _generators(callback: Any) -> dict[str, Any]:
    """The states of attributes that are generators of random numbers."""
    states = {name: generators.capture(value) for name, value in vars(callback).items()}
    return {name: state for name, state in states.items() if state is not None}


def _functions(callback: Any) -> dict[str, str]:
    """Attributes that are functions of the framework, such as the comparison that a monitor has chosen, by name."""
    found = {}
    for name, value in vars(callback).items():
        if isinstance(value, types.FunctionType | np.ufunc):
            path = f"{getattr(value, '__module__', None) or 'numpy'}:{value.__name__}"
            if _function(path) is value:
                found[name] = path
    return found


def _function(path: str) -> Any:
    """A function of Keras or NumPy that is there already. Nothing is imported, and nothing else is looked up."""
    module, _, name = path.partition(":")
    if module.split(".")[0] not in ("keras", "tf_keras", "numpy"):
        return None
    return getattr(sys.modules.get(module), name, None)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value.copy() if isinstance(value, set | bytearray) else value


def _put_back(callback: Any, name: str, value: Any) -> None:
    """Into the same list or dict, if there is one: the script may hold it too."""
    current = vars(callback).get(name)
    value = _own(value)
    if type(current) is list and type(value) is list:
        current[:] = value
    elif type(current) is dict and type(value) is dict:
        current.clear()
        current.update(value)
    else:
        setattr(callback, name, value)


def _own(value: Any) -> Any:
    """Arrays of its own instead of views of a file in memory."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_own(item) for item in value)
    return value


def _may_change(value: Any) -> bool:
    if isinstance(value, _CONSTANT) or callable(value):
        return False
    return not type(value).__module__.startswith(("keras.", "tf_keras.", "tensorflow.", "_io", "logging", "threading"))
