"""The processes that a script starts by :mod:`multiprocessing`, seen from the script.

A notice to the script is one to those of its processes that train: it is passed on, they are waited for within the
grace period, and the script leaves as they do. Without them it ends as it would without holdfast. While it waits,
nothing of it runs on, which would find half-trained results.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from holdfast.adapters.replay.identity import INHERITED, Identity, may_train, records_in, token
from holdfast.base.process import process_start
from holdfast.base.run_directory import home_of
from holdfast.config import Settings

log = logging.getLogger("holdfast")

_POLL_S = 0.05


class Family:
    """Hands down to processes what they need to know, and passes notices on to them."""

    def __init__(
        self, settings: Settings, identity: Identity, state: Callable[[], bytes], follows: Callable[[], bool]
    ) -> None:
        """``state``: the random numbers that the script began with. ``follows``: whether the script trains itself."""
        self._settings, self._identity, self._state, self._follows = settings, identity, state, follows
        self._started: weakref.WeakSet[Any] = weakref.WeakSet()
        self._process = os.getpid()
        self._leaving = False
        self._handler = self._on_signal  # one object, so that "is it still ours" is an identity test

    def forked(self) -> None:
        """In a child: the processes are its parent's."""
        self._process, self._leaving = os.getpid(), False
        self._started = weakref.WeakSet()
        for number in self._settings.signals:
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_DFL)

    def alive(self) -> bool:
        """Whether a process that may train has not ended."""
        return any(process.is_alive() for process in list(self._started))

    def before_start(self, process: Any) -> None:
        """A process is about to be started."""
        if may_train(process):
            handed = {"location": self._identity.location, "state": self._state()}
            process._config.setdefault(INHERITED, handed)  # of several generations, the first
            self._listen()
            self._started.add(process)

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._settings.signals:
            if signal.getsignal(number) is signal.SIG_DFL:  # else the script has a handler, which knows what to do
                signal.signal(number, self._handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._leaving:
            return
        home, parent = home_of(self._identity.location), token(os.getpid())

        def training() -> dict[int, bool]:
            """The processes that have trained, and whether they live."""
            mine = [record for record in records_in(home).values() if record.get("parent") == parent]
            return {int(one["pid"]): process_start(int(one["pid"])) == one["started"] for one in mine}

        found = training()
        if self._follows():  # it saves with its own handler, which calls this one, and leaves by itself
            self._pass_on(number, found, set())
            return
        if not found or os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._leaving = True
        until = time.monotonic() + self._settings.grace_period
        told: set[int] = set()
        while any(found.values()) and time.monotonic() < until:
            self._pass_on(number, found, told)
            time.sleep(_POLL_S)
            found = training()  # others may have begun to train
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, RuntimeError):  # closed, or it was being written as the signal came
                pass
        os._exit(self._settings.exit_code)

    def _pass_on(self, number: int, found: dict[int, bool], told: set[int]) -> None:
        for pid in [pid for pid, alive in found.items() if alive and pid not in told]:
            told.add(pid)
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
