"""Which worker this process is among those that TensorFlow trains on, and where they leave word for each other.

Under ``MultiWorkerMirroredStrategy`` there is a service with keys and values already, that of TensorFlow's own
coordination: one of the workers keeps it, and a call that waits for a key blocks without taking the interpreter's lock.
"""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager
from typing import Any

from holdfast.adapters.keras.scopes import LOCAL_READS
from holdfast.agree import Board, BoardLostError, LocalBoard
from holdfast.base.patching import PatchSet
from holdfast.runtime.session import Place

_PROBE_S = 0.3
"""A key that is there is had within this time."""
_SLICE_S = 5.0
"""A call that waits looks this often whether it is still wanted."""

_runs = itertools.count(1)


def place_of(strategy: Any) -> Place:
    """This process's place, with a board that is new for each run of a process."""
    resolver = getattr(strategy, "cluster_resolver", None)
    workers = getattr(strategy.extended, "_num_workers", 1)
    if resolver is None or workers < 2:
        return Place(0, 1, LocalBoard())
    from tensorflow.python.distribute import multi_worker_util

    rank = multi_worker_util.id_in_cluster(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
    return Place(int(rank), int(workers), CoordinationBoard(f"holdfast/{next(_runs)}", int(workers)))


class CoordinationBoard(Board):
    """A board in the key-value store of TensorFlow's coordination service."""

    def __init__(self, prefix: str, world: int) -> None:
        from tensorflow.python.eager import context
        from tensorflow.python.framework import errors

        self._context = context.context()
        self._errors = errors
        self._prefix = prefix
        self._world = world
        self._closed = False

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _insert(self, key: str, value: bytes) -> bool:
        """False if something is there already."""
        try:
            self._context.set_config_key_value(self._key(key), value.decode())
            return True
        except self._errors.AlreadyExistsError:
            return False
        except self._errors.OpError as error:
            raise _lost(error) from None

    def _look(self, key: str, timeout_s: float) -> bytes | None:
        try:
            value = self._context.get_config_key_value(self._key(key), max(1, int(timeout_s * 1000)))
            return str(value).encode()
        except (self._errors.DeadlineExceededError, self._errors.NotFoundError):
            return None
        except self._errors.OpError as error:
            raise _lost(error) from None

    def put_once(self, key: str, value: bytes) -> bytes:
        if self._insert(key, value):
            return value
        found = self.wait(key, 60.0)
        if found is None:
            raise BoardLostError(f"{key} is there, but cannot be read")
        return found

    def append(self, key: str, value: bytes) -> int:
        for index in itertools.count():
            if self._insert(f"{key}/{index}", value):
                return index + 1
        raise AssertionError

    def entries(self, key: str) -> list[bytes]:
        # No rank adds more than one, so that nobody need wait to see that there are no more.
        found: list[bytes] = []
        while len(found) < self._world and (value := self._look(f"{key}/{len(found)}", _PROBE_S)) is not None:
            found.append(value)
        return found

    def get(self, key: str) -> bytes | None:
        return self._look(key, _PROBE_S)

    def wait(self, key: str, timeout_s: float) -> bytes | None:
        until = time.monotonic() + timeout_s
        while True:
            left = until - time.monotonic()
            found = self._look(key, max(0.001, min(_SLICE_S, left)))
            if self._closed:
                raise BoardLostError("the board was closed")
            if found is not None or left <= 0:
                return found

    def close(self) -> None:
        self._closed = True


def _lost(error: Exception) -> BoardLostError:
    return BoardLostError(str(error).splitlines()[0][:200])


class LocalReads:
    """Reads a variable of which each replica has its own value from this process alone."""

    def read_here(self, original: Any) -> Any:
        def get_cross_replica(variable: Any) -> Any:
            return variable._values[0].read_value()

        return get_cross_replica


def local_reads(table: PatchSet) -> AbstractContextManager[object]:
    """Inside, the calling thread reads from this process alone: asking the others would wait for them to ask too."""
    return table.applied(LOCAL_READS, LocalReads(), thread=True)
