"""``holdfast run``: start a script and keep it going."""

from __future__ import annotations

import os
import re
from typing import Annotated

import typer

from holdfast.cli.output import USAGE, Json, fail, guarded
from holdfast.cli.screen import open_screen
from holdfast.config import settings_table
from holdfast.errors import ConfigError
from holdfast.launch.records import LaunchSpec
from holdfast.launch.supervisor import Supervisor, carried_environ

_WORKERS = re.compile(r"[1-9]\d{0,4}|gpu|cpu|auto")
HELP = """Start a script, and start it again from where it was whenever it is interrupted.

Ctrl-C and SIGTERM save first and then leave; start the same command again to go on. A rank that is preempted or
killed leads to a restart at once. A script that fails without a new checkpoint is started again --max-restarts times.

Without -n the script runs as `python SCRIPT` would run it; with -n, under torchrun.

Exit codes: 0 complete, 130 and 143 saved after Ctrl-C or SIGTERM, 2 wrong usage or setting, 4 a run is live in that
place, else the script's own."""


@guarded
def run(
    program: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]…", help="The script and its arguments.")
    ] = None,
    module: Annotated[str | None, typer.Option("-m", "--module", help="Run a module instead of a script.")] = None,
    workers: Annotated[
        str | None, typer.Option("-n", "--workers", metavar="N", help="Ranks under torchrun; also gpu, cpu, auto.")
    ] = None,
    location: Annotated[
        str | None,
        typer.Option(
            "--dir", help="Where checkpoints go, unless the script says so itself: a path, s3://, gs:// or az://."
        ),
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts in a row without a new checkpoint.")] = 3,
    grace: Annotated[str | None, typer.Option(help="Seconds from a notice to the kill.")] = None,
    kill_wait: Annotated[str | None, typer.Option(help="Seconds of training between a notice and the save.")] = None,
    save_every: Annotated[str | None, typer.Option(help="'500 steps', '1 epoch', '5m' or 'never'.")] = None,
    keep: Annotated[str | None, typer.Option(help="How many checkpoints stay.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; older checkpoints are set aside.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but warnings.")] = False,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No status line.")] = False,
    as_json: Json = False,
) -> None:
    rest = list(program or [])
    if rest[:1] == ["--"]:
        del rest[0]
    if module is None and not rest:
        fail("give a script to run, or -m MODULE", "usage", USAGE, as_json=as_json)
    if module is None and not os.path.isfile(rest[0]):
        raise ConfigError(f"the script {rest[0]!r} does not exist in {os.getcwd()}")
    if workers is not None and not _WORKERS.fullmatch(workers):
        raise ConfigError(f"-n {workers!r} is not accepted; it must be a whole number of at least 1, gpu, cpu or auto")
    options = {"grace_period": grace, "kill_wait": kill_wait, "save_every": save_every, "keep": keep}
    table = settings_table()
    spec = LaunchSpec(
        program=rest if module is None else ["-m", module, *rest],
        workers=workers,
        dir=location,
        settings={table[name].env[0]: value for name, value in options.items() if value is not None},
        max_restarts=max_restarts,
        fresh=fresh,
        environ=carried_environ(),
    )
    raise typer.Exit(supervise(spec, quiet=quiet, progress=not no_progress, as_json=as_json))


def supervise(spec: LaunchSpec, *, quiet: bool = False, progress: bool = True, as_json: bool = False) -> int:
    screen = open_screen(quiet=quiet, progress=progress, as_json=as_json)
    try:
        return Supervisor(spec, screen).run()
    finally:
        screen.close()
