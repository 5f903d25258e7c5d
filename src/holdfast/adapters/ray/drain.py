"""Notices that come from Ray itself: the node is being drained, or Ray Train was told so.

``ray drain-node``, an autoscaler that gives a node back, and SIGTERM to ``ray start --block`` (what a pod
gets) all drain the node; its workers get no signal. Ray Train looks for drains every five seconds. Here
each worker asks about its own node once a second, which the head node answers from memory; the others
learn of it from the agreement. What Ray Train has heard by itself is a notice too, since it restarts the
workers at the deadline whatever they do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast.notice.base import Deliver, Notice

log = logging.getLogger("holdfast")

POLL_S = 1.0


class DrainSource:
    """Delivers one notice when ``draining`` or ``told`` says when the worker will be stopped."""

    def __init__(
        self,
        draining: Callable[[], int | None],
        told: Callable[[], int | None],
        poll_s: float = POLL_S,
    ) -> None:
        """Both return the deadline in milliseconds since the epoch, 0 where it is not known; None: no notice."""
        self._looks = ((draining, "drain of the Ray node"), (told, "preemption of Ray Train workers"))
        self._poll_s = poll_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, deliver: Deliver) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, args=(deliver,), name="holdfast-drain", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self._thread = None

    def _watch(self, deliver: Deliver) -> None:
        complained = False
        while not self._stop.is_set():
            try:
                notice = self._look()
            except Exception as error:
                # The head node restarts, say. What Ray Train hears is looked at again too, in a second.
                if not complained:
                    log.warning("Ray does not tell whether this node is drained (%s); asking again", error)
                complained, notice = True, None
            if notice is not None:
                try:
                    deliver(notice)
                except Exception:
                    log.exception("the receiver of the notice %s failed", notice.detail)
                return
            self._stop.wait(self._poll_s)

    def _look(self) -> Notice | None:
        for look, detail in self._looks:
            deadline_ms = look()
            if deadline_ms is not None:
                wall = time.time()
                grace_s = max(0.0, deadline_ms / 1000 - wall) if deadline_ms else None
                return Notice("ray", detail, time.monotonic(), wall, grace_s)
        return None


def draining(node: str) -> int | None:
    """When the node is drained by: milliseconds since the epoch, 0 for no deadline; None: it is not drained."""
    from ray._private.state import state

    nodes: dict[str, Any] = state.get_draining_nodes()
    return nodes.get(node)
