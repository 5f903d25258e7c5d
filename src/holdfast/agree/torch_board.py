"""The board on torch's key-value store, which every distributed job has already.

Each rank uses a connection of its own: a blocked wait on a shared one would block the job's own use
of the store. The store may live in the launcher or on a rank; when that process dies every call
raises :class:`~holdfast.agree.board.BoardLostError` at once, blocked ones too.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from holdfast.agree.board import Board, BoardLostError

_END = b"\n"


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
        self._closed = False

    def put_once(self, key: str, value: bytes) -> bytes:
        # compare_set with an empty expectation writes only where the key is not there yet.
        with self._lock, _lost_as_board_lost():
            return bytes(self._quick.compare_set(key, "", value.decode()))

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
        with _lost_as_board_lost():
            try:
                self._waiting.wait([key], timedelta(seconds=max(0.001, timeout_s)))
            except dist.DistStoreError as error:
                if self._closed or "imeout" not in str(error):
                    raise BoardLostError(str(error).splitlines()[0]) from None
                return None
        return self.get(key)

    def close(self) -> None:
        self._closed = True


class _lost_as_board_lost:
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, BoardLostError):
            raise BoardLostError(str(error).splitlines()[0]) from None
