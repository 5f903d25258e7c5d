"""Following the script of a process, from the import of torch to its end.

How it ended decides: well, and the end is committed; with an error, and the last point is saved. An interpreter
says so in different ways: ``sys.last_value`` holds an exception that nobody caught, ``sys.exit`` is given a code,
and a process of :mod:`multiprocessing` runs a function that returns or raises.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.process
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from _holdfast_startup import required
from holdfast.adapters.replay import follower as replay
from holdfast.adapters.replay.patches import PYTHON
from holdfast.adapters.replay.refusal import refuse_steps
from holdfast.base.patching import Applied
from holdfast.config import Settings
from holdfast.errors import HoldfastError, UnprotectedError

log = logging.getLogger("holdfast")


class Script:
    """The one follower of a process that follows its script. Wrappers of the patch table are among its methods."""

    def __init__(self, follower: replay.Follower) -> None:
        self._follower = follower
        self._process = os.getpid()
        self._code: Any = None
        self._function: Applied | None = None

    def watch(self) -> None:
        PYTHON.begin("script", self)
        # Before threads are told to end and not after, as atexit: saving starts some.
        getattr(threading, "_register_atexit")(self._ended)
        if multiprocessing.parent_process() is not None:
            self._watch_function()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """A child is another process: a loader's worker, say, or one that trains by itself."""
        self._process = os.getpid()
        self._watch_function()

    def _watch_function(self) -> None:
        if self._function is None:
            self._function = PYTHON.begin("child process", self)

    # ------------------------------------------------------------------ wrappers

    def exit(self, original: Callable[[Any], NoReturn]) -> Callable[[Any], NoReturn]:
        def noted_exit(code: Any = None, /) -> NoReturn:
            self._code = code
            original(code)

        return noted_exit

    def run(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(process: Any) -> None:
            try:
                original(process)
            except BaseException as error:
                self._end(error)
                raise
            self._end(None)

        return run

    # ------------------------------------------------------------------ the end

    def _ended(self) -> None:
        if os.getpid() != self._process:
            return
        error = getattr(sys, "last_value", None)
        if error is None and self._code not in (None, 0):
            error = SystemExit(self._code)
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        follower = self._follower
        try:
            if error is not None:
                follower.crashed(error)
            else:
                follower.finish()
        except HoldfastError as failure:
            log.error("%s", failure)
            follower.close()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        follower.close()


def follow_script() -> None:
    """Follow the script of this process, if there is one and nobody follows already."""
    main = sys.modules.get("__main__")
    if replay.current() is not None or main is None:
        return
    settings = Settings.load()
    if not settings.enabled:
        return
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        if required():
            refuse_steps(
                UnprotectedError(
                    "a loop in an interactive session is not followed, and HOLDFAST_ENABLED=require refuses to train "
                    "unprotected: with holdfast.Run(model=…) a loop says itself what a step is"
                )
            )
        return
    follower = replay.Follower(settings)
    follower.start()
    Script(follower).watch()
