"""What all commands have in common: exit codes, one-line errors, tables for people, JSON for programs.

Results go to stdout, everything else to stderr. With ``--json`` nothing but one JSON value is on stdout,
an error included: ``{"error": {"kind": …, "message": …}}``.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from holdfast.base.words import shown
from holdfast.errors import (
    CheckpointNotFoundError,
    ConfigError,
    HoldfastError,
    JobNotFoundError,
    LocationBusyError,
    MissingExtraError,
)
from holdfast.launch.control import NotLiveError
from holdfast.launch.runs import RunNotFoundError
from holdfast.progress import redact

if TYPE_CHECKING:
    from rich.console import Console

OK, PROBLEM, USAGE, NOT_FOUND, BUSY = 0, 1, 2, 3, 4

_KINDS: tuple[tuple[type[Exception], str, int], ...] = (
    (RunNotFoundError, "not_found", NOT_FOUND),
    (NotLiveError, "not_live", NOT_FOUND),
    (CheckpointNotFoundError, "not_found", NOT_FOUND),
    (JobNotFoundError, "not_found", NOT_FOUND),
    (LocationBusyError, "busy", BUSY),
    (ConfigError, "usage", USAGE),
    (MissingExtraError, "usage", USAGE),
    (HoldfastError, "problem", PROBLEM),
    (TimeoutError, "timeout", PROBLEM),
    (OSError, "problem", PROBLEM),
)

EXIT_CODES = "Exit codes: 0 fine, 1 a problem was found, 2 wrong usage or setting, 3 not found, 4 busy."

Json = Annotated[bool, typer.Option("--json", help="Machine-readable; nothing else on stdout.")]


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Errors that a person can act on are one line and an exit code, not a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (HoldfastError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            kind, code = next((kind, code) for known, kind, code in _KINDS if isinstance(error, known))
            fail(str(error), kind, code, as_json=bool(kwargs.get("as_json")))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return run


def fail(message: str, kind: str = "problem", code: int = PROBLEM, *, as_json: bool = False) -> NoReturn:
    message = str(redact(message))
    if as_json:
        emit({"error": {"kind": kind, "message": message}})
    else:
        note(message, error=True)
    raise typer.Exit(code)


def note(message: str, *, error: bool = False) -> None:
    """A line for people, on stderr."""
    label = typer.style("error:", fg="red", bold=True) if error else ""
    typer.echo(f"{label} {shown(message)}".strip(), err=True)


def say(message: str) -> None:
    """A line for people, on stdout."""
    typer.echo(shown(message))


def emit(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
    sys.stdout.flush()


def console(*, stderr: bool = False) -> Console:
    """Prints texts as they are: none is markup, and a terminal acts on none."""
    from rich.console import Console

    from holdfast.cli.plain_text import Escaping

    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    made.push_render_hook(Escaping())
    if not made.is_terminal:
        made.width = 200  # a log or a pipe: no line is to be folded
    return made


def show_table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """``columns``: heading, and ``l`` or ``r``."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading, side in columns:
        table.add_column(heading, justify="right" if side == "r" else "left", no_wrap=side == "r")
    for row in rows:
        # As Text, not as markup: an error message may hold brackets.
        table.add_row(*(cell if hasattr(cell, "__rich_console__") else Text(str(cell)) for cell in row))
    console().print(table)


def styled(text: str, style: str) -> Any:
    from rich.text import Text

    return Text(text, style=style)


def human_bytes(count: float | None) -> str:
    if count is None:
        return "–"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def human_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} d"


def human_age(since: float | None) -> str:
    return "–" if since is None else f"{human_seconds(max(0.0, time.time() - since))} ago"


def parse_bytes(text: str) -> int:
    """``500MB``, ``2G``, ``1048576``."""
    number, unit = text.strip().upper().removesuffix("B").removesuffix("I"), 1
    if number and number[-1] in "KMGT":
        unit = 1000 ** (1 + "KMGT".index(number[-1]))
        number = number[:-1]
    try:
        count = int(float(number) * unit)
    except ValueError:
        count = 0
    if count <= 0:
        raise ConfigError(f"--size={text!r} is not accepted; it must be a number of bytes such as 500MB or 2GB")
    return count
