"""A preemption from inside a script, at a moment that a test can name, and not a moment later."""

from __future__ import annotations

import os
import signal
import time


def preempt(number: int = signal.SIGTERM) -> None:
    """Send this process the signal, and let it go on once that was noticed: else a tiny training would be over by then.

    ``TEST_JOURNAL`` is where one can see that; without it nobody waits.
    """
    before = _decisions()
    os.kill(os.getpid(), number)
    until = time.monotonic() + 30
    while _decisions() == before is not None and time.monotonic() < until:
        time.sleep(0.005)


def _decisions() -> int | None:
    path = os.environ.get("TEST_JOURNAL")
    if path is None:
        return None
    try:
        with open(path) as file:
            return file.read().count('"agreement"')
    except FileNotFoundError:
        return 0
