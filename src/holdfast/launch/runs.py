"""Runs on this machine: where they lie, and what can be told of one without asking it.

A run is named by its location, a path or a URI, or by the folder that it keeps its journal in. Without
a name it is the one that a person in this folder most likely means.
"""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.base.clock import Deadline
from holdfast.base.process import Owner
from holdfast.base.run_directory import ATTEMPT, JOURNAL, LAUNCH, home_of
from holdfast.base.small_files import RefusedFileError, read_json
from holdfast.config import settings_table
from holdfast.errors import ConfigError, HoldfastError
from holdfast.launch import procs
from holdfast.launch.records import ENDED, PAUSED, Attempt, Launch, read_attempt, read_launch
from holdfast.locations import without_secrets
from holdfast.progress import ProgressFileError, read_journal, read_progress
from holdfast.store import Backend, open_backend
from holdfast.store.manifest import step_of

RUNS = "holdfast-runs"
FOLDER = "holdfast-launch-"
"""Begins the name of a launcher's own folder among the temporary files."""
STARTING = "starting"
"""A file in it, until the run has shown itself: whose launcher it is."""
_HOME = ".holdfast"
_PROGRESS = "training_progress.json"


class RunNotFoundError(HoldfastError, FileNotFoundError):
    """There is no run of that name. The message lists those that there are."""

    def __str__(self) -> str:  # FileNotFoundError would print the arguments as a tuple
        return str(self.args[0])


def _first(environ: Mapping[str, str], setting: str) -> str | None:
    return next((environ[name] for name in settings_table()[setting].env if environ.get(name)), None)


@dataclass(frozen=True, slots=True)
class RunPlace:
    """A run: where its checkpoints go, and where it keeps what is no checkpoint."""

    location: str
    home: str
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "location", without_secrets(self.location))

    @property
    def name(self) -> str:
        return os.path.basename(self.location.rstrip("/")) or self.location

    @property
    def journal_path(self) -> str:
        return os.path.join(self.home, JOURNAL)

    def attempt(self) -> Attempt | None:
        return read_attempt(self.home)

    def launch(self) -> Launch | None:
        return read_launch(self.home)

    def journal(self) -> list[dict[str, Any]]:
        try:
            return list(read_journal(self.journal_path))
        except (NotADirectoryError, RefusedFileError):
            return []

    def backends(self) -> list[Backend]:
        """The location, then the fallback if the run had one or the environment names one."""
        backends = [open_backend(self.location)]
        attempt = self.attempt()
        recorded = attempt.fallback if attempt else None
        fallback = recorded or _first(self.environ, "fallback")
        if fallback and fallback != backends[0].uri:
            try:
                backends.append(open_backend(fallback))
            except ConfigError:
                if fallback != recorded:  # a record may be of somebody else, and name anything
                    raise
        return backends

    @property
    def progress_path(self) -> str:
        attempt = self.attempt()
        if attempt is not None and attempt.progress_file:
            return attempt.progress_file
        return os.path.join(self.home if "://" in self.location else self.location, _PROGRESS)

    def progress(self) -> dict[str, Any]:
        """The progress file; empty if there is none that can be read."""
        try:
            return read_progress(self.progress_path)
        except (OSError, ProgressFileError):
            return {}

    def live_state(self) -> str | None:
        """``running``, ``paused`` or ``starting``; None: nothing of it is alive here."""
        attempt, launch = self.attempt(), self.launch()
        if attempt is not None and attempt.live():
            return "running"
        if launch is not None and launch.state != ENDED and launch.is_alive():
            return "paused" if launch.state == PAUSED else "starting"
        return None

    def state(self) -> str:
        """As :meth:`live_state`, else ``complete`` or ``stopped``."""
        if live := self.live_state():
            return live
        ends = [event for event in self.journal() if event["event"] in ("end", "attempt")]
        return "complete" if ends and ends[-1].get("outcome") == "complete" else "stopped"

    def changed(self) -> float:
        """When something was last heard of it."""
        times = [0.0]
        for name in (JOURNAL, ATTEMPT, LAUNCH):
            try:
                times.append(os.stat(os.path.join(self.home, name)).st_mtime)
            except OSError:
                continue
        return max(times)


def place_of(location: str) -> RunPlace:
    return RunPlace(location, home_of(location))


def _is_run(folder: str) -> bool:
    if os.path.isdir(os.path.join(folder, _HOME)):
        return True
    try:
        return any(step_of(name) is not None for name in os.listdir(folder))
    except OSError:
        return False


def below(folder: str = RUNS) -> list[RunPlace]:
    """The runs in a folder, those that live first, then the newest."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    found = [place_of(os.path.join(folder, name)) for name in names if _is_run(os.path.join(folder, name))]
    return sorted(found, key=lambda run: (run.live_state() is None, -run.changed()))


def named(text: str) -> RunPlace:
    """The run that is called ``text``: a location, a run's folder, a checkpoint in it, or a name below ``RUNS``."""
    if "://" in text:
        return place_of(text)
    for path in (text, os.path.join(RUNS, text)):
        folder = os.path.normpath(os.path.expanduser(path))
        if os.path.basename(folder) == _HOME or (step_of(os.path.basename(folder)) is not None):
            folder = os.path.dirname(os.path.abspath(folder))
        if _is_run(folder):
            return place_of(folder)
        attempt = read_attempt(folder)
        if attempt is not None:  # the home folder of a run on object storage
            return RunPlace(attempt.location, os.path.abspath(folder))
    what = "holds no run" if os.path.isdir(text) else "does not exist"
    raise RunNotFoundError(f"{text} {what}.{_candidates()}")


def _candidates() -> str:
    found = below()
    if not found:
        return " Give a run's location, a path or a URI, or set HOLDFAST_DIR"
    return " Runs here: " + ", ".join(run.location for run in found[:8]) + (", …" if len(found) > 8 else "")


def resolve(text: str | None, environ: Mapping[str, str] | None = None) -> RunPlace:
    """The run that is meant: the one named, else ``HOLDFAST_DIR``, else one of this folder."""
    if text:
        return named(text)
    told = _first(os.environ if environ is None else environ, "dir")
    if told:
        return place_of(told)
    found = below()
    if found:
        return found[0]
    if _is_run(os.curdir):
        return place_of(os.getcwd())
    raise RunNotFoundError(f"there is no run in {os.getcwd()} nor below {RUNS}/.{_candidates()}")


_LAUNCHER_S = 3.0
"""How long a launcher that was started just before may take to show itself."""


def about_to_start() -> bool:
    """Whether a launcher of this user lives whose run has not shown itself yet."""
    for path in glob.glob(os.path.join(tempfile.gettempdir(), f"{FOLDER}*", STARTING)):
        with contextlib.suppress(KeyError, ValueError, TypeError):
            if procs.is_alive(Owner.from_dict(read_json(path, own=True))):
                return True
    return False


def resolve_soon(text: str | None, limit: Deadline) -> RunPlace:
    """As :func:`resolve`; waits for a run that a launcher is just starting, and a moment for the launcher."""
    launcher = Deadline.after(_LAUNCHER_S)
    while True:
        try:
            run = resolve(text)
            if run.live_state() is not None or limit.passed() or not about_to_start():
                return run
        except RunNotFoundError:
            if limit.passed() or (launcher.passed() and not about_to_start()):
                raise
        time.sleep(0.2)
