"""The ``holdfast`` command: all subcommands in one place."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from holdfast import __version__
from holdfast.cli import check, control, doctor, inspect, integrity, jobs, run, top

app = typer.Typer(
    name="holdfast",
    help="Training that survives preemption: saved just in time, resumed exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_AS_IS = {"allow_interspersed_args": False}
"""What follows the script belongs to the script."""

app.command("run", help=run.HELP, context_settings=_AS_IS)(run.run)
app.command("check", help=check.HELP, context_settings=_AS_IS)(check.check)
app.command("pause", help=control.PAUSE_HELP)(control.pause)
app.command("resume", help=control.RESUME_HELP)(control.resume)
app.command("preempt", help=control.PREEMPT_HELP)(control.preempt)
app.command("ls", help=inspect.LS_HELP)(inspect.ls)
app.command("show", help=inspect.SHOW_HELP)(inspect.show)
app.command("verify", help=integrity.VERIFY_HELP)(integrity.verify)
app.command("prune", help=integrity.PRUNE_HELP)(integrity.prune)
app.command("top", help=top.HELP)(top.top)
app.command("doctor", help=doctor.HELP)(doctor.doctor)
app.add_typer(jobs.app, name="jobs")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
