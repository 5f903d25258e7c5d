"""Notices that come as signals.

Guarantees:

- A signal becomes a notice within milliseconds, also while the main thread is stuck in C (a
  collective, a lock, a driver call), and one signal is one notice.
- Nothing is delivered inside a handler; ``deliver`` runs on a thread of its own.
- Handlers that were there before still run, and cannot unwind the training loop.
- A forked child (a DataLoader worker) dies of the signal as it would without holdfast, and the
  parent does not take it for a notice.

Why this way. Python runs handlers between two bytecodes of the main thread, so a handler alone is
late by as long as a C call takes. The C half of Python's handler, however, writes the signal's number
to the wakeup file descriptor at once, on whatever thread the kernel chose. A reader thread blocked on
that pipe costs nothing until then. The Python handler also reports to the reader, because another
library may have taken the wakeup descriptor; the reader pairs both reports of one signal.

A process has one wakeup descriptor and one handler per signal, so there is one listener per process,
and every ``SignalSource`` subscribes to it.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from holdfast.errors import ConfigError, HoldfastError
from holdfast.notice.base import Deliver, Notice
from holdfast.notice.handlers import handler_of, put_back

_log = logging.getLogger(__name__)

_Handler = Callable[[int, FrameType | None], Any] | int | None

_CALL, _WAKE = 0, 255
"""Bytes of ours in the pipe, no signal's number: the Python handler was called; there is something to look at."""
_TWIN_S = 0.05
"""How far apart the two reports of one signal may be when their order does not settle it."""
_PENDING_MAX = 16
"""Notices kept for the first subscriber; more of them would say nothing else."""
_JOIN_S = 1.0

_UNHEARABLE = "the kernel never shows it to a process"
_FAULT = "it reports a fault of the program, and returning from its handler repeats the fault"
_REFUSED = {
    signal.SIGKILL: _UNHEARABLE,
    signal.SIGSTOP: _UNHEARABLE,
    signal.SIGSEGV: _FAULT,
    signal.SIGBUS: _FAULT,
    signal.SIGFPE: _FAULT,
    signal.SIGILL: _FAULT,
}


def listen(signals: Sequence[signal.Signals] = (signal.SIGTERM,)) -> None:
    """Installs the process-wide listener; call it in the main thread before training starts in another one.

    A signal that comes before any source has started is kept for the first one; a second one then acts
    as it would without holdfast. So does every signal once the last source has stopped.
    """
    _listener.pin(_checked(signals))


class SignalSource:
    """Delivers a notice for every signal of ``signals``.

    Started outside the main thread it hears only what ``listen()`` installed earlier in the main thread.
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM,)) -> None:
        self.signals = _checked(signals)
        self.deferred_exit: BaseException | None = None
        """What the first earlier handler to raise wanted to end the loop with, without its traceback."""
        self._deliver: Deliver | None = None

    @property
    def deaf(self) -> bool:
        """Whether a signal of this started source has no handler, so that it would not be seen."""
        return self._deliver is not None and bool(_listener.unheard(self.signals))

    def start(self, deliver: Deliver) -> None:
        self.deferred_exit = None
        self._deliver = deliver
        _listener.subscribe(self)
        if unheard := _listener.unheard(self.signals):
            _log.warning(
                "%s will not be seen as a preemption notice: Python installs signal handlers only in the main "
                "thread, and this source was started in the thread %r. Call holdfast.listen() in the main thread "
                "before starting that thread.",
                ", ".join(s.name for s in unheard),
                threading.current_thread().name,
            )

    def stop(self) -> None:
        _listener.unsubscribe(self)
        self._deliver = None

    def replaced(self) -> str | None:
        """Who replaced our handler since ``start``, as in ``SIGTERM by wandb.sdk.on_term``; None: nobody did."""
        return _listener.replaced(self.signals)

    def reinstall(self) -> bool:
        """Puts our handler back and keeps the one that replaced it as the earlier one. False if it could not.

        The wakeup descriptor is taken back too; bytes go on to whoever had it. Outside the main thread only a handler
        that was put there from C, behind Python's back, can be replaced.
        """
        return _listener.reinstall(self.signals)

    def _hand_over(self, notice: Notice) -> None:
        deliver = self._deliver
        if deliver is None:
            return
        try:
            deliver(notice)
        except BaseException:  # the thread has to outlive whatever a receiver does
            _log.exception("the receiver of the notice %s failed", notice.detail)


class _Call(NamedTuple):
    """The Python handler's report of a signal."""

    signum: int
    at: float
    wall: float
    fd_was_ours: bool


class _Calling(NamedTuple):
    """The earlier handler that is running now."""

    frame: FrameType | None
    depth: int
    as_without_us: bool


class _WakeupFd:
    """Somebody else's wakeup descriptor, recognised again before each use.

    Its owner may close it without telling us, and the number may then belong to a checkpoint that is
    being written: a forwarded byte must not land there.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._identity = self._identify()

    def _identify(self) -> tuple[int, int] | None:
        try:
            found = os.fstat(self.fd)
        except OSError:
            return None
        if not (stat.S_ISSOCK(found.st_mode) or stat.S_ISFIFO(found.st_mode)):
            return None
        return found.st_dev, found.st_ino

    def alive(self) -> bool:
        return self._identity is not None and self._identify() == self._identity

    def write(self, data: bytes) -> None:
        if not self.alive():
            return
        try:
            os.write(self.fd, data)
        except OSError:
            pass


class _Reader(threading.Thread):
    """Reads the wakeup pipe and pairs the two reports of each signal."""

    def __init__(self, listener: _Listener, fd: int) -> None:
        super().__init__(name="holdfast-signals", daemon=True)
        self.retired = False
        self._listener = listener
        self._fd = fd
        self._bytes_seen: dict[int, deque[float]] = {}
        self._late: dict[int, _Call] = {}

    def run(self) -> None:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        while not self.retired:
            if self._late and not poller.poll(_TWIN_S * 1000):
                for call in self._late.values():
                    self._emit(call.signum, call.at, call.wall)
                self._late.clear()
                self._listener.flush()
                continue
            data = os.read(self._fd, 4096)
            at, wall = time.monotonic(), time.time()
            for byte in data:
                if byte == _CALL and self._listener.calls:
                    self._on_call(self._listener.calls.popleft())
                elif byte in self._listener.installed:
                    self._on_byte(byte, at, wall)
            self._listener.forward(bytes(byte for byte in data if byte not in (_CALL, _WAKE)))
            self._listener.flush()

    def _on_byte(self, signum: int, at: float, wall: float) -> None:
        call = self._late.pop(signum, None)
        if call is not None:
            self._emit(signum, call.at, call.wall)
            return
        self._bytes_seen.setdefault(signum, deque(maxlen=_PENDING_MAX)).append(at)
        self._emit(signum, at, wall)

    def _on_call(self, call: _Call) -> None:
        seen = self._bytes_seen.get(call.signum)
        if call.fd_was_ours:
            if seen:
                # The usual order. The byte may be minutes old: the main thread was in C.
                seen.popleft()
            else:
                # The handler ran before its byte was written, which happens when the kernel chose
                # another thread for the C half; or the descriptor came back to us in between and there
                # is no byte. The next milliseconds tell which.
                previous = self._late.pop(call.signum, None)
                if previous is not None:
                    self._emit(previous.signum, previous.at, previous.wall)
                self._late[call.signum] = call
            return
        # The descriptor is somebody else's, so the byte went there, unless it was taken between the
        # byte and the handler. A byte left over from calls that Python merged is older than that.
        if seen and call.at - seen[-1] < _TWIN_S:
            seen.clear()
        else:
            self._emit(call.signum, call.at, call.wall)

    def _emit(self, signum: int, at: float, wall: float) -> None:
        self._listener.pending.append((signum, Notice("signal", signal.Signals(signum).name, at, wall)))


class _Listener:
    """The handlers and the wakeup descriptor of this process, and who wants to know.

    The handler takes no lock: it may interrupt the main thread where that thread holds it. What it reads
    is replaced whole (tuples, frozensets) and never changed in place.
    """

    def __init__(self) -> None:
        self.installed: frozenset[int] = frozenset()
        self.calls: deque[_Call] = deque()
        self.pending: list[tuple[int, Notice]] = []
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._ours = self._handle  # one object, so that "is it still ours" is an identity test
        self._earlier: dict[int, list[_Handler]] = {}
        self._entries: dict[int, bytes] = {}
        self._calling: dict[int, _Calling] = {}
        self._pinned: frozenset[int] = frozenset()
        self._subscribers: tuple[SignalSource, ...] = ()
        self._had_subscriber = False
        self._unclaimed: set[int] = set()
        self._deferred: deque[tuple[int, str, BaseException]] = deque()
        self._pipe: tuple[int, int] | None = None
        self._forward: _WakeupFd | None = None
        self._reader: _Reader | None = None
        self._hooked = False

    # Subscribing, on any thread.

    def pin(self, signals: tuple[signal.Signals, ...]) -> None:
        with self._lock:
            before = self._pinned
            self._pinned |= frozenset(signals)
            self._settle()
            if unheard := self.unheard(signals):
                self._pinned = before
                raise HoldfastError(
                    f"listen() for {', '.join(s.name for s in unheard)} was called in the thread "
                    f"{threading.current_thread().name!r}, but Python installs signal handlers only in the main "
                    "thread: call it there, before starting this thread"
                )

    def subscribe(self, source: SignalSource) -> None:
        with self._lock:
            # In this order: flush() reads the second before the first, and drops what nobody wants
            # only once somebody has been there.
            self._subscribers = (*(s for s in self._subscribers if s is not source), source)
            self._had_subscriber = True
            self._unclaimed = set()
            retired = self._settle()
            self._poke(_WAKE)  # what came before the first subscriber is waiting
        self._join(retired)

    def unsubscribe(self, source: SignalSource) -> None:
        with self._lock:
            self._subscribers = tuple(s for s in self._subscribers if s is not source)
            retired = self._settle()
        self._join(retired)

    def unheard(self, signals: Iterable[signal.Signals]) -> list[signal.Signals]:
        return [s for s in signals if s not in self.installed]

    def replaced(self, signals: Iterable[signal.Signals]) -> str | None:
        current = ((s, signal.getsignal(s)) for s in signals if s in self.installed)
        others = [f"{s.name} by {_describe(handler)}" for s, handler in current if handler is not self._ours]
        return ", ".join(others) or None

    def reinstall(self, signals: Iterable[signal.Signals]) -> bool:
        if not _in_main_thread():
            return self._reinstall_from_afar(signals)
        with self._lock:
            for signum in signals:
                if signum in self.installed:
                    if signal.getsignal(signum) is not self._ours:
                        self._keep(signum, signal.getsignal(signum))
                    # Even if it is ours, as far as Python knows: C may have put another in its place.
                    self._put_in_place(signum)
            if self._pipe is not None and self._reader is not None:
                self._take_wakeup_fd(self._pipe[1])
        return True

    def _reinstall_from_afar(self, signals: Iterable[signal.Signals]) -> bool:
        """On any thread: where Python still takes ours for the handler, make it the kernel's again."""
        done = True
        for signum in signals:
            entry = self._entries.get(signum)
            ours = signum in self.installed and signal.getsignal(signum) is self._ours
            done = done and ours and entry is not None and put_back(signum, entry)
        return done

    # Handlers and the descriptor, in the main thread alone.

    def _put_in_place(self, signum: int) -> None:
        signal.signal(signum, self._ours)
        entry = handler_of(signum)
        if entry is not None:
            self._entries[signum] = entry

    def _settle(self) -> _Reader | None:
        """Installs what is wanted and restores what is not; gives the reader to wait for, if one has to end.

        Outside the main thread nothing can change. Handlers that nobody wants then stay, and act as
        the earlier ones would.
        """
        wanted = self._pinned.union(*(s.signals for s in self._subscribers))
        if wanted == self.installed or not _in_main_thread():
            return None
        for signum in self.installed - wanted:
            self._restore(signum)
        if not wanted:
            return self._close()
        if self._reader is None:
            self._open()
        for signum in wanted - self.installed:
            if signal.getsignal(signum) is not self._ours:
                self._keep(signum, signal.getsignal(signum))
            # First the book, then the handler: a signal may come before the next line.
            self.installed |= {signum}
            self._put_in_place(signum)
        return None

    def _open(self) -> None:
        if not self._hooked:
            os.register_at_fork(
                before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
            )
            self._hooked = True
        if self._pipe is None:
            # The pipe stays open when the listener stops: someone who saved our descriptor as the one
            # before theirs may put it back, and the number must not be another file's by then.
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
        stale = select.poll()
        stale.register(self._pipe[0], select.POLLIN)
        while stale.poll(0):
            os.read(self._pipe[0], 4096)
        self.calls.clear()
        self._pid = os.getpid()
        self._forward = None
        self._reader = _Reader(self, self._pipe[0])
        self._reader.start()
        self._take_wakeup_fd(self._pipe[1])

    def _close(self) -> _Reader | None:
        reader, self._reader = self._reader, None
        if self._pipe is None or reader is None:
            return None
        target = self._forward.fd if self._forward is not None and self._forward.alive() else -1
        current = signal.set_wakeup_fd(target)
        if current != self._pipe[1]:
            _set_wakeup_fd(current)
        reader.retired = True
        self._poke(_WAKE)
        return reader

    def _take_wakeup_fd(self, ours: int) -> None:
        current = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if current != ours:
            self._forward = _WakeupFd(current) if current != -1 else None

    def _keep(self, signum: int, handler: _Handler) -> None:
        stack = self._earlier.setdefault(signum, [])
        if handler in stack:
            stack.remove(handler)
        stack.append(handler)

    def _restore(self, signum: int) -> None:
        """Puts the earlier handler back, unless ours was replaced; the replacement may still call ours."""
        self.installed -= {signum}
        stack = self._earlier.get(signum, [])
        if signal.getsignal(signum) is self._ours:
            handler = stack[-1] if stack else None
            # None: it was installed from C, and Python has no way to put it back.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
            del stack[-1:]

    def leave_child(self) -> None:
        """After a fork, in the child: as if there had never been a listener."""
        self._lock = threading.RLock()  # another thread may have held it
        for signum in self.installed:
            self._restore(signum)
        if self._pipe is not None:
            current = signal.set_wakeup_fd(-1)
            if current != self._pipe[1]:
                _set_wakeup_fd(current)
            for fd in self._pipe:
                os.close(fd)
        self._pipe = self._reader = self._forward = None
        self._pinned, self._subscribers, self._had_subscriber, self._unclaimed = frozenset(), (), False, set()
        self.pending, self.calls, self._deferred = [], deque(), deque()

    # The handler, in the main thread, between two bytecodes of anything.

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        at, wall = time.monotonic(), time.time()
        outer = self._calling.get(signum)
        chained = outer is not None and outer.frame is frame
        # A process id that is not ours: a fork that ran no hooks. Not installed: a handler that
        # replaced ours and outlived the listener calls us.
        if chained or signum not in self.installed or os.getpid() != self._pid:
            self._call_earlier(signum, frame, as_without_us=True)
            return
        self._report(signum, at, wall)
        sources = [s for s in self._subscribers if signum in s.signals]
        if sources:
            try:
                self._call_earlier(signum, frame, as_without_us=False)
            except BaseException as raised:
                # Traceback frames would keep the training loop's tensors alive.
                raised.__traceback__ = None
                for source in sources:
                    source.deferred_exit = source.deferred_exit or raised
                self._deferred.append((signum, _describe(self._earlier[signum][-1]), raised))
                self._poke(_WAKE)
            return
        # Nobody to act on it: the first one is kept for whoever starts next.
        first = not self._had_subscriber and signum not in self._unclaimed
        self._unclaimed.add(signum)
        self._call_earlier(signum, frame, as_without_us=not first)

    def _report(self, signum: int, at: float, wall: float) -> None:
        if self._pipe is None:
            return
        ours = self._pipe[1]
        try:
            current = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        except ValueError:
            current = ours  # somebody calls the handler by hand, outside the main thread
        if current == -1:
            self._forward = None  # its owner is done with it; ours stays
        elif current != ours:
            _set_wakeup_fd(current)
        # One byte for one call: the order of bytes in the pipe is what pairs the two reports.
        self.calls.append(_Call(signum, at, wall, current == ours))
        if not self._poke(_CALL):
            self.calls.pop()

    def _call_earlier(self, signum: int, frame: FrameType | None, *, as_without_us: bool) -> None:
        """Calls the handler that was there before ours.

        After ``reinstall()`` that one may itself call ours, as the one it replaced, with the frame that
        it was given: then the next older one is meant.
        """
        outer = self._calling.get(signum)
        depth = 0
        if outer is not None and outer.frame is frame:
            depth, as_without_us = outer.depth + 1, outer.as_without_us
        stack = self._earlier.get(signum, [])
        handler = stack[-1 - depth] if depth < len(stack) else signal.SIG_IGN
        self._calling[signum] = _Calling(frame, depth, as_without_us)
        try:
            if callable(handler):
                if as_without_us or handler is not signal.default_int_handler:
                    handler(signum, frame)
            elif as_without_us and handler is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
                signal.raise_signal(signum)
        finally:
            if outer is None:
                self._calling.pop(signum, None)
            else:
                self._calling[signum] = outer

    # Called by the reader thread.

    def forward(self, data: bytes) -> None:
        forward = self._forward
        if data and forward is not None:
            forward.write(data)

    def flush(self) -> None:
        """Hands the pending notices to their subscribers, and says what the handler must not say itself."""
        while self._deferred:
            signum, handler, raised = self._deferred.popleft()
            _log.warning(
                "the earlier handler of %s, %s, raised %r; it is held back until the checkpoint is committed, so that "
                "it does not end the training loop in the middle of a step",
                signal.Signals(signum).name,
                handler,
                raised,
            )
        keep = not self._had_subscriber
        subscribers = self._subscribers
        waiting, self.pending = self.pending, []
        for signum, notice in waiting:
            sources = [s for s in subscribers if signum in s.signals]
            for source in sources:
                source._hand_over(notice)
            if not sources and keep:
                self.pending = [*self.pending, (signum, notice)][-_PENDING_MAX:]

    def _poke(self, byte: int) -> bool:
        if self._pipe is None:
            return False
        try:
            return os.write(self._pipe[1], bytes((byte,))) == 1
        except BlockingIOError:
            return False  # full: the reader has plenty to wake up for

    def _join(self, reader: _Reader | None) -> None:
        if reader is not None and reader is not threading.current_thread():
            reader.join(_JOIN_S)


def _checked(signals: Iterable[int]) -> tuple[signal.Signals, ...]:
    unique = tuple(dict.fromkeys(signal.Signals(s) for s in signals))
    if not unique:
        raise ConfigError("signals is empty: name at least one, such as TERM")
    for s in unique:
        if s in _REFUSED:
            raise ConfigError(f"signals holds {s.name}, which cannot be a notice: {_REFUSED[s]}; choose TERM or USR1")
    return unique


def _describe(handler: _Handler) -> str:
    if handler is None:
        return "a handler installed from C"
    if isinstance(handler, int):
        return signal.Handlers(handler).name
    named = handler if hasattr(handler, "__qualname__") else type(handler)
    return f"{getattr(named, '__module__', None) or '?'}.{named.__qualname__}"


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _set_wakeup_fd(fd: int) -> None:
    """Puts somebody's descriptor back; one that they closed since is no longer worth having."""
    try:
        signal.set_wakeup_fd(fd)
    except (OSError, ValueError):
        pass


# Between the fork and the child's hook the child still has our handler and our pipe, and a signal sent
# to it would be read by the parent. The signals are blocked over that window and stay pending.

_mask = threading.local()


def _before_fork() -> None:
    # Read first: blocking may run handlers that raise, and the mask must be known even then.
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    signal.pthread_sigmask(signal.SIG_BLOCK, _listener.installed)


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _after_fork_in_child() -> None:
    _listener.leave_child()
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


_listener = _Listener()
