"""A copy of a script's folder in which the script runs for a few steps: nothing of the user's is written.

Each run has a copy of its own, and its checkpoints lie beside it. What is too large to be copied can be linked, where
the script only reads it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.config import STOP_AT
from holdfast.errors import ConfigError

_MOST = 1 << 30
"""Bytes of a folder that are copied."""
_LEFT_OUT = {
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    "node_modules",
    "holdfast-runs",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
}
_OURS = ("HOLDFAST_", "CHECKPOINT_", "RAY_TRAIN_JIT_", "TORCHELASTIC_", "_HOLDFAST_")
_KILL_S = 10.0


@dataclass(frozen=True, slots=True)
class Program:
    """What is checked."""

    root: Path
    """The folder that is copied."""
    arguments: Sequence[str]
    """As for python: a script, relative to the root, or ``-m`` and a module, and what follows."""
    workers: int | None = None
    """Ranks under torchrun."""
    links: Sequence[str] = ()
    """Names in the root that are linked instead of copied."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process, or all ranks together, ended."""

    code: int | None
    """None: it was killed, since its time was up."""
    printed: list[list[str]]
    """What it printed, by rank."""
    errors: list[str]
    """And what came to stderr."""
    seconds: float


@dataclass(slots=True)
class Sandbox:
    """One copy, and the attempts that run in it."""

    program: Program
    folder: Path
    work: Path = field(init=False)
    checkpoints: Path = field(init=False)
    linked: list[str] = field(init=False)
    """What is not copied: a script that writes there writes the user's own files."""

    def __post_init__(self) -> None:
        self.work, self.checkpoints = self.folder / "work", self.folder / "checkpoints"
        self.linked = copy_folder(self.program.root, self.work, self.program.links)

    def run(self, stop_at: int, limit_s: float) -> Ended:
        """Run until the step at which the notice comes, or the end."""
        command = [sys.executable]
        logs = self.folder / "ranks"
        shutil.rmtree(logs, ignore_errors=True)
        if self.program.workers is not None:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.program.workers}"]
            command += ["--redirects=1", f"--log-dir={logs}"]  # lines of several ranks in one file mix by chance
        command += [argument.replace(str(self.program.root), str(self.work)) for argument in self.program.arguments]
        out, err = self.folder / "stdout", self.folder / "stderr"
        began = time.monotonic()
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                cwd=self.work,
                env=self._environ(stop_at),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        ranks = sorted(logs.rglob("stdout.log"), key=lambda path: int(path.parent.name))
        printed = [[line.rpartition("\r")[2].rstrip() for line in self._lines(path)] for path in ranks or [out]]
        return Ended(code, printed, self._lines(err), time.monotonic() - began)

    def _lines(self, path: Path) -> list[str]:
        return self.plain(path.read_text(errors="replace")).splitlines()

    def plain(self, text: str) -> str:
        """A text without the names of this copy."""
        return text.replace(str(self.work), str(self.program.root)).replace(str(self.folder), "<check>")

    def _environ(self, stop_at: int) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        return {
            **kept,
            "PWD": str(self.work),
            "WANDB_MODE": "offline",
            "PYTHONUNBUFFERED": "1",
            "HOLDFAST_ENABLED": "require",
            "HOLDFAST_DIR": str(self.checkpoints),
            "HOLDFAST_KILL_WAIT": "0",
            "HOLDFAST_GRACE_PERIOD": "60",
            STOP_AT: str(stop_at),
        }


def copy_folder(root: Path, to: Path, links: Sequence[str]) -> list[str]:
    """Copy it without what is known not to matter; returns what is linked. Raises ConfigError if it is too much."""
    size = 0
    linked = list(links)
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _LEFT_OUT and not _is_linked(root, folder, name, links)]
        if "pyvenv.cfg" in files:
            names.clear()
            continue
        target = to / os.path.relpath(folder, root)
        target.mkdir(parents=True, exist_ok=True)
        for name in [*files, *names]:
            source = os.path.join(folder, name)
            if os.path.islink(source):
                (target / name).symlink_to(os.path.realpath(source))
                linked.append(os.path.relpath(source, root))
                if name in names:
                    names.remove(name)
            elif name in files and os.path.isfile(source) and not _is_linked(root, folder, name, links):
                size += os.path.getsize(source)
                if size > _MOST:
                    raise ConfigError(
                        f"{root} holds more than {_MOST >> 30} GiB, too much for a copy in which the script can write: "
                        f"name with --link what the script only reads, such as --link data"
                    )
                shutil.copy2(source, target / name)
    for link in links:
        place = to / link
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(root / link)
    return linked


def _is_linked(root: Path, folder: str, name: str, links: Sequence[str]) -> bool:
    return os.path.normpath(os.path.relpath(os.path.join(folder, name), root)) in map(os.path.normpath, links)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_S)
