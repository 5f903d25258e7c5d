"""Work on host memory with several threads: one core alone does not use all of the memory's speed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch

MAX_THREADS = 16
"""More hardly make memory faster."""

Item = TypeVar("Item")


class Shared(Generic[Item]):
    """Calls ``work`` with every item, on as many threads as torch uses, from now on. It must let go of the GIL."""

    def __init__(self, work: Callable[[Item], None], items: Iterable[Item], *, helpers: int = 0) -> None:
        """``helpers``: how many threads besides the one that waits; 0: as many as torch uses."""
        self._work = work
        self._left = deque(items)
        self._errors: list[BaseException] = []
        count = min(helpers or torch.get_num_threads(), MAX_THREADS, len(self._left))
        # Threads of its own and no pool of the standard library, which takes no work once the interpreter shuts down.
        self._helpers = [threading.Thread(target=self._run, name="holdfast-memory", daemon=True) for _ in range(count)]
        for helper in self._helpers:
            helper.start()

    def _run(self) -> None:
        while self._left and not self._errors:
            try:
                item = self._left.popleft()
            except IndexError:
                return
            try:
                self._work(item)
            except BaseException as error:
                self._errors.append(error)

    def finish(self) -> None:
        """Take part until all is done; raises what went wrong."""
        self._run()
        for helper in self._helpers:
            helper.join()
        if self._errors:
            raise self._errors[0]


def for_each(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Call ``work`` with every item, on this thread and on others. It must let go of the GIL."""
    items = list(items)
    others = min(torch.get_num_threads(), MAX_THREADS, len(items)) - 1
    if others > 0:
        Shared(work, items, helpers=others).finish()
    else:
        for item in items:
            work(item)
