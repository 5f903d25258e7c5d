"""What lies in a run's home folder besides its journal: who runs, how it was started, what was asked of it.

All of these files are replaced as a whole. Whoever reads them believes nothing: a file that is missing
or garbled is as good as absent.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import tempfile
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from holdfast.base.attempt_file import LastAttempt
from holdfast.base.process import Owner
from holdfast.base.run_directory import ATTEMPT, CONTROL, LAUNCH
from holdfast.base.small_files import read_json
from holdfast.base.words import LONGEST_TEXT
from holdfast.config import parse_duration, settings_table
from holdfast.launch import procs
from holdfast.locations import without_secrets
from holdfast.recorder.boxes import folder, last_step


def write_json(path: str, value: dict[str, Any]) -> None:
    """Replace a file that only its owner may read: a command line can hold a secret."""
    fd, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path))
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# ---------------------------------------------------------------------- attempt.json


@dataclass(frozen=True, slots=True)
class Attempt:
    """The attempt that runs, or ran last."""

    run: str
    number: int
    token: str
    location: str
    fallback: str | None
    ranks: dict[int, Owner]
    grace_s: float
    started: float
    progress_file: str | None

    def live(self) -> dict[int, Owner]:
        """The ranks whose processes are there, on this machine."""
        return {rank: owner for rank, owner in self.ranks.items() if procs.is_alive(owner)}

    def elsewhere(self) -> dict[int, Owner]:
        """Ranks of which this machine can tell nothing."""
        return {rank: owner for rank, owner in self.ranks.items() if not procs.is_here(owner)}


def read_attempt(home: str) -> Attempt | None:
    record = read_json(os.path.join(home, ATTEMPT))
    last = LastAttempt.decode(record)
    try:
        return Attempt(
            run=_text(last.run),
            number=last.number,
            token=last.token or "",
            location=_text(record["location"]),
            fallback=None if record.get("fallback") is None else _text(record["fallback"]),
            ranks={int(rank): Owner.from_dict(owner) for rank, owner in record["ranks"].items()},
            grace_s=parse_duration(record.get("grace_period", 30.0)),
            started=_moment(record.get("started", 0.0)),
            progress_file=None if record.get("progress_file") is None else _text(record["progress_file"]),
        )
    except (KeyError, ValueError, TypeError, AttributeError, ArithmeticError):
        return None


def _text(value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value or len(value) > LONGEST_TEXT:
        raise ValueError("no text")
    return value


def _number_or_none(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | None):
        raise ValueError("no number")
    return value


def _moment(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("no time")
    return float(value)


# ---------------------------------------------------------------------- launch.json and control.json


CARRIED = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG")
"""Variables besides the settings that decide how a run behaves, and that a later start takes over."""


def carried_names() -> set[str]:
    """The variables that a record of a start may set."""
    return {name for setting in settings_table().values() for name in setting.env} | set(CARRIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """How a run is started. Kept in ``launch.json``, so that it can be started again after a reboot."""

    program: list[str]
    """The script and its arguments, or ``-m``, the module and its arguments: what follows ``python``."""
    workers: str | None = None
    """Ranks under torchrun: a number, or torchrun's ``gpu``, ``cpu``, ``auto``. None: one process without torchrun."""
    dir: str | None = None
    """``--dir``, if it was given."""
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables from the options."""
    max_restarts: int = 3
    fresh: bool = False
    cwd: str = field(default_factory=os.getcwd)
    environ: dict[str, str] = field(default_factory=dict)
    """Variables of the first start that decide how the run behaves; credentials are not among them."""

    def __post_init__(self) -> None:
        if isinstance(self.dir, str):
            object.__setattr__(self, "dir", without_secrets(self.dir))

    @property
    def name(self) -> str:
        """What a person calls it: the script's name."""
        named = self.program[1] if self.program[0] == "-m" else self.program[0]
        return os.path.splitext(os.path.basename(named))[0] or "python"

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> LaunchSpec:
        """Raises ValueError if it is no record of a start."""
        known = {item.name for item in fields(cls)}
        spec = cls(**{name: value for name, value in record.items() if name in known})
        texts = [*spec.program, spec.cwd, *(text for text in (spec.workers, spec.dir) if text is not None)]
        for table in (spec.settings, spec.environ):
            texts += [*table.keys(), *table.values()]
        if not {*spec.settings, *spec.environ} <= carried_names():
            raise ValueError("not the record of a start: it sets other variables")
        counts = isinstance(spec.max_restarts, int) and isinstance(spec.fresh, bool)
        if not spec.program or not counts or not isinstance(spec.program, list):
            raise ValueError("not the record of a start")
        if not all(isinstance(text, str) and "\0" not in text for text in texts):
            raise ValueError("not the record of a start: it holds what is no text")
        return spec


RUNNING, PAUSED, ENDED = "running", "paused", "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The launcher of a run, as it describes itself in ``launch.json``."""

    owner: Owner
    spec: LaunchSpec
    state: str = RUNNING
    """``running``, ``paused``, or ``ended`` with ``code``."""
    step: int | None = None
    """Where it is paused, or ended."""
    code: int | None = None
    control: str = ""
    """The last request that was carried out."""
    since: float = field(default_factory=time.time)

    def is_alive(self) -> bool:
        return procs.is_alive(self.owner)

    def write(self, home: str) -> None:
        write_json(os.path.join(home, LAUNCH), {**asdict(self), "owner": self.owner.as_dict()})


def read_launch(home: str) -> Launch | None:
    record = read_json(os.path.join(home, LAUNCH))
    try:
        return Launch(
            owner=Owner.from_dict(record["owner"]),
            spec=LaunchSpec.from_dict(record["spec"]),
            state=_text(record["state"]),
            step=_number_or_none(record.get("step")),
            code=_number_or_none(record.get("code")),
            control=str(record.get("control", "")),
            since=_moment(record.get("since", 0.0)),
        )
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def ask(home: str, action: str) -> str:
    """Leave a request for the launcher; returns the request's name, which it repeats when it is done."""
    request = secrets.token_hex(6)
    write_json(os.path.join(home, CONTROL), {"id": request, "action": action, "time": time.time()})
    return request


def read_request(home: str, since: float = 0.0) -> tuple[str, str]:
    """Name and action of the last request; empty where it was made before ``since``."""
    record = read_json(os.path.join(home, CONTROL))
    time_of = record.get("time", 0.0)
    if not isinstance(time_of, int | float) or time_of < since:
        return "", ""
    return str(record.get("id", "")), str(record.get("action", ""))


# ---------------------------------------------------------------------- black boxes


def box_steps(attempt: Attempt) -> dict[int, int]:
    """The last step that each rank of this machine has completed, to the step, alive or dead."""
    steps: dict[int, int] = {}
    for rank in attempt.ranks if attempt.token else ():
        step = last_step(os.path.join(folder(attempt.token), f"rank-{rank}"))
        if step is not None:
            steps[rank] = step
    return steps
