"""A row of the battery: a command, the evidence that is compared, and the verdict that is expected."""

from __future__ import annotations

import ast
import enum
from dataclasses import dataclass, field
from pathlib import Path

IDIOMS = Path(__file__).parent / "idioms"

DURATIONS = (
    r" *\d+(\.\d+)? ?(ms|s|sec|seconds|it/s|s/it)\b",
    r"\d\d:\d\d(:\d\d)?",
    r"\d{4}-\d\d-\d\d",
)
"""Text that differs between any two runs."""


class Verdict(enum.StrEnum):
    """How a script must fare. In all cases it behaves with holdfast on as with holdfast off while nothing happens."""

    EXACT = "exact"
    """Interrupted and resumed, it prints the same lines and leaves the same files."""
    INEXACT = "inexact, and said"
    """It resumes and says that the result differs."""
    UNPROTECTED = "unprotected, and said at the start"
    """It says so at its start and dies of the signal; the next attempt starts from its beginning."""


@dataclass(frozen=True)
class Row:
    """A script and how it is judged."""

    name: str
    script: Path | None = None
    """The file that is copied into the working folder, under its own name."""
    command: tuple[str, ...] = ()
    """What follows ``python``, run in an interpreter of its own. Empty: the script alone, from the fork server."""
    args: tuple[str, ...] = ()
    """Arguments of a script that runs from the fork server."""
    world: int = 1
    """Ranks that run it, as torchrun starts them."""
    preload: str = "torch"
    """Modules that the fork server has imported, separated by commas."""
    env: dict[str, str] = field(default_factory=dict)
    prepare: tuple[tuple[str, ...], ...] = ()
    """Commands that make the data, run once, without holdfast; each run begins with a copy of what they left."""
    code: int = 0
    """Exit code when nothing happens."""
    verdict: Verdict = Verdict.EXACT
    says: str = ""
    """Pattern of holdfast's message, for the verdicts that need one."""
    resumes: str = "resuming from "
    """Pattern of what an attempt writes that resumes."""
    lines: str = ""
    """Pattern of the printed lines that are compared; empty: all."""
    leave_out: tuple[str, ...] = ()
    """Patterns of printed lines that do not count: bars, and what holdfast says in a script's own log."""
    unordered: bool = False
    """Several processes print: their lines come in any order."""
    ignore: tuple[str, ...] = DURATIONS
    """Patterns whose matches are taken out of lines and text files before they are compared."""
    ignore_files: tuple[str, ...] = ()
    """Globs of files that are not compared."""
    more_files: tuple[str, ...] = ()
    """Globs of files that an interruption may leave in addition: checkpoints of the framework's own form."""
    errors_differ: bool = False
    """Standard error of two runs differs by itself, or the script draws a bar there."""
    at_line: str = ""
    """Pattern of a printed line after which the signal comes; empty: at a seeded optimizer step of any process."""
    steps: tuple[float, float] = (0.35, 0.85)
    """The part of the run from which seeded steps are drawn."""
    kill_rank: int | None = None
    """SIGKILL to this rank instead of SIGTERM to the command."""
    ctrl_c: bool = False
    """SIGINT to the command and all of its processes, as a terminal sends it, instead of SIGTERM to the command."""
    worker: str = ""
    """Pattern of the title of a process below the command. SIGTERM goes to such a process, to the one that reaches the
    step where a step is drawn, and the command starts it again by itself."""
    attempts: int = 4
    """Most attempts until the run ends, the interrupted one included."""
    limit_s: float = 120.0
    """Of one attempt."""
    slow: bool = False
    """Left out of the part that each change runs."""
    copy: Path | None = None
    """A folder that is copied as the working folder: a checkout of somebody else's repository."""
    folder: str = ""
    """The folder of that copy in which the command is started and the data are made."""
    seed: bool = False
    """The script draws random numbers unseeded: each first attempt begins with the same ones, each further attempt with
    others."""
    not_run: str = ""
    """Why it is listed and does not run here."""
    idiom: str = ""
    """Whose idiom it is; from the script's docstring if empty."""

    def about(self) -> str:
        """One line: whose idiom it is."""
        if self.idiom or self.script is None:
            return self.idiom
        return (ast.get_docstring(ast.parse(self.script.read_text())) or "").partition("\n")[0]


def idiom(name: str, **options: object) -> Row:
    """A row for ``idioms/<name>.py``."""
    script = IDIOMS / f"{options.pop('file', name)}.py"
    return Row(name, script, **options)  # type: ignore[arg-type]
