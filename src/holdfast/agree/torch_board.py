"""The board on torch's key-value store, which every distributed job has already.

Each rank uses a connection of its own: a blocked wait on a shared one would block the job's own use
of the store. The store may live in the launcher or on a rank; when that process dies every call
raises :class:`~holdfast.agree.board.BoardLostError` at once, blocked ones too.

No thread may be blocked in the store when the interpreter ends: if the store's process ended in that
moment, the thread would return into an interpreter that is gone, and the whole process would abort. A
wait cannot be broken off, so :meth:`TorchBoard.close` writes that nothing is there in the place where
the value would come. Whoever is not closing waits on in the next place, where a value then goes too.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from holdfast.agree.board import Board, BoardLostError

_END = b"\n"
_NOTHING = b"\0"
"""In the place of a value: it comes in the next place, if at all."""
_CLOSING_S = 2.0
"""For a blocked wait to return once it is woken."""


def job_store() -> Any:
    """The store of the default process group, with the prefix under which torch keeps attempts apart."""
    return dist.distributed_c10d._get_default_store()


class TorchBoard(Board):
    """A board under one prefix of a store."""

    def __init__(self, store: Any, prefix: str) -> None:
        # Two connections: one that may be blocked in wait(), one for everything else.
        self._waiting = dist.PrefixStore(prefix, store.clone())
        self._quick = dist.PrefixStore(prefix, store.clone())
        self._lock = threading.Lock()
        self._waits = threading.Condition()
        self._closed = False
        self._blocked: str | None = None
        """The place on which a wait is blocked."""

    def put_once(self, key: str, value: bytes) -> bytes:
        for place in _places(key):
            if (found := self._put(place, value)) != _NOTHING:
                return found
        raise AssertionError("places do not end")

    def _put(self, place: str, value: bytes) -> bytes:
        # compare_set with an empty expectation writes only where the key is not there yet.
        with self._lock, _lost_as_board_lost():
            return bytes(self._quick.compare_set(place, "", value.decode()))

    def append(self, key: str, value: bytes) -> int:
        assert _END not in value
        with self._lock, _lost_as_board_lost():
            self._quick.append(key, (value + _END).decode())
            return int(self._quick.add(f"{key}#", 1))

    def entries(self, key: str) -> list[bytes]:
        with self._lock, _lost_as_board_lost():
            if not self._quick.check([key]):
                return []
            return bytes(self._quick.get(key)).split(_END)[:-1]

    def get(self, key: str) -> bytes | None:
        for place in _places(key):
            if (found := self._get(place)) != _NOTHING:
                return found
        raise AssertionError("places do not end")

    def _get(self, place: str) -> bytes | None:
        with self._lock, _lost_as_board_lost():
            return bytes(self._quick.get(place)) if self._quick.check([place]) else None

    def wait(self, key: str, timeout_s: float) -> bytes | None:
        until = time.monotonic() + timeout_s
        for place in _places(key):
            if not self._wait(place, until - time.monotonic()):
                return None
            if (found := self._get(place)) != _NOTHING:
                return found
        raise AssertionError("places do not end")

    def _wait(self, place: str, timeout_s: float) -> bool:
        """Whether the place is written."""
        with self._waits:
            if self._closed:
                raise BoardLostError("the board was closed")
            self._blocked = place
        try:
            with _lost_as_board_lost():
                self._waiting.wait([place], timedelta(seconds=max(0.001, timeout_s)))
        except BoardLostError as error:
            if self._closed or "imeout" not in str(error):
                raise
            return False
        finally:
            with self._waits:
                self._blocked = None
                self._waits.notify_all()
        if self._closed:
            raise BoardLostError("the board was closed")
        return True

    def close(self) -> None:
        with self._waits:
            self._closed = True
            blocked = self._blocked
        if blocked is None:
            return
        with contextlib.suppress(BoardLostError):  # then the wait has returned too
            self._put(blocked, _NOTHING)
        with self._waits:
            self._waits.wait_for(lambda: self._blocked is None, _CLOSING_S)


def _places(key: str) -> Iterator[str]:
    """Where the value of ``key`` may stand, one after the other."""
    yield key
    for number in itertools.count(1):
        yield f"{key}~{number}"


class _lost_as_board_lost:
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, BoardLostError):
            raise BoardLostError(str(error).splitlines()[0]) from None
