"""A signal that comes when all is saved and the process is on its way out.

The handler of a notice is gone by then, and the default one would end the process as killed by a signal, where
whoever looks at the exit code expects that of a preemption. The way out of a process that holds a large model takes a
while, and a launcher often repeats its signal.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType

_exit_code = 0


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(_exit_code)


def expect(signals: Sequence[signal.Signals], exit_code: int) -> None:
    """From now on these signals end the process with ``exit_code``, where nobody else handles them."""
    global _exit_code
    if threading.current_thread() is not threading.main_thread():
        return
    _exit_code = exit_code
    for number in signals:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)
    # The interpreter takes its handlers away before it takes its modules apart, but leaves what is ignored.
    atexit.register(_ignore, signals)


def withdraw(signals: Sequence[signal.Signals]) -> None:
    """The process goes on after all."""
    atexit.unregister(_ignore)
    _replace(signals, signal.SIG_DFL)


def _ignore(signals: Sequence[signal.Signals]) -> None:
    _replace(signals, signal.SIG_IGN)


def _replace(signals: Sequence[signal.Signals], by: signal.Handlers) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in signals:
            if signal.getsignal(number) is _leave:
                signal.signal(number, by)
