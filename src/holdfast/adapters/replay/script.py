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
from types import FrameType
from typing import Any, NoReturn

from _holdfast_startup import required
from holdfast.adapters.replay import follower as replay
from holdfast.adapters.replay.family import Family
from holdfast.adapters.replay.identity import Identity, serves, spawned_function
from holdfast.adapters.replay.patches import PYTHON
from holdfast.adapters.replay.refusal import refuse_steps
from holdfast.config import Settings
from holdfast.errors import HoldfastError, UnprotectedError

log = logging.getLogger("holdfast")

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep


class Script:
    """The one follower of a process that follows its script. Wrappers of the patch table are among its methods."""

    def __init__(self, follower: replay.Follower, identity: Identity) -> None:
        self._follower, self._identity = follower, identity
        self._family = Family(follower.settings, identity, follower.state_at_start, lambda: follower.follows)
        identity.has_processes = self._family.alive
        self._process = os.getpid()
        self._code: Any = None
        self._interrupted: KeyboardInterrupt | None = None
        """One that torch's launcher of processes does not raise again."""
        self._noted = False
        """Whether it is known how the function of a child process ended."""

    def watch(self) -> None:
        PYTHON.begin("script", self)
        # Before threads are told to end and not after, as atexit: saving starts some.
        getattr(threading, "_register_atexit")(self._ended)
        if multiprocessing.parent_process() is not None:  # its function has imported torch
            self._become(multiprocessing.current_process())
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """A child is another process: a loader's worker, say, or one that trains by itself."""
        self._process = os.getpid()
        self._family.forked()
        self._identity.fork()

    def _become(self, process: Any) -> None:
        self._identity.become(process)
        if serves(process):
            self._follower.serve()
        self._follower.begin_again()

    # ------------------------------------------------------------------ wrappers

    def exit(self, original: Callable[[Any], NoReturn]) -> Callable[[Any], NoReturn]:
        def noted_exit(code: Any = None, /) -> NoReturn:
            self._code = code
            original(code)

        return noted_exit

    @staticmethod
    def show_warning(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def show(message: Any) -> None:
            if message.filename.startswith(_OURS):
                _name_caller(message, sys._getframe(1))
            original(message)

        return show

    def start(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def start(process: Any) -> None:
            self._family.before_start(process)
            original(process)

        return start

    def bootstrap(self, original: Callable[..., int]) -> Callable[..., int]:
        def bootstrap(process: Any, *args: Any, **options: Any) -> int:
            self._become(process)
            function = spawned_function(process)
            if function is not None:
                process._args = (self._noting(function), *process._args[1:])
            PYTHON.begin("child process", self, to=process)
            return original(process, *args, **options)

        return bootstrap

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            try:
                return function(*args)
            except KeyboardInterrupt as error:
                self._interrupted = error
                raise

        return noting

    def run(self, original: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            self._noted = True
            try:
                original()
            except BaseException as error:
                self._end(error)
                raise
            self._end(self._interrupted)

        return run

    # ------------------------------------------------------------------ the end

    def _ended(self) -> None:
        if os.getpid() != self._process or self._noted:
            return
        error = getattr(sys, "last_value", None)
        code = self._code or _exit_code_of_child()
        if error is None and code not in (None, 0):
            error = SystemExit(code)
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


def _name_caller(message: Any, frame: FrameType | None) -> None:
    """Let a warning that names a wrapper of holdfast name the wrapper's caller. ``frame``: where it is shown."""
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (message.filename, message.lineno):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is not None:
        message.filename, message.lineno = frame.f_code.co_filename, frame.f_lineno


def _exit_code_of_child() -> int | None:
    """How a process of multiprocessing ends whose function was running already as torch was imported."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (
        frame.f_code.co_name == "_bootstrap" and frame.f_globals.get("__name__") == multiprocessing.process.__name__
    ):
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("exitcode")


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
    identity = Identity(settings)
    follower = replay.Follower(settings, identity=identity)
    follower.start()
    Script(follower, identity).watch()
