"""Waits for what may never answer: a file system that is out of reach, a store whose process hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class OverdueError(TimeoutError):
    """It has not answered in time. ``thread`` still waits for it."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__(f"{thread.name} has had no answer in time")
        self.thread = thread


def within(seconds: float, action: Callable[[], T], name: str) -> T:
    """The outcome of ``action``, which runs on a thread of this name; raises OverdueError when the time is up."""
    outcome: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not outcome:
        raise OverdueError(thread)
    return outcome[0]
