"""``holdfast doctor``: what will hurt later."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated

import typer

from holdfast.cli import checks
from holdfast.cli.adapters import check_adapters, look_at_adapters
from holdfast.cli.checks import ERROR, OK, WARNING, Finding
from holdfast.cli.output import PROBLEM, Json, console, emit, guarded, parse_bytes, styled
from holdfast.config import settings_table
from holdfast.errors import HoldfastError
from holdfast.launch.runs import RUNS, RunNotFoundError, RunPlace, place_of, resolve
from holdfast.launch.supervisor import child_environ
from holdfast.store import Backend

HELP = """Look for what will hurt later: a grace period that is too short, a location that cannot be written or is
too small, a file system that does not keep its word, a signal handler that someone replaced.

And see which adapters act on scripts that do not know holdfast, and why.

Exit codes: 0 nothing found, 1 warnings or errors."""


@guarded
def doctor(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN|LOCATION]", help="A run, or a place where one shall save.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Size of a checkpoint, such as 2GB: measures how long a save takes.")
    ] = None,
    as_json: Json = False,
) -> None:
    place = _place(run)
    environ = environ_of(place)
    adapters = look_at_adapters(environ)
    findings = examine(place, parse_bytes(size) if size is not None else None, environ)
    findings += check_adapters(adapters, environ)
    problems = [finding for finding in findings if finding.severity != OK]
    if as_json:
        emit(
            {
                "location": place.location,
                "ok": not problems,
                "findings": [dataclasses.asdict(finding) for finding in findings],
                "adapters": [dataclasses.asdict(adapter) for adapter in adapters],
            }
        )
    else:
        _tell(findings)
    if problems:
        raise typer.Exit(PROBLEM)


def _place(text: str | None) -> RunPlace:
    try:
        return resolve(text)
    except RunNotFoundError:
        return place_of(text or RUNS)  # a place that is still empty


def environ_of(run: RunPlace) -> dict[str, str]:
    """What a start of this run would find in its environment."""
    launch = run.launch()
    return dict(os.environ) if launch is None else child_environ(launch.spec)


def examine(run: RunPlace, size: int | None, environ: dict[str, str]) -> list[Finding]:
    launch, attempt = run.launch(), run.attempt()
    settings, findings = checks.check_settings(environ)
    told = attempt is None or any(environ.get(name) for name in settings_table()["grace_period"].env)
    grace_s = settings.grace_period if told or attempt is None else attempt.grace_s
    live = run.live_state() in ("running", "starting")
    backends: list[Backend] = []
    try:
        backends = run.backends()
        if "://" in run.location and len(backends) == 1 and not run.location.startswith("file:"):
            findings.append(
                Finding(
                    WARNING,
                    "fallback",
                    f"{backends[0].uri} has no fallback",
                    "while it is out of reach, nothing can be saved",
                    "set HOLDFAST_FALLBACK_DIR to a disk of the machine or a volume that outlives it",
                )
            )
    except HoldfastError as error:
        findings.append(Finding(ERROR, "location", str(error), "nothing can be saved there", "correct the location"))
    for order, backend in enumerate(backends):
        found = list(checks.check_backend(backend, fallback=order > 0, live=live))
        findings += found
        if not any(finding.severity == ERROR for finding in found):
            findings += checks.check_room(backend, settings, size)
            if order == 0:
                findings += checks.check_time(backend, settings, grace_s, size)
    findings += checks.check_torchrun(environ, grace_s, supervised=launch is not None and launch.is_alive())
    findings += checks.check_shared_memory()
    if backends:
        try:
            findings += checks.check_history(run, live=live)
        except OSError as error:
            findings.append(Finding(ERROR, "journal", str(error), "what happened cannot be told", "check the rights"))
    return findings


def _tell(findings: list[Finding]) -> None:
    out = console()
    marks = {ERROR: ("✗", "bold red"), WARNING: ("!", "bold yellow"), OK: ("✓", "green")}
    for finding in findings:
        mark, style = marks[finding.severity]
        out.print(styled(mark, style), f" {finding.check}: {finding.found}", sep="", markup=False)
        if finding.means:
            out.print(f"    {finding.means}", markup=False)
        if finding.do:
            out.print(f"    → {finding.do}", markup=False)
    errors = sum(finding.severity == ERROR for finding in findings)
    warnings = sum(finding.severity == WARNING for finding in findings)
    out.print(f"{errors} errors, {warnings} warnings" if errors or warnings else "nothing found")
