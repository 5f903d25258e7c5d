"""A notice source: datagrams on a UNIX socket, as an in-house scheduler might send them.

Guarantees: the first message after ``start`` is one notice; none after ``stop``. A JSON object may say how long the job
has, in seconds: ``{"grace": 20}``. No content is harmful: at most 4 KiB are read, and anything else is only quoted.

In a training script, before ``holdfast.Run``::

    listen_on("/run/scheduler/job-17.sock")
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time

from holdfast.notice.base import Deliver, Notice
from holdfast.runtime.environment import surround, surroundings

log = logging.getLogger(__name__)


class SocketSource:
    """Delivers one notice when a message arrives at ``path``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._stopped = threading.Event()
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self, deliver: Deliver) -> None:
        self.stop()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)  # of a process that was killed
        # Bound here and not on the thread: a message that is sent right after start() returns is heard.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._listen,
            args=(self._socket, self._stopped, deliver),
            name="holdfast-notice-socket",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        if self._socket is None or self._thread is None:
            return
        self._stopped.set()
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._socket = self._thread = None

    def _listen(self, messages: socket.socket, stopped: threading.Event, deliver: Deliver) -> None:
        message = messages.recv(4096)
        if stopped.is_set():
            return
        text = ascii(message.decode("utf-8", "replace"))[:200]
        try:
            deliver(Notice("scheduler", f"{self.path}: {text}", time.monotonic(), time.time(), _grace_s(message)))
        except Exception:
            log.exception("the receiver of the notice from %s failed", self.path)


def _grace_s(message: bytes) -> float | None:
    """Seconds until the kill; None where the message does not say: the setting ``grace_period`` decides then."""
    with contextlib.suppress(ValueError, RecursionError, OverflowError):
        content = json.loads(message)
        grace = content.get("grace") if isinstance(content, dict) else None
        if isinstance(grace, int | float) and 0 <= grace < float("inf"):
            return float(grace)
    return None


def listen_on(path: str) -> None:
    """Let every run of this process listen to ``path`` too. One rank per node is enough: the ranks agree."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        before = surroundings()
        surround(dataclasses.replace(before, sources=lambda: [*before.sources(), SocketSource(path)]))
