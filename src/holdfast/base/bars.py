"""Log lines that begin at the beginning of a line, also where tqdm has drawn a progress bar.

A bar leaves the cursor behind its last character, and a message of the watcher thread would be glued to it. The line of
the bar is ended first; tqdm draws the bar anew below the message.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

_drawn: dict[int, float] = {}
"""By bar: when it was drawn for the last time before its line was ended."""


def keep_apart(log: logging.Logger) -> None:
    """End the line of a progress bar before each message of this logger."""
    if not any(isinstance(one, _EndOfLine) for one in log.filters):
        log.addFilter(_EndOfLine())


class _EndOfLine(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        with contextlib.suppress(Exception):  # a bar that ends meanwhile, or a tqdm that is not what it was
            if _bar_is_drawn() and _comes_to_stderr(record):
                sys.stderr.write("\n")
        return True


def _bar_is_drawn() -> bool:
    """Whether the cursor may stand behind a bar on stderr."""
    tqdm: Any = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    found = False
    for bar in list(getattr(tqdm, "_instances", ())):
        if getattr(bar.fp, "_wrapped", bar.fp) is sys.stderr and _drawn.get(id(bar)) != bar.last_print_t:
            _drawn[id(bar)] = bar.last_print_t
            found = True
    return found


def _comes_to_stderr(record: logging.LogRecord) -> bool:
    logger: logging.Logger | None = logging.getLogger(record.name)
    handled = False
    while logger is not None:
        for handler in logger.handlers:
            handled = True
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                return True
        logger = logger.parent if logger.propagate else None
    return not handled  # logging's last resort
