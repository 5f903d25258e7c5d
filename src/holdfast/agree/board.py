"""A small board that all ranks of a job can write on: in one process, or in a folder they share.

:mod:`holdfast.agree.torch_board` puts the same board on the job's own key-value store.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod

from holdfast.base.claims import CLAIM, name_first
from holdfast.base.small_files import read_small

_LARGEST = 64 << 20
_NAMED_S = 5.0
"""How long a rank that lives may take from the claim of a name to its content."""


class BoardLostError(ConnectionError):
    """The board is gone: the process that kept it has died."""


class BoardSilentError(BoardLostError):
    """The board does not answer, and may again: the process that keeps it hangs."""


class Board(ABC):
    """Keys and values, seen by all ranks. Every method but :meth:`wait` answers at once."""

    @abstractmethod
    def put_once(self, key: str, value: bytes) -> bytes:
        """Write ``value`` if nothing is there; returns what is there then. Decides races: all callers get the same."""

    @abstractmethod
    def append(self, key: str, value: bytes) -> int:
        """Add an entry to a list; returns how many entries it has now."""

    @abstractmethod
    def entries(self, key: str) -> list[bytes]:
        """The entries of a list so far."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """What :meth:`put_once` has written; None if nothing."""

    @abstractmethod
    def wait(self, key: str, timeout_s: float) -> bytes | None:
        """Block until the key is written; None after ``timeout_s``."""

    @abstractmethod
    def close(self) -> None:
        """Wake the waiters: they get :class:`BoardLostError`."""


class LocalBoard(Board):
    """For ranks, or simulated ranks, of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lists: dict[str, list[bytes]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put_once(self, key: str, value: bytes) -> bytes:
        with self._changed:
            found = self._values.setdefault(key, value)
            self._changed.notify_all()
            return found

    def append(self, key: str, value: bytes) -> int:
        with self._changed:
            entries = self._lists.setdefault(key, [])
            entries.append(value)
            return len(entries)

    def entries(self, key: str) -> list[bytes]:
        with self._changed:
            return list(self._lists.get(key, ()))

    def get(self, key: str) -> bytes | None:
        with self._changed:
            return self._values.get(key)

    def wait(self, key: str, timeout_s: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or key in self._values, timeout_s)
            if self._closed:
                raise BoardLostError("the board was closed")
            return self._values.get(key)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class DirectoryBoard(Board):
    """In a folder on storage that all ranks share, for jobs that have no key-value store.

    A folder cannot wake anyone, so waiting looks once every ``poll_s``.
    """

    def __init__(self, folder: str, poll_s: float = 0.2) -> None:
        self._folder = folder
        self._poll_s = poll_s
        self._closed = threading.Event()
        os.makedirs(folder, exist_ok=True)

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, key.replace("/", "+"))

    def put_once(self, key: str, value: bytes) -> bytes:
        path = self._path(key)
        temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
        with open(temporary, "wb") as file:
            file.write(value)
        try:
            name_first(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        found = self.wait(key, _NAMED_S)  # not there yet: another rank is just giving it its name
        if found is None:
            raise BoardLostError(f"a rank has claimed {key} and died")
        return found

    def append(self, key: str, value: bytes) -> int:
        folder = self._path(key) + ".d"
        os.makedirs(folder, exist_ok=True)
        for index in range(10**6):
            if self._claim(os.path.join(folder, f"{index:07d}"), value):
                return index + 1
        raise AssertionError("a million entries")

    @staticmethod
    def _claim(path: str, value: bytes) -> bool:
        if os.path.exists(path):
            return False
        temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
        with open(temporary, "wb") as file:
            file.write(value)
        try:
            return name_first(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    def entries(self, key: str) -> list[bytes]:
        folder = self._path(key) + ".d"
        try:
            names = {name.removesuffix(CLAIM) for name in os.listdir(folder) if not name.endswith(".tmp")}
        except FileNotFoundError:
            return []
        found = (self._wait(os.path.join(folder, name), _NAMED_S) for name in sorted(names))
        return [entry for entry in found if entry is not None]

    def get(self, key: str) -> bytes | None:
        return self._read(self._path(key))

    @staticmethod
    def _read(path: str) -> bytes | None:
        try:
            return read_small(path, _LARGEST)
        except FileNotFoundError:
            return None

    def wait(self, key: str, timeout_s: float) -> bytes | None:
        return self._wait(self._path(key), timeout_s)

    def _wait(self, path: str, timeout_s: float) -> bytes | None:
        until = time.monotonic() + timeout_s
        while True:
            found = self._read(path)
            left = until - time.monotonic()
            if found is not None or left <= 0:
                return found
            if self._closed.wait(min(self._poll_s, left)):
                raise BoardLostError("the board was closed")

    def close(self) -> None:
        self._closed.set()
