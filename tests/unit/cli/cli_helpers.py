"""What the tests of the command line share: commands to run, processes to look at."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.launch import procs
from tests.kit import python_path

HERE = Path(__file__).parent
TRAINING = str(HERE / "tiny_training.py")
PRETEND = str(HERE / "pretend_training.py")
HOLDFAST = [sys.executable, "-m", "holdfast.cli"]


def environ(**changes: str) -> dict[str, str]:
    """This environment without what decides about runs, in colours or not."""
    ours = ("HOLDFAST_", "CHECKPOINT_", "TORCH_ELASTIC", "OMP_NUM")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "NO_COLOR": "1", "PYTHONPATH": python_path(), **changes}


@dataclass
class Done:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


def holdfast(*arguments: str | Path, cwd: Path | None = None, **changes: str) -> Done:
    """Run a command to its end: those that look after processes in one of their own, the others in this one."""
    if arguments[0] not in ("run", "resume"):
        wanted = environ(**changes)
        with contextlib.chdir(cwd or os.getcwd()):
            result = CliRunner().invoke(
                app, list(map(str, arguments)), env={name: wanted.get(name) for name in {*os.environ, *wanted}}
            )
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return Done(result.exit_code, result.stdout, result.stderr)
    done = subprocess.run(
        [*HOLDFAST, *map(str, arguments)],
        cwd=cwd,
        env=environ(**changes),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def json_of(*arguments: str | Path, code: int = 0, **options: Any) -> Any:
    """What a command prints with ``--json``, after looking at its exit code."""
    done = holdfast(*arguments, "--json", **options)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def start(*arguments: str | Path, output: Path, **changes: str) -> subprocess.Popen[bytes]:
    """A command in the background."""
    with output.open("ab") as file:
        return subprocess.Popen(
            [*HOLDFAST, *map(str, arguments)],
            env=environ(**changes),
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
        )


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true answer."""
    until = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.02)
    return answer


def events(location: Path, name: str) -> list[dict[str, Any]]:
    path = location / ".holdfast" / "journal.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


def processes_about(text: str) -> list[int]:
    """Processes whose command line holds ``text``, such as a test's own folder."""
    return [pid for pid in procs.table() if text in " ".join(procs.command_of(pid)) and pid != os.getpid()]
