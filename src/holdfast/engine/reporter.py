"""The thread that tells people how the run is going: the progress file, once a second or every so many steps.

It runs on rank 0 alone, looks at what training left behind, and never makes training wait: reading a
loss from an accelerator happens here, not in the loop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from holdfast.notice import SignalSource
from holdfast.progress import Progress, ProgressFile

log = logging.getLogger("holdfast")

PERIOD_S = 1.0


class Reporter:
    """Writes the progress file until it is stopped."""

    def __init__(
        self,
        file: ProgressFile | None,
        look: Callable[[], Progress],
        signals: SignalSource | None,
        on_replaced: Callable[[str], None],
        *,
        only_when_poked: bool = False,
    ) -> None:
        self._file = file
        self._look = look
        self._signals = signals
        self._on_replaced = on_replaced
        self._only_when_poked = only_when_poked
        self._warned = False
        self._wake = threading.Event()
        self._stopped = False
        self._last_step = -1
        self._thread = threading.Thread(target=self._run, name="holdfast-report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poke(self) -> None:
        """Write now."""
        self._wake.set()

    def stop(self) -> None:
        """Write the last word and end."""
        self._stopped = True
        self._wake.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stopped:
            poked = self._wake.wait(PERIOD_S)
            self._wake.clear()
            if poked or not self._only_when_poked:
                self._write(force=poked)
            self._check_handler()
        self._write(force=True)

    def _write(self, *, force: bool) -> None:
        if self._file is None:
            return
        try:
            progress = self._look()
            if force or progress.step != self._last_step:
                self._last_step = progress.step or 0
                self._file.write(progress)
        except Exception:
            # A loss that cannot be read, say: progress is for people, and never a reason to stop training.
            log.debug("no progress this time", exc_info=True)

    def _check_handler(self) -> None:
        """A library that replaces our signal handler makes the run deaf: say so while there is still time."""
        if self._warned or self._signals is None:
            return
        other = self._signals.replaced()
        if other:
            self._warned = True
            log.warning(
                "the signal handler of holdfast was replaced by %s: a preemption would not be noticed. Create the Run "
                "after that library is set up",
                other,
            )
            self._on_replaced(other)
