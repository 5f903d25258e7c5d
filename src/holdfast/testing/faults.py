"""Faults at an exact place: a rank that is told to stop, or killed, in the middle of a certain step.

::

    injector = Injector(rank=0).fail_at(rank=0, step=7, phase="backward", action="KILL")
    …
    injector.reached("backward", step)      # in the training code under test

The signal is sent by the process to itself (or to others, after a delay), so it arrives in that very
phase and not a few milliseconds later. With ``heard``, the phase lasts until holdfast has heard it::

    Injector(rank, faults, heard=lambda: notices(location))
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from holdfast.base.run_directory import JOURNAL, home_of

PHASES = ("start", "forward", "backward", "optimizer", "after-optimizer", "evaluation", "save", "commit", "end")
_NOT_OF_A_STEP = ("start", "round", "save", "commit", "end")
_HEARD_S = 20.0
_FOR_EVER_S = 1e6


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, where."""

    rank: int
    step: int
    """The step in flight, from 1."""
    phase: str
    action: str = "TERM"
    """A signal's name, ``RAISE`` for an exception, an errno's name (``EIO``) for that OSError, or ``HANG`` to stay
    there for ``skew_s``, and without that for ever."""
    also: Sequence[int] = ()
    """Processes that get the same signal,"""
    skew_s: float = 0.0
    """so much later."""


class InjectedError(RuntimeError):
    """The exception of ``action="RAISE"``."""


@dataclass(slots=True)
class Injector:
    """Carries out the faults of one rank. Each happens once."""

    rank: int
    faults: list[Fault] = field(default_factory=list)
    heard: Callable[[], int] | None = None
    """What changes when a notice is heard. A tiny training could be over by then, so its step waits for that."""

    def fail_at(self, rank: int, step: int, phase: str, action: str = "TERM") -> Self:
        if phase not in PHASES:
            raise ValueError(f"phase {phase!r} is not known; accepted are {', '.join(PHASES)}")
        self.faults.append(Fault(rank, step, phase, action))
        return self

    def reached(self, phase: str, step: int) -> None:
        """The training code is in ``phase`` of ``step`` now."""
        for fault in [fault for fault in self.faults if fault.rank == self.rank]:
            if fault.phase == phase and fault.step == step:
                self.faults.remove(fault)
                self._carry_out(fault)

    def _carry_out(self, fault: Fault) -> None:
        if fault.action == "RAISE":
            raise InjectedError(f"injected in {fault.phase} of step {fault.step}")
        if hasattr(errno, fault.action):
            raise OSError(getattr(errno, fault.action), f"injected in {fault.phase} of step {fault.step}")
        if fault.action == "HANG":
            time.sleep(fault.skew_s or _FOR_EVER_S)
            return
        number = signal.Signals["SIG" + fault.action]
        for pid in fault.also:
            if fault.skew_s:
                threading.Timer(fault.skew_s, _send, (pid, number)).start()
            else:
                _send(pid, number)
        heard = self.heard if fault.phase not in _NOT_OF_A_STEP else None
        before = heard() if heard is not None else 0
        os.kill(os.getpid(), number)
        until = time.monotonic() + _HEARD_S
        while heard is not None and heard() == before and time.monotonic() < until:
            time.sleep(0.002)


def notices(location: str, *, kill_wait: bool = False) -> int:
    """How many notices the run at ``location`` has agreed on; has heard, where it waits before it agrees."""
    event = '"notice"' if kill_wait else '"agreement"'
    try:
        return Path(home_of(location), JOURNAL).read_text(errors="replace").count(event)
    except FileNotFoundError:
        return 0


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
