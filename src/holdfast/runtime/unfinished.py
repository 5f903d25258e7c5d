"""Runs in folders that are named by the clock: which one a start of the same command resumes.

``output_dir=f"out/{datetime.now():%Y%m%d-%H%M%S}"`` gives every start a folder of its own, so that a restart would not
find what the first start has saved. Each attempt therefore notes which command it is. A start whose folder is dated
looks at the folders beside it, and takes the newest one that the same command has begun and not finished. A start with
other arguments, another script or other framework settings is another run.

The folder that this start has named becomes a link to the first one, so that the files of the script itself are kept
in one place, too.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from holdfast.base.dated import dated_root, masked, siblings
from holdfast.base.run_directory import ATTEMPT, JOURNAL, home_of, start_folder
from holdfast.base.small_files import read_json
from holdfast.config import Settings
from holdfast.locations import expanded
from holdfast.progress import read_journal
from holdfast.store.local import is_in_use

log = logging.getLogger("holdfast")

_TASKS = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX", "PBS_ARRAY_INDEX", "LSB_JOBINDEX", "SGE_TASK_ID")
"""Variables that tell the tasks of one command from each other."""

_OURS = {".holdfast", "training_progress.json"}

_first_of: dict[str, str | None] = {}
"""By folder that this process has named: the folder that it uses instead, or None."""


@dataclass(frozen=True, slots=True)
class Command:
    """What tells the starts of one run from those of another. Digests only: arguments may hold secrets."""

    arguments: str
    """The command line, the folder it was started in, and the task of a job array."""
    details: str
    """The script's text, and what the framework was told."""

    @classmethod
    def of_this_process(cls, told: Mapping[str, object]) -> Command:
        """``told``: what the framework was told, as values that JSON can hold; others by their text."""
        arguments = [masked(argument) or argument for argument in sys.argv]
        tasks = [os.environ.get(name) for name in _TASKS]
        plain = json.dumps(_undated(dict(told)), sort_keys=True, default=str)
        return cls(
            _digest(json.dumps([arguments, start_folder(), tasks]).encode()), _digest(_script() + plain.encode())
        )


@dataclass(frozen=True, slots=True)
class _Run:
    root: str
    home: str
    started: float
    command: Mapping[str, str]
    run: str
    live: bool
    complete: bool


def location_of_run(location: str, settings: Settings, command: Command) -> str:
    """Where this start saves, on rank 0: ``location``, or where the run that it resumes does."""
    if "://" in location or settings.dir is not None:
        return location
    path = os.path.abspath(expanded(location))
    root = dated_root(path)
    if root is None:
        return location
    if root not in _first_of:
        _first_of[root] = (
            None if os.path.exists(os.path.join(home_of(path), ATTEMPT)) else _find(root, settings, command)
        )
        if (first := _first_of[root]) is not None:
            _announce(root, first, link(root, first))
    first = _first_of[root]
    return location if first is None else first + path[len(root) :]


def _find(root: str, settings: Settings, command: Command) -> str | None:
    """The folder of the run that this start resumes."""
    unfinished = []
    for folder in siblings(root):
        runs = [run for run in _runs_below(folder) if run.command.get("arguments") == command.arguments]
        if any(not run.complete for run in runs) and not any(run.live for run in runs):
            unfinished += [run for run in runs if not run.complete]
    mine = [run for run in unfinished if settings.resumes_from(run.run)]
    newest = max(mine, key=lambda run: run.started, default=None)
    if newest is None:
        return None
    if newest.command.get("details") == command.details:
        return newest.root
    log.warning(
        "%s holds an unfinished run of this command, but the script or its arguments have changed since: this start "
        "trains from the beginning, in %s; HOLDFAST_DIR=%s resumes that run",
        newest.root,
        root,
        os.path.dirname(newest.home),
    )
    return None


def _runs_below(root: str) -> Iterator[_Run]:
    for depth in ("", "*", "*/*"):
        for path in glob.glob(os.path.join(glob.escape(root), depth, ".holdfast", ATTEMPT)):
            run = _read(root, path)
            if run is not None:
                yield run


def _read(root: str, path: str) -> _Run | None:
    home = os.path.dirname(path)
    try:
        content = read_json(path)
        ends = [event for event in read_journal(os.path.join(home, JOURNAL)) if event["event"] in ("end", "attempt")]
        return _Run(
            root,
            home,
            float(content["started"]),
            dict(content["command"]),
            str(content["run"]),
            is_in_use(os.path.dirname(home)),
            bool(ends) and ends[-1].get("outcome") == "complete",
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _announce(root: str, first: str, linked: bool) -> None:
    log.warning(
        "this command has begun its run in %s and not finished it: resuming there%s. A fixed folder, or HOLDFAST_DIR, "
        "says where a run is; HOLDFAST_RESUME=never starts anew",
        first,
        f", and {root} is a link to it" if linked else f"; files that the script itself writes go to {root}",
    )


def link(root: str, first: str) -> bool:
    """Make ``root`` a link to ``first``. Where it holds files already, only what it lacks is linked into it: False."""
    target = os.path.relpath(first, os.path.dirname(root))
    try:
        os.makedirs(os.path.dirname(root), exist_ok=True)
        if os.path.isdir(root) and not os.path.islink(root) and os.path.realpath(os.getcwd()) != os.path.realpath(root):
            os.rmdir(root)  # fails if there is something in it
        os.symlink(target, root, target_is_directory=True)
        return True
    except OSError:
        _link_entries(root, first)
        return False


def _link_entries(root: str, first: str) -> None:
    try:
        missing = set(os.listdir(first)) - set(os.listdir(root)) - _OURS
        for name in missing:
            os.symlink(os.path.relpath(os.path.join(first, name), root), os.path.join(root, name))
    except OSError as error:
        log.warning("%s: files of %s could not be linked into it: %s", root, first, error)


def _undated(value: object) -> object:
    """``value`` without the time in its texts."""
    if isinstance(value, str):
        return masked(value) or value
    if isinstance(value, dict):
        return {str(key): _undated(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_undated(inner) for inner in value]
    return value


def _script() -> bytes:
    path = getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0]
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
