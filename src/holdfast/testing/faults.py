"""Fault injection at an exact place: a rank is stopped, killed or fails in a given phase of a given step.

::

    from holdfast.testing import Injector, notices, report_saves

    injector = Injector(rank).fail_at(rank=0, step=7, phase="backward", action="KILL")
    report_saves(injector.reached)          # the phases "save" and "commit"
    …
    injector.reached("backward", step)      # in the training code under test

The process sends the signal to itself (and to others, after a delay), so the signal arrives in that very phase and not
a few milliseconds later. With ``heard``, the phase lasts until holdfast has heard the notice::

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
from holdfast.store.base import Sink
from holdfast.store.local import LocalBackend
from holdfast.store.manifest import step_of

PHASES = ("start", "forward", "backward", "optimizer", "after-optimizer", "evaluation", "save", "commit", "end")
"""The phases that :meth:`Injector.fail_at` accepts. The code under test reports each with :meth:`Injector.reached`;
:func:`report_saves` reports ``save`` and ``commit``."""
_NOT_OF_A_STEP = ("start", "round", "save", "commit", "end")
_HEARD_S = 20.0
_FOR_EVER_S = 1e6


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: which rank, where, and what happens there."""

    rank: int
    """The rank that the fault happens in."""
    step: int
    """The step in flight, from 1."""
    phase: str
    """One of :data:`PHASES`, or any other name that the code under test reports."""
    action: str = "TERM"
    """A signal's name, ``RAISE`` for an :class:`InjectedError`, an errno's name (``EIO``) for that OSError, or ``HANG``
    to stay there for ``skew_s``, and without that forever."""
    also: Sequence[int] = ()
    """Other processes, by id, that get the same signal."""
    skew_s: float = 0.0
    """Seconds until the processes in ``also`` get it; for ``HANG``, how long it lasts."""


class InjectedError(RuntimeError):
    """The exception that ``action="RAISE"`` raises."""


@dataclass(slots=True)
class Injector:
    """Carries out the faults of one rank. Each happens once."""

    rank: int
    """The rank of this process; faults of other ranks are ignored."""
    faults: list[Fault] = field(default_factory=list)
    """The faults that have not happened yet."""
    heard: Callable[[], int] | None = None
    """Returns another number once a notice was heard, such as :func:`notices`. A tiny training run could be over by
    then, so the step waits for it, up to 20 seconds."""

    def fail_at(self, rank: int, step: int, phase: str, action: str = "TERM") -> Self:
        """Add a fault; returns the injector. ValueError if the phase is none of :data:`PHASES`."""
        if phase not in PHASES:
            raise ValueError(f"phase {phase!r} is not known; accepted are {', '.join(PHASES)}")
        self.faults.append(Fault(rank, step, phase, action))
        return self

    def reached(self, phase: str, step: int) -> None:
        """Report that the code under test is in ``phase`` of ``step`` now: the faults of this place happen."""
        for fault in [fault for fault in self.faults if fault.rank == self.rank]:
            if fault.phase == phase and fault.step == step:
                self.faults.remove(fault)
                self.inject(fault)

    def inject(self, fault: Fault) -> None:
        """Carry out one fault, here and now. Override it to do something before or after."""
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


def report_saves(reached: Callable[[str, int], None]) -> None:
    """Make every save of this process to a local location report its phases, until the process ends.

    ``save`` is reported when a file of a checkpoint has been created and nothing is written to it yet, ``commit`` when
    all files are written and the manifest is not.
    """
    create, commit = LocalBackend.create, LocalBackend.commit

    def reporting_create(self: LocalBackend, name: str, path: str, size: int) -> Sink:
        sink = create(self, name, path, size)
        reached("save", step_of(name) or 0)
        return sink

    def reporting_commit(self: LocalBackend, name: str, manifest: bytes) -> None:
        reached("commit", step_of(name) or 0)
        commit(self, name, manifest)

    LocalBackend.create, LocalBackend.commit = reporting_create, reporting_commit  # type: ignore[method-assign]


def notices(location: str, *, kill_wait: bool = False) -> int:
    """Number of notices that the run at ``location`` has agreed on; with ``kill_wait``, that it has heard.

    A run with a kill wait hears a notice, waits, and only then agrees on it.
    """
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
