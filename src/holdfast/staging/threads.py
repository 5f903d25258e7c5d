"""Work on host memory with several threads: one core alone does not use all of the memory's speed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

MAX_THREADS = 8
"""More do not make memory faster."""

Item = TypeVar("Item")


def for_each(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Call ``work`` with every item, on this thread and on as many more as torch uses. It must let go of the GIL."""
    left = deque(items)
    errors: list[BaseException] = []

    def run() -> None:
        while left and not errors:
            try:
                item = left.popleft()
            except IndexError:
                return
            try:
                work(item)
            except BaseException as error:
                errors.append(error)

    # Threads of its own and no pool of the standard library, which takes no work once the interpreter shuts down.
    count = min(torch.get_num_threads(), MAX_THREADS, len(left))
    helpers = [threading.Thread(target=run, name="holdfast-memory", daemon=True) for _ in range(count - 1)]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
