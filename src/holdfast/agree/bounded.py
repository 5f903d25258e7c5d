"""A board whose keeper may hang: stopped, swapped out, behind a cut network.

A dead keeper is noticed at once, since its connections break. One that hangs answers nothing, and the library that
speaks with it waits for ever. Here every question is put on a thread of its own, and one that is not answered in time
counts as a lost board. While such a question is still open, others are not even asked; if the keeper wakes up again,
so does the board.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from holdfast.agree.board import Board, BoardSilentError
from holdfast.base.timeouts import OverdueError, within

T = TypeVar("T")


class BoundedBoard(Board):
    """``board``, with ``patience_s`` seconds for each answer."""

    def __init__(self, board: Board, patience_s: float) -> None:
        self._board = board
        self._patience_s = patience_s
        self._overdue: set[threading.Thread] = set()

    def put_once(self, key: str, value: bytes) -> bytes:
        return self._ask(lambda: self._board.put_once(key, value))

    def append(self, key: str, value: bytes) -> int:
        return self._ask(lambda: self._board.append(key, value))

    def entries(self, key: str) -> list[bytes]:
        return self._ask(lambda: self._board.entries(key))

    def get(self, key: str) -> bytes | None:
        return self._ask(lambda: self._board.get(key))

    def wait(self, key: str, timeout_s: float) -> bytes | None:
        return self._ask(lambda: self._board.wait(key, timeout_s), timeout_s)

    def close(self) -> None:
        with contextlib.suppress(BoardSilentError):
            self._ask(self._board.close)

    def _ask(self, question: Callable[[], T], may_take_s: float = 0.0) -> T:
        if any(thread.is_alive() for thread in self._overdue):
            raise BoardSilentError("the board does not answer")
        try:
            return within(may_take_s + self._patience_s, question, "holdfast-board")
        except OverdueError as error:
            self._overdue.add(error.thread)
            raise BoardSilentError(f"the board has not answered for {self._patience_s:g} s") from None
