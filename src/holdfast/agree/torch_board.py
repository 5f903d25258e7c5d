"""The board on torch's key-value store, which every distributed job has already.

Each rank uses a connection of its own: a blocked wait on a shared one would block the job's own use
of the store. The store may live in the launcher or on a rank; when that process dies every call
raises :class:`~holdfast.agree.board.BoardLostError` at once, blocked ones too.

A waiter is blocked on a key of its own, which is written after the one that it waits for, or by
``close()``. Nothing else ends a wait of this store, and a thread that is still inside one as the
interpreter ends aborts the process when the store dies: C++ cannot unwind through Python's end.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from holdfast.agree.board import Board, BoardLostError
from holdfast.base.timeouts import within

_END = b"\n"
_CLOSE_S = 1.0


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
        self._inside = 0
        """Threads that may be blocked in the store."""
        self._closed = False
        self._name = secrets.token_hex(8)
        self._waited: set[str] = set()
        """Keys that this rank has waited for."""

    def put_once(self, key: str, value: bytes) -> bytes:
        # compare_set with an empty expectation writes only where the key is not there yet.
        with self._lock, _lost_as_board_lost():
            found = bytes(self._quick.compare_set(key, "", value.decode()))
            # Whoever is too late wakes itself, lest the first one has died in between.
            self._wake(self._waiters(key) if found == value else [self._own(key)] if key in self._waited else [])
            return found

    def _own(self, key: str) -> str:
        return f"{key}@{self._name}"

    def _waiters(self, key: str) -> list[str]:
        if not self._quick.check([f"{key}@"]):
            return []
        return bytes(self._quick.get(f"{key}@")).decode().split()

    def _wake(self, waiters: Sequence[str]) -> None:
        if len(waiters) > 1 and self._quick.has_extended_api():
            self._quick.multi_set(list(waiters), ["1"] * len(waiters))
            return
        for waiter in waiters:
            self._quick.set(waiter, "1")

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
        with self._lock, _lost_as_board_lost():
            return bytes(self._quick.get(key)) if self._quick.check([key]) else None

    def wait(self, key: str, timeout_s: float) -> bytes | None:
        with self._lock, _lost_as_board_lost():
            if self._closed:
                raise BoardLostError("the board is closed")
            if key not in self._waited:
                self._waited.add(key)
                self._quick.append(f"{key}@", f"{self._own(key)}\n")
            if self._quick.check([key]):
                return bytes(self._quick.get(key))
            with self._waits:
                self._inside += 1
        try:
            with _lost_as_board_lost():
                self._waiting.wait([self._own(key)], timedelta(seconds=max(0.001, timeout_s)))
        except BoardLostError as error:
            if self._closed or "imeout" not in str(error):
                self._waited.clear()  # there is nobody to be asked any more
                raise
        finally:
            with self._waits:
                self._inside -= 1
                self._waits.notify_all()
        if self._closed:
            raise BoardLostError("the board is closed")
        return self.get(key)

    def close(self) -> None:
        def wake() -> None:
            with self._lock:
                self._wake([self._own(key) for key in self._waited])

        self._closed = True
        if self._waited:
            with contextlib.suppress(RuntimeError, TimeoutError):  # the store is gone, or it hangs
                within(_CLOSE_S, wake, "holdfast-board")
            with self._waits:
                self._waits.wait_for(lambda: self._inside == 0, _CLOSE_S)


class _lost_as_board_lost:
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, BoardLostError):
            raise BoardLostError(str(error).splitlines()[0]) from None
