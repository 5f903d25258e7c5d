"""Who is there."""

from __future__ import annotations

import contextlib

import psutil


def processes_of(*words: str) -> list[psutil.Process]:
    """Live processes whose command line holds one of the words."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and any(word in line for word in words):
                found.append(process)
    return found
