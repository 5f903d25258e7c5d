"""The record of what a script's files were before its run changed them.

A replay runs the script again from its first line, while the files are those of the last attempt: a snapshot that the
script loads where one exists would be there from the start. So the first change of each file is noted in the home of
the run, in one short line before it is made. A file that the script had read before its loop, and that it replaces, is
kept there too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.base.private_folders import is_unshared
from holdfast.base.small_files import read_small

log = logging.getLogger("holdfast")

PREFIX = "files-"
"""Of the histories in the home of a run: one for each rank or process."""
_MOST_READ = 50_000
"""Files read before the loop that are remembered."""
_LARGEST = 256 << 20
"""Bytes of a history that is read."""
_COPIED_BYTES = 64 << 20
"""A larger file that is about to be overwritten is moved away instead of copied."""


@dataclass(slots=True)
class Before:
    """One path as the run began."""

    absent: bool
    size: int = 0
    appended: bool = False
    """The run has only added to it: it was its first ``size`` bytes."""
    kept: str = ""
    """Path of what it was; empty where nothing is kept, since the script had not read it."""
    in_loop: bool = False
    """It was changed first after the loop had begun."""


class FileHistory:
    """First changes, in memory until the loop begins, and in a file of the home folder from then on."""

    def __init__(self, path: str) -> None:
        """``path``: the file; empty: none, everything stays in memory."""
        self.path = path
        self.changes: dict[str, Before] = {}
        self.saves = False
        """Whether a checkpoint was begun that a replay may start from."""
        self.over = False
        """Whether the run is complete."""
        self._read: set[str] = set()
        self._begun = False
        self._keeps = False
        """What was kept is this user's: the script will take it for a file of its own, and may unpickle it."""
        self._file = -1

    # ------------------------------------------------------------------ an earlier attempt

    def recall(self) -> None:
        """Read what earlier attempts have noted. A line that is torn or odd says nothing."""
        self._keeps = is_unshared(self._keeper())
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for line in read_small(self.path, _LARGEST).decode("utf-8").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    self._recall(json.loads(line))

    def _recall(self, line: Mapping[str, Any]) -> None:
        self.saves = self.saves or bool(line.get("saves"))
        self.over = self.over or bool(line.get("over"))
        path = line.get("path")
        if not isinstance(path, str):
            return
        if line.get("rewritten"):
            self.changes[path].appended = False
            return
        kept = str(line.get("kept", ""))
        self.changes[path] = Before(
            absent=bool(line["absent"]),
            size=int(line.get("size", 0)),
            appended=bool(line.get("appended")),
            kept=os.path.join(self._keeper(), kept) if self._keeps and re.fullmatch(r"\d+", kept) else "",
            in_loop=bool(line.get("in_loop")),
        )

    def of_other_ranks(self) -> dict[str, Before]:
        """What other ranks of the run have changed first after the loop had begun."""
        folder, name = os.path.split(self.path)
        found: dict[str, Before] = {}
        if not re.fullmatch(rf"{PREFIX}\d+", name):
            return found
        with contextlib.suppress(OSError):
            for other in sorted(os.listdir(folder)):
                if other != name and re.fullmatch(rf"{PREFIX}\d+", other):
                    history = FileHistory(os.path.join(folder, other))
                    history.recall()
                    self.saves = self.saves or history.saves
                    found |= {path: one for path, one in history.changes.items() if one.in_loop}
        return found

    # ------------------------------------------------------------------ this attempt

    def note_read(self, path: Any) -> None:
        """The script opens a file before its loop."""
        if not self._begun and len(self._read) < _MOST_READ and isinstance(path, str | os.PathLike):
            self._read.add(os.path.abspath(path))

    def note_change(self, path: str, *, append: bool = False) -> None:
        """The script is about to change, create or remove ``path``, which is absolute."""
        before = self.changes.get(path)
        if before is not None:
            if before.appended and not append:
                before.appended = False
                self._write({"path": path, "rewritten": True})
            return
        try:
            found = os.lstat(path)
        except OSError:
            before = Before(absent=True, in_loop=self._begun)
        else:
            before = Before(absent=False, size=found.st_size, in_loop=self._begun)
            before.appended = append and stat.S_ISREG(found.st_mode)
            if stat.S_ISREG(found.st_mode) and not append and path in self._read:
                before.kept = self._keep(path, found)
        self.changes[path] = before
        self._write(_line(path, before))

    def _keep(self, path: str, found: os.stat_result) -> str:
        """Copy or move a file to the home folder; returns where it is, or nothing."""
        if not self.path:
            return ""
        try:
            os.makedirs(self._keeper(), mode=0o700, exist_ok=True)
            if not is_unshared(self._keeper()):
                return ""
            kept = os.path.join(self._keeper(), str(len(os.listdir(self._keeper()))))
            if found.st_size <= _COPIED_BYTES:
                shutil.copyfile(path, kept)
            elif found.st_nlink > 1:
                return ""  # other names must see what is written to it
            else:
                os.rename(path, kept)
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT, stat.S_IMODE(found.st_mode)))
        except OSError as error:
            log.debug("%s, which the script replaces, is not kept: %s", path, error)
            return ""
        return kept

    def _keeper(self) -> str:
        return f"{self.path}.kept"

    def begin(self, *, anew: bool) -> None:
        """The loop begins. ``anew``: it is the first attempt, and what earlier runs have left is forgotten."""
        self._begun = True
        self._read.clear()
        if not self.path:
            return
        with contextlib.suppress(OSError):  # then a replay sees the files as they are
            if anew:
                kept = {one.kept for one in self.changes.values()}
                if not any(kept):
                    shutil.rmtree(self._keeper(), ignore_errors=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND | (os.O_TRUNC if anew else 0)
            self._file = os.open(self.path, flags, 0o600)
            for path, before in self.changes.items() if anew else ():
                self._write(_line(path, before))

    def note_save(self) -> None:
        """A checkpoint of this run is on its way."""
        if not self.saves:
            self.saves = True
            self._write({"saves": True})

    def note_end(self) -> None:
        """The run is complete."""
        self._write({"over": True})

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.write(self._file, json.dumps(line).encode() + b"\n")


def _line(path: str, before: Before) -> dict[str, Any]:
    line: dict[str, Any] = {"path": path, "absent": before.absent}
    line |= {"size": before.size, "appended": True} if before.appended else {}
    line |= {"kept": os.path.basename(before.kept)} if before.kept else {}
    return line | ({"in_loop": True} if before.in_loop else {})
