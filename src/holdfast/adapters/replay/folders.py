"""Output folders that a followed script names by the clock.

A replay finds the script with a folder of its own: what the first attempt wrote, its best model say, is in another one.
So a checkpoint holds the dated folders that the variables of the script named when its loop began. At a resume, those
that it names now become links to them.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from holdfast.adapters.replay.frames import _script_frames
from holdfast.base.dated import dated_root, masked
from holdfast.runtime.unfinished import link

log = logging.getLogger("holdfast")

_WORKING = "."
"""In place of a variable's name: the working folder."""
_MOST = 1_000
"""Variables of one function, or entries of one of them, that are looked at."""


def dated_folders() -> dict[str, list[str]]:
    """By variable of the calling script: a path with the time in it, and the same without."""
    found: dict[str, list[str]] = {}
    for name, path in _paths():
        path = os.path.abspath(path)
        root = dated_root(path) if name not in found else None
        if root is not None and os.path.isdir(root) and (mask := masked(root)) is not None:
            found[name] = [root, mask]
    return found


def link_to(saved: Mapping[str, list[str]]) -> list[str]:
    """Make the folders that the script has named now links to those of its first attempt; returns those."""
    done: dict[str, str] = {}
    for name, (root, mask) in dated_folders().items():
        first, first_mask = saved.get(name, ("", ""))
        if first_mask != mask or first == root or root in done or not os.path.isdir(first):
            continue
        if os.path.realpath(first) == os.path.realpath(root):
            continue
        done[root] = first
        linked = link(root, first)
        log.warning(
            "the first attempt of this run wrote to %s, and this one has named %s by the clock: %s. A fixed folder "
            "needs no link",
            first,
            root,
            "the latter is a link to the former" if linked else "what the latter lacks is linked into it",
        )
    return [*done.values()]


def _paths() -> Iterator[tuple[str, str]]:
    try:
        yield _WORKING, os.getcwd()
    except OSError:  # it has been removed
        return
    for frame in _script_frames(sys._getframe(1)):
        scope = frame.f_code.co_qualname
        for name, value in list(frame.f_locals.items())[:_MOST]:
            for inner, path in _within(value):
                yield f"{scope}:{name}{inner}", path


def _within(value: Any) -> Iterator[tuple[str, str]]:
    if (path := _as_path(value)) is not None:
        yield "", path
        return
    try:
        inner = value if type(value) is dict else object.__getattribute__(value, "__dict__")
    except AttributeError:
        return
    if type(inner) is dict and len(inner) <= _MOST and not isinstance(value, type | ModuleType):
        for name, entry in list(inner.items()):
            if isinstance(name, str) and (path := _as_path(entry)) is not None:
                yield f".{name}", path


def _as_path(value: Any) -> str | None:
    path = value
    if isinstance(value, os.PathLike):
        try:
            path = os.fspath(value)
        except Exception:  # one of Ray's checkpoints, say, refuses to be taken for a path
            return None
    return path if isinstance(path, str) and 5 < len(path) < 1000 and "\n" not in path and "://" not in path else None
