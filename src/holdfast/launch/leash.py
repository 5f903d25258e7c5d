"""Become another program that gets SIGTERM when the process that started it dies, however it dies.

``python -I -S leash.py PARENT PROGRAM ARGUMENT…``, run by its path: it needs the standard library alone
and costs some ten milliseconds. The wish is kept by the kernel across ``exec``, so that a launcher that
was killed with SIGKILL still makes its workers save and leave.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def leashed(parent: int, command: list[str]) -> list[str]:
    """The command line that starts ``command`` so that it gets SIGTERM when ``parent`` dies."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(parent), *command]


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # it died before the wish was made
        sys.exit(128 + signal.SIGTERM)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"cannot start {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
