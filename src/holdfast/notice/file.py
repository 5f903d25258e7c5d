"""A notice that comes as a file.

Guarantees: one notice when the file appears or changes after ``start``; none for a file that was left
there by an earlier life of the job, which would otherwise stop every new attempt at its first step. No
content is harmful: at most 4 KiB are read, and what cannot be understood is only quoted.

For schedulers that can run a command on the node but cannot signal the process, and for people:
``touch stop-please``. Polling, because inotify does not see what another machine writes on NFS.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time

from holdfast.errors import ConfigError
from holdfast.notice.base import Deliver, Notice

_log = logging.getLogger(__name__)

_READ_MAX = 4096
_QUOTE_MAX = 200
_SETTLE_S = 0.1
"""A file is often seen between its creation and its first byte; it is read again after this long."""

_Identity = tuple[int, int]


class FileSource:
    """Delivers one notice when ``path`` appears or changes.

    The content may be a JSON object whose ``grace`` is the number of seconds until the kill, or any text.
    """

    def __init__(self, path: str | os.PathLike[str], poll_s: float = 1.0) -> None:
        if not poll_s > 0:
            raise ConfigError(f"poll_s={poll_s!r} of the notice file {os.fspath(path)!r} must be above 0 seconds")
        self.path = os.fspath(path)
        self.poll_s = poll_s
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self, deliver: Deliver) -> None:
        self.stop()
        # Here and not on the thread: a file that appears right after start() returns is a notice.
        try:
            known, baseline = self._identify(), True
        except OSError as error:
            self._complain(error)
            known, baseline = None, False
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._watch,
            args=(deliver, self._stop, known, baseline),
            name="holdfast-notice-file",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        if self._stop is not None and self._thread is not None:
            self._stop.set()
            if self._thread is not threading.current_thread():
                self._thread.join(1.0)
        self._stop = self._thread = None

    def _watch(self, deliver: Deliver, stop: threading.Event, known: _Identity | None, baseline: bool) -> None:
        complained = not baseline
        while not stop.wait(self.poll_s):
            try:
                found = self._identify()
            except OSError as error:
                # Not the same as absent: what shows up when the file system answers again may be the old file.
                if not complained:
                    self._complain(error)
                complained = True
                continue
            if found is None or not baseline or found == known:
                known, baseline = found, True
                continue
            at, wall = time.monotonic(), time.time()
            text, grace_s = self._content(stop)
            if stop.is_set():
                return
            try:
                deliver(Notice("file", f"{self.path}: {text}" if text else self.path, at, wall, grace_s))
            except BaseException:
                _log.exception("the receiver of the notice from %s failed", self.path)
            return

    def _identify(self) -> _Identity | None:
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_mtime_ns, found.st_ino

    def _content(self, stop: threading.Event) -> tuple[str, float | None]:
        data = self._read()
        if not data.strip() or (data.lstrip().startswith(b"{") and _grace_s(data) is None):
            stop.wait(_SETTLE_S)
            data = self._read()
        text = " ".join(data.decode("utf-8", "replace").split())
        printable = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[: _QUOTE_MAX + 1])
        quoted = printable if len(printable) <= _QUOTE_MAX else printable[:_QUOTE_MAX] + "…"
        return quoted, _grace_s(data)

    def _read(self) -> bytes:
        try:
            # Non-blocking: the path may be a pipe without a writer.
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return os.read(fd, _READ_MAX)
        except OSError:
            return b""
        finally:
            os.close(fd)

    def _complain(self, error: OSError) -> None:
        _log.warning(
            "the notice file %s cannot be looked at (%s); it is tried again every %g s and is no notice until then",
            self.path,
            error,
            self.poll_s,
        )


def _grace_s(data: bytes) -> float | None:
    """The seconds in ``{"grace": 20}``; None for anything else."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    grace = content.get("grace") if isinstance(content, dict) else None
    if isinstance(grace, bool) or not isinstance(grace, int | float):
        return None
    try:
        seconds = float(grace)
    except OverflowError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
