"""Jobs of the local-process backend, as they lie on this machine: what another process needs to find one again.

A job is a ``holdfast run``, whose launcher passes a signal on to all ranks, waits for their save, and outlives none of
its processes. What describes it lies in a folder of its own, below the user's state folder. Nothing here needs the SDK,
which takes seconds to import.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from holdfast.base.process import Owner, process_start
from holdfast.base.run_directory import state_folder
from holdfast.base.small_files import read_json
from holdfast.config import parse_bool, settings_table, without_credentials
from holdfast.errors import ConfigError, HoldfastError, JobNotFoundError
from holdfast.launch import control, procs
from holdfast.launch.records import PAUSED, Launch, carried_names, read_request, write_json
from holdfast.launch.runs import RunPlace, place_of
from holdfast.locations import without_secrets

CREATED, RUNNING, PAUSING, SUSPENDED = "Created", "Running", "Pausing", "Suspended"
COMPLETE, FAILED = "Complete", "Failed"
"""In the SDK's words, and two more."""
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_RECORD, _SCRIPT, _LOG, _ENDED, _LOCK = "job.json", "train.py", "output.log", "exit-code", "lock"
_INSTALLED = os.path.join("venv", "ready")
_MARGIN_S = 15.0
_LOOK_S = 0.2
_STOPPED = (None, 129, 130, 143)
"""How a launcher ends that was told to leave by a signal, or had no time to say anything: a reboot, SIGKILL."""
PROCESSES = "PET_NPROC_PER_NODE"
INDEX_URLS = "HOLDFAST_JOB_INDEX_URLS"
"""Tells the process that installs a job's packages where from, line by line: a URL can hold a password."""
LIST = (
    "import json, sys; from holdfast.store import open_backend; from holdfast.store.checkpoints import rows_of; "
    "print(json.dumps([row for location in sys.argv[1:] for row in rows_of(open_backend(location))]))"
)
"""Tells the checkpoints of locations where a job runs. It needs nothing that only the command line does."""
_LIST_S = 60.0


def jobs_folder() -> str:
    return os.path.join(state_folder(), "jobs")


@dataclass(frozen=True, slots=True)
class Record:
    """A local job, as its folder describes it."""

    name: str
    location: str
    workers: int
    grace_s: float
    env: dict[str, str]
    """Variables of its own. What is written down of them: settings and the like, see :func:`_kept`."""
    packages: list[str]
    index_urls: list[str]
    cwd: str
    created: float
    launcher: dict[str, Any] | None = None
    """Who runs it, or ran it last."""
    started: float = 0.0
    """When that one was started."""
    python: str = ""
    """The interpreter that it was submitted with."""
    environ: dict[str, str] = field(default_factory=dict)
    """Variables of the process that submitted it that decide how it runs, as far as they hold no secret."""
    names: list[str] = field(default_factory=list)
    """Of the job's own variables whose values are not written down."""

    @property
    def folder(self) -> str:
        return os.path.join(jobs_folder(), self.name)

    @property
    def script(self) -> str:
        return os.path.join(self.folder, _SCRIPT)

    @property
    def log(self) -> str:
        return os.path.join(self.folder, _LOG)

    @property
    def ended(self) -> str:
        return ended_in(self.folder)

    @property
    def code(self) -> int | None:
        """How its launcher ended, as that one says; None: it runs, never did, or had no time to say."""
        with contextlib.suppress(OSError, ValueError), open(self.ended, encoding="utf-8") as file:
            return int(file.read(20))
        return None

    @property
    def place(self) -> RunPlace:
        return place_of(self.location)

    def write(self) -> None:
        write_json(os.path.join(self.folder, _RECORD), asdict(self))

    def owner(self) -> Owner | None:
        with contextlib.suppress(ValueError):
            return Owner.from_dict(self.launcher or {})
        return None

    def is_alive(self) -> bool:
        owner = self.owner()
        return owner is not None and procs.is_alive(owner)

    def status(self) -> str:
        """In the SDK's words, and ``Pausing`` and ``Suspended``."""
        if self.is_alive():
            if self.packages and not is_installed(self.folder):
                return CREATED
            if self.place.live_state() == "paused":
                return SUSPENDED
            return PAUSING if read_request(self.place.home, since=self.started)[1] == "pause" else RUNNING
        if self.launcher is None:
            return CREATED
        # Nothing less than the end of the script: one that was stopped after its last step may have a model to write.
        if self.code == 0:
            return COMPLETE
        if self.code not in _STOPPED or not self.is_saved():
            return FAILED
        return SUSPENDED if self.place.live_state() is None else PAUSING

    def is_saved(self) -> bool:
        """Whether it saves when it is told to leave."""
        return all(is_on(self.env.get(name)) for name in ("HOLDFAST_ENABLED", "CHECKPOINT_ENABLED"))


def is_on(value: str | None) -> bool:
    """Whether a variable that switches something off leaves it on."""
    with contextlib.suppress(ValueError):
        return value is None or parse_bool(value)
    return True


def ended_in(folder: str) -> str:
    """The file that a job's launcher leaves its exit code in."""
    return os.path.join(folder, _ENDED)


def is_installed(folder: str) -> bool:
    """Whether the job's packages are there."""
    return os.path.exists(os.path.join(folder, _INSTALLED))


def mark_installed(folder: str) -> None:
    with open(os.path.join(folder, _INSTALLED), "w", encoding="utf-8"):
        pass


def read_folder(folder: str) -> dict[str, Any]:
    """What describes the job there; empty: nothing does."""
    return read_json(os.path.join(folder, _RECORD), own=True)


def read_record(name: str) -> Record:
    record = read_folder(os.path.join(jobs_folder(), name)) if NAME.fullmatch(name) else {}
    known = {item.name for item in fields(Record)}
    try:
        return Record(**{key: value for key, value in record.items() if key in known})
    except TypeError:
        raise JobNotFoundError(f"there is no local job {name!r}") from None


def records() -> list[Record]:
    """All local jobs, the newest first."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(jobs_folder()):
            with contextlib.suppress(JobNotFoundError):
                found.append(read_record(name))
    return sorted(found, key=lambda record: -record.created)


def log_lines(record: Record, *, follow: bool) -> Iterator[str]:
    """What the job has printed; with ``follow``, until it ends or is paused."""
    rest, position = "", 0
    while True:
        over = not follow or not read_or(record).is_alive()
        with contextlib.suppress(OSError), open(record.log, encoding="utf-8", errors="replace") as file:
            file.seek(position)
            rest += file.read()
            position = file.tell()
        *lines, rest = rest.split("\n")
        yield from lines
        if over:
            break
        time.sleep(_LOOK_S)
    if rest:
        yield rest


def listed(record: Record) -> list[dict[str, Any]]:
    """The job's checkpoints in an object store, to which it may have been given credentials that this process lacks."""
    attempt = record.place.attempt()
    places = [record.location, *([attempt.fallback] if attempt is not None and attempt.fallback else [])]
    command = [record.python or sys.executable, "-c", LIST, *places]
    done = subprocess.run(command, env=_variables(record), capture_output=True, text=True, timeout=_LIST_S, check=False)
    if done.returncode:
        raise HoldfastError(f"{record.location} cannot be listed: {done.stderr.strip().rpartition(chr(10))[2]}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def read_or(record: Record) -> Record:
    with contextlib.suppress(JobNotFoundError):
        return read_record(record.name)
    return record


@contextlib.contextmanager
def locked(name: str, *, make: bool = False) -> Iterator[None]:
    """Nobody else submits, starts or deletes a job of that name meanwhile. ``make``: its folder, too."""
    if not NAME.fullmatch(name):
        raise JobNotFoundError(f"there is no local job {name!r}")
    folder = os.path.join(jobs_folder(), name)
    path = os.path.join(folder, _LOCK)
    while True:
        if make:
            os.makedirs(folder, 0o700, exist_ok=True)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            if make:
                continue  # deleted just now
            raise JobNotFoundError(f"there is no local job {name!r}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_there(lock, path):
                continue  # whoever had it has deleted the folder
            yield
            return
        finally:
            os.close(lock)


def _is_there(file: int, path: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(file), os.stat(path))
    return False


def submit(record: Record, script: str) -> Record:
    """Write the job down, and start it; raises ConfigError if there is one of that name, or one that saves there.

    It keeps this interpreter. Of variables and of index URLs it keeps what holds no secret; all values are known to
    this process, and to those of the job.
    """
    values = environment(record.env)
    if record.packages and record.index_urls:
        values[INDEX_URLS] = "\n".join(record.index_urls)
    own = _kept(record.env)
    record = replace(
        record,
        python=sys.executable,
        env=own,
        names=sorted(record.env.keys() - own.keys()),
        environ=_kept({name: value for name, value in values.items() if name not in record.env}),
        index_urls=[without_secrets(url) for url in record.index_urls],
    )
    with locked(record.name, make=True):
        if read_folder(record.folder):
            raise ConfigError(
                f"name: there is a local job {record.name!r} already; delete it first, or take another name"
            )
        for left in os.listdir(record.folder):  # of a submission that was killed
            if left != _LOCK:
                path = os.path.join(record.folder, left)
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
        try:
            with open(record.script, "w", encoding="utf-8") as file:
                file.write(script)
            record.write()
            _submitted[record.name] = (record.created, values)
            return start(record)
        except BaseException:
            _submitted.pop(record.name, None)
            shutil.rmtree(record.folder, ignore_errors=True)
            raise


@contextlib.contextmanager
def _alone(record: Record) -> Iterator[None]:
    """No other job starts meanwhile; raises ConfigError if one lives that saves to the same place."""
    lock = os.open(f"{jobs_folder()}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for other in records():
            if other.name != record.name and _same_place(other.location, record.location) and other.is_alive():
                raise ConfigError(
                    f"output_dir: {record.location!r} is that of the local job {other.name!r}, which is not over; "
                    f"delete that one first, or take another folder"
                )
        yield
    finally:
        os.close(lock)


def _same_place(one: str, other: str) -> bool:
    return one == other or ("://" not in one + other and os.path.realpath(one) == os.path.realpath(other))


def start(record: Record) -> Record:
    """Start the job's launcher, or start it again. Whoever calls has locked the job."""
    with _alone(record):
        return _start(record)


def _start(record: Record) -> Record:
    arguments = ["-m", "holdfast.cli.noted", record.ended, "run", "-n", str(record.workers), "--dir", record.location]
    # A function that fails is a failed job; whoever was preempted or killed is started again all the same.
    arguments += ["--grace", str(record.grace_s), "--max-restarts", "0", "--no-progress", record.script]
    if record.packages:
        arguments = ["-m", "holdfast.kubeflow.install", record.folder, *arguments]
    variables = _variables(record)
    if missing := [name for name in record.names if name not in variables]:
        raise HoldfastError(
            f"the job {record.name!r} was submitted with {', '.join(missing)} in its env, and values of variables are "
            f"not written down: set {'it' if len(missing) == 1 else 'them'} here, and resume it again"
        )
    with contextlib.suppress(FileNotFoundError):
        os.unlink(record.ended)
    if record.is_saved():
        # A launcher whose run has a home can be asked to pause while the script still loads.
        os.makedirs(record.place.home, exist_ok=True)
    started = time.time()
    with open(record.log, "ab") as log:
        child = subprocess.Popen(
            [record.python or sys.executable, *arguments],
            cwd=record.cwd,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    owner = Owner(run=record.name, pid=child.pid, started=process_start(child.pid))
    _children[record.name] = child
    changed = noted(record.name, launcher=owner.as_dict(), started=started)
    if changed is None:
        procs.send(child.pid, owner.started, signal.SIGTERM)
        raise JobNotFoundError(f"the job {record.name!r} was deleted while it was started")
    return changed


_children: dict[str, subprocess.Popen[bytes]] = {}
"""Launchers of this process, which must be waited for: otherwise they stay on as zombies."""


_submitted: dict[str, tuple[float, dict[str, str]]] = {}
"""When each job of this process was submitted, and its variables with their values, which nothing else keeps."""


def _variables(record: Record) -> dict[str, str]:
    """Those that the job was submitted with, where this process or one of the job knows them; else those of this one
    with what was written down."""
    submitted, values = _submitted.get(record.name, (None, {}))
    if submitted == record.created:
        return values
    owner = record.owner()
    if owner is not None and procs.is_alive(owner):
        with contextlib.suppress(OSError), open(f"/proc/{owner.pid}/environ", "rb") as file:
            return dict(os.fsdecode(line).split("=", 1) for line in file.read().split(b"\0") if b"=" in line)
    values = {**environment({}), **record.environ, **record.env}
    if record.packages and record.index_urls:
        values[INDEX_URLS] = "\n".join(record.index_urls)
    return values


def _kept(values: dict[str, str]) -> dict[str, str]:
    """What is written down of some variables: those that every record of a start holds, and where programs are."""
    names = carried_names() | {PROCESSES, "PATH", "LD_LIBRARY_PATH"}
    return without_credentials({name: value for name, value in values.items() if name in names})


def environment(own: dict[str, str]) -> dict[str, str]:
    """The variables of this process but for settings of holdfast, which are the job's own, and those of the job."""
    settings = {variable for setting in settings_table().values() for variable in setting.env}
    ranks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", PROCESSES}
    kept = {name: value for name, value in os.environ.items() if name not in settings | ranks}
    return {**kept, **{name: value for name, value in own.items() if name != PROCESSES}}


def noted(name: str, **changes: Any) -> Record | None:
    """Change the job's record; None: it is gone."""
    with contextlib.suppress(JobNotFoundError, OSError):
        record = read_record(name)
        changed = Record(**{**asdict(record), **changes})
        changed.write()
        return changed
    return None


def follow(name: str, cancelled: threading.Event) -> None:
    """Wait until the job's launcher has ended, by itself or because the job is deleted."""
    while True:
        child = _children.get(name)
        if child is None:
            return
        if child.poll() is not None:
            if _children.get(name) is child:
                del _children[name]
            return
        if cancelled.wait(_LOOK_S):
            return


# ---------------------------------------------------------------------- pausing, resuming, deleting


def pause(name: str) -> None:
    """Tell the job to save and to stop, without waiting for it; raises if nothing of it is alive."""
    record = read_record(name)
    state = record.status()
    if state in (PAUSING, SUSPENDED):
        return
    if not record.is_alive():
        raise control.NotLiveError(f"the job {name!r} is not running: it is {state}")
    if state == CREATED:
        raise control.NotLiveError(f"the job {name!r} is not running yet: its packages are being installed")
    if not record.is_saved():
        raise HoldfastError(
            f"the job {name!r} is not paused: it was submitted without enable_jit_checkpoint, and would begin anew. "
            f"delete ends it"
        )
    launch = _wait_for_launch(record)
    if launch is None:
        raise control.NotLiveError(f"the job {name!r} has not come up; see its logs")
    if launch.state != PAUSED:
        control.tell(record.place, launch, "pause")


def _wait_for_launch(record: Record) -> Launch | None:
    """A launcher that was just started has not shown itself yet."""
    limit = time.monotonic() + 60.0
    while (launch := control.live_launch(record.place)) is None and record.is_alive() and time.monotonic() < limit:
        time.sleep(_LOOK_S)
    return launch


def resume(name: str) -> Record:
    """Go on; a job whose launcher is gone is started again, and one that is being paused once it is."""
    with locked(name):
        record = read_record(name)
        _wait_for_pause(record)
        state = record.status()
        if record.is_alive():
            if state != CREATED:
                _wait_for_launch(record)
                control.resume(record.place)
            return record
        if state == COMPLETE:
            return record
        if live := _left_over(record):
            raise HoldfastError(
                f"the launcher of the job {name!r} is gone, but its processes "
                f"{', '.join(str(owner.pid) for owner in live)} do not leave; end them first"
            )
        record = start(record)
    threading.Thread(target=follow, args=(name, threading.Event()), daemon=True).start()
    return record


def _wait_for_pause(record: Record) -> None:
    limit = time.monotonic() + record.grace_s + _MARGIN_S
    while record.is_alive() and record.status() == PAUSING:
        if time.monotonic() > limit:
            raise TimeoutError(f"the job {record.name!r} is still being paused; resume it when it is")
        time.sleep(_LOOK_S)


def _left_over(record: Record) -> list[Owner]:
    """Ranks of a launcher that was killed, after the time that they have to save."""
    attempt = record.place.attempt()
    limit = time.monotonic() + record.grace_s + _MARGIN_S
    while attempt is not None and (live := attempt.live()):
        if time.monotonic() > limit:
            return list(live.values())
        time.sleep(_LOOK_S)
    return []


def delete(name: str, *, created: float | None = None) -> None:
    """End the job, with a save, and forget it. Checkpoints in its ``output_dir`` stay.

    ``created``: of the job that is meant. Another that has its name by now is left alone.
    """
    with locked(name):
        record = read_record(name)
        if created not in (None, record.created):
            raise JobNotFoundError(f"the job {name!r} was deleted, and another has that name now")
        _end(record)
        _children.pop(name, None)
        _submitted.pop(name, None)
        shutil.rmtree(record.folder, ignore_errors=True)


def _end(record: Record) -> None:
    owner = record.owner()
    limit = time.monotonic() + record.grace_s + _MARGIN_S
    if owner is not None:
        procs.send(owner.pid, owner.started, signal.SIGTERM)
    while owner is not None and procs.is_alive(owner):
        child = _children.get(record.name)
        if child is not None:
            child.poll()
        if time.monotonic() > limit:
            # Its ranks are on a leash: they get SIGTERM as it dies.
            procs.send(owner.pid, owner.started, signal.SIGKILL)
        time.sleep(_LOOK_S)
    for left in _left_over(record):
        procs.send(left.pid, left.started, signal.SIGKILL)
