"""The random numbers that a script begins with, and what it loads before its loop.

A replay runs the script again from its first line, and takes for granted that it comes to its loop as before. A
script that does not seed torch, ``random`` and NumPy begins with other numbers each time, and may divide its data
otherwise; so the state that the first attempt began with is left in the run's home folder, and every later attempt
begins with it. So does a script whose processes train, with what it hands down to them. A script that goes on from a
checkpoint of its own cannot be replayed at all, and must be told so.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any

import torch

from holdfast.adapters.replay.file_history import PREFIX
from holdfast.base.run_directory import ATTEMPT
from holdfast.config import Settings
from holdfast.torch import rng
from holdfast.torch.state import read_tree, write_tree

_OF_A_PROCESS = ("python", "numpy", "torch")
"""Generators that begin with other numbers in each process."""


class Birth:
    """How the script of this process begins."""

    def __init__(self, settings: Settings, path: str, loads: Sequence[str] = ()) -> None:
        """``path``: the file of the state, in the run's home folder. ``loads``: files that its parent had loaded."""
        self._path, self._home = path, os.path.dirname(path)
        self.loads = list(loads)
        """Files of weights that were loaded before the loop began, by name."""
        self.again = False
        """Whether an earlier attempt has begun with the same random numbers."""
        self.state = _of_a_process(rng.capture())
        if path and settings.resumes_from(self._last_run()):
            with contextlib.suppress(OSError, ValueError, KeyError):
                with open(self._path, "rb") as file:
                    self.state = read_tree(bytearray(file.read()))
                rng.restore({**rng.capture(), **self.state})
                self.again = True
        self.seed = torch.initial_seed()
        """What torch has drawn where the script does not seed it."""

    def _last_run(self) -> str | None:
        try:
            with open(os.path.join(self._home, ATTEMPT), encoding="utf-8") as file:
                return str(json.load(file)["run"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def history(self) -> str:
        """The file in which the script's changes of files are noted; empty: it is not known yet."""
        folder, name = os.path.split(self._path)
        return os.path.join(folder, name.replace("birth-", PREFIX, 1)) if name else ""

    def leave(self) -> None:
        """This is the first attempt: later ones begin like this."""
        leave_state(self._path, self.encoded())

    def encoded(self) -> bytes:
        return write_tree(self.state)

    def note_load(self, file: Any) -> None:
        self.loads.append(os.path.basename(os.fspath(file)) if isinstance(file, str | os.PathLike) else "a stream")

    def content(self, start: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds of it. ``start``: the random state as the loop began."""
        drew = [kind for kind, state in self.state.items() if not _same(state, start.get(kind))]
        return {"loads": list(self.loads), "state": self.state, "drew": drew}

    def differences(self, saved: dict[str, Any], start: dict[str, Any]) -> list[str]:
        """Which generators the script drew from before its loop without seeding them, and with another outcome.

        ``start``: the random state as the loop began, the first time. It begins now.
        """
        now = rng.capture()
        different = [kind for kind in saved["drew"] if not _same(self.state.get(kind), saved["state"].get(kind))]
        return [kind for kind in different if not _same(now.get(kind), start.get(kind))]


def leave_state(path: str, state: bytes) -> None:
    """Write the file of a :class:`Birth`."""
    with contextlib.suppress(OSError):  # then later attempts are only told that it was otherwise
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.{os.getpid()}.tmp"
        with open(temporary, "wb") as file:
            file.write(state)
        os.replace(temporary, path)


def _of_a_process(state: dict[str, Any]) -> dict[str, Any]:
    return {kind: state[kind] for kind in _OF_A_PROCESS if kind in state}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return bool(torch.equal(one, other))
    return bool(one == other)
