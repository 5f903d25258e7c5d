"""A disk under the local backend that loses power: between two system calls, and what was not synced with it."""

from __future__ import annotations

import contextlib
import os
import random
import stat
from collections.abc import Iterator
from typing import Any

from holdfast.testing import Power


class CrashingOs:
    """The module ``os``, with a power supply: each call that changes the disk may be the last."""

    CHANGES = frozenset(
        ("open", "write", "fsync", "unlink", "rename", "link", "mkdir", "makedirs", "rmdir", "ftruncate", "pwrite")
    )

    def __init__(self, power: Power) -> None:
        self._power = power

    @contextlib.contextmanager
    def scandir(self, path: str) -> Iterator[list[os.DirEntry[str]]]:
        """In an order in which the manifest is neither first nor last."""
        with os.scandir(path) as entries:
            yield sorted(entries, key=lambda entry: entry.name)

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        if name not in self.CHANGES:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            self._power.use()
            return function(*args, **kwargs)

        return call


class CrashingShutil:
    """``shutil.rmtree`` one entry at a time: it works on the real ``os``, which does not fail here."""

    def __init__(self, power: Power) -> None:
        self._power = power

    def rmtree(self, path: str, ignore_errors: bool = False) -> None:
        for parent, folders, files in os.walk(path, topdown=False):
            for name in files:
                self._power.use()
                os.unlink(os.path.join(parent, name))
            for name in folders:
                self._power.use()
                os.rmdir(os.path.join(parent, name))
        if os.path.isdir(path):
            self._power.use()
            os.rmdir(path)


class VolatileDisk(CrashingOs):
    """A disk that keeps for sure only what was synced: a folder's entries, and a file's bytes, each at its fsync.

    Whatever happened after that is there or not, one by one, as chance has it.
    """

    def __init__(self, power: Power, root: str) -> None:
        super().__init__(power)
        self._root = root
        self._entries: dict[int, dict[str, int]] = {}
        self._bytes: dict[int, bytes] = {}
        self._held: dict[int, int] = {}
        self._sync_folder(root)

    def fsync(self, fd: int) -> None:
        self._power.use()
        path = os.readlink(f"/proc/self/fd/{fd}")
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            self._sync_folder(path)
        else:
            self._bytes[self._hold(path)] = self._read(self._hold(path))

    def _hold(self, path: str) -> int:
        """The number of a file; it is held so that the number is not given to another one."""
        number = os.stat(path).st_ino
        if number not in self._held:
            self._held[number] = os.open(path, os.O_PATH)
        return number

    def _read(self, number: int) -> bytes:
        with open(f"/proc/self/fd/{self._held[number]}", "rb") as file:
            return file.read()

    def _now(self, path: str) -> dict[str, int]:
        return {name: self._hold(os.path.join(path, name)) for name in os.listdir(path)}

    def _sync_folder(self, path: str) -> None:
        self._entries[self._hold(path)] = self._now(path)

    def after_a_power_cut(self, target: str, chance: random.Random) -> None:
        """What the next boot finds."""
        self._rebuild(self._hold(self._root), self._root, target, chance)
        for fd in self._held.values():
            os.close(fd)

    def _rebuild(self, number: int, path: str | None, target: str, chance: random.Random) -> None:
        os.mkdir(target)
        synced = self._entries.get(number, {})
        now = self._now(path) if path is not None else {}
        for name in sorted({*synced, *now}):
            child = chance.choice([synced.get(name), now.get(name)])
            if child is None:
                continue
            place = os.path.join(target, name)
            if stat.S_ISDIR(os.fstat(self._held[child]).st_mode):
                still = os.path.join(path, name) if path is not None and now.get(name) == child else None
                self._rebuild(child, still, place, chance)
            else:
                with open(place, "wb") as file:
                    file.write(self._content(child, chance))

    def _content(self, number: int, chance: random.Random) -> bytes:
        now = self._read(number)
        if number in self._bytes:
            return chance.choice([now, self._bytes[number]])
        return chance.choice([now, b"", bytes(len(now))])
