"""What the attacks share: another user, odd files, and commands that must end in time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cli.cli_helpers import HOLDFAST, environ

NOBODY = 65534
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user's process is started")


def as_another_user(code: str, *arguments: str | Path) -> None:
    """Run code in a process of another user. It becomes that user by itself: the interpreter may be root's alone."""
    become = f"import os, sys, time; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY}); "
    subprocess.run([sys.executable, "-I", "-S", "-c", become + code, *map(str, arguments)], check=True)


def ended(*arguments: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command of holdfast in a process of its own. One that hangs, or dies of an exception, fails the test."""
    done = subprocess.run(
        [*HOLDFAST, *map(str, arguments)],
        cwd=cwd,
        env=environ(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


START = """
import sys
from holdfast.agree import LocalBoard
from holdfast.config import Settings
from holdfast.runtime.session import Place, announce, open_session, resume
session = open_session(Settings.load({}, dir=sys.argv[1]), Place(0, 1, LocalBoard()))
print("resumes", resume(session, lambda checkpoint: None))
announce(session)
session.journal.record("end")
"""


def started(location: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A start of a run there, as of any framework, up to where it trains."""
    return subprocess.run(
        [sys.executable, "-c", START, str(location)],
        env=environ(**variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _link_to_file(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def _folder(path: Path) -> None:
    path.mkdir()


def _huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _deep(path: Path) -> None:
    path.write_text("[" * 200_000)


ODD: dict[str, Callable[[Path], None]] = {
    "pipe": _pipe,
    "link to a device": _link_to_device,
    "link to a file": _link_to_file,
    "folder": _folder,
    "huge": _huge,
    "deep": _deep,
}
"""What an attacker puts in place of a small file, by name."""
