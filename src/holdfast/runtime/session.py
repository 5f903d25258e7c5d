"""The start of an attempt: who takes part, who may write, and where it goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.agree import Board
from holdfast.base.attempt_file import LastAttempt, new_token, read_last_attempt
from holdfast.base.process import Owner, process_start
from holdfast.base.run_directory import ATTEMPT, JOURNAL, default_location, home_of, lasting_state_folder
from holdfast.base.small_files import RefusedFileError, is_own
from holdfast.base.words import shown
from holdfast.config import Settings
from holdfast.errors import (
    CheckpointCorruptError,
    ConfigError,
    HoldfastError,
    LocationBusyError,
    StoreError,
    StoreUnavailableError,
)
from holdfast.progress import Journal, read_journal
from holdfast.recorder.boxes import folder, forget_old, last_step
from holdfast.runtime.unfinished import Command
from holdfast.store import Backend, open_backend
from holdfast.store.checkpoints import Checkpoint, clean, open_checkpoint, whole
from holdfast.store.local import LOCK, LocalBackend, is_grant, write_durable

log = logging.getLogger("holdfast")

_START_TIMEOUT_S = 1800.0
"""Ranks may start, and load, minutes apart."""

_LOCK_WAIT_S = 5.0
"""A rank of the last attempt may still be on its way out."""

_ROOM = 16384
"""Bytes that a location must take at the start: the records of a run are about as large."""


@dataclass(frozen=True, slots=True)
class Place:
    """This process among those that train together, and where they leave word for each other."""

    rank: int
    world: int
    board: Board


@dataclass(slots=True, kw_only=True)
class Session:
    """What all ranks of an attempt know of it."""

    settings: Settings
    rank: int
    world: int
    board: Board
    location: str
    home: str
    backends: Sequence[Backend]
    """Where it is searched for checkpoints."""
    taken: list[Backend]
    """Those of them that this run has taken, to write there. Not all need be in reach, or have room, at the start."""
    run: str
    attempt: int
    token: str
    peers: dict[int, Owner]
    journal: Journal
    process_started: float
    kept: bool
    """Whether there is a home folder, and the journal is more than memory."""
    made: tuple[str, ...]
    """Folders that were not there before, the innermost first; on rank 0."""
    command: Command | None = None

    @property
    def box_folder(self) -> str:
        return folder(self.token)

    @property
    def progress_file(self) -> str:
        """Where none is given: beside local checkpoints, else in the run's home folder."""
        beside = self.home if "://" in self.location else os.path.dirname(self.home)
        return os.path.abspath(self.settings.progress_file or os.path.join(beside, "training_progress.json"))


def open_session(settings: Settings, place: Place, command: Command | None = None) -> Session:
    """Meet the other ranks. Rank 0 takes the location for this run; if it cannot, all ranks raise the same error.

    ``command``: for a location that the script names; that of rank 0 is the location of all ranks then.
    """
    rank, world, board = place.rank, place.world, place.board
    location = settings.dir or default_location()
    if rank == 0:
        board.put_once("location", location.encode())
    elif command is not None:
        location = _wait(board, "location").decode()  # a name with the time in it is another one on each rank
    locations = [location, *([settings.fallback] if settings.fallback else ())]
    backends = [open_backend(one) for one in locations]
    if rank == 0:
        try:
            identity = _take(settings, locations, backends)
        except (HoldfastError, OSError) as error:
            busy = error.beside if isinstance(error, LocationBusyError) else None
            board.put_once("identity", json.dumps({"error": str(error), "busy": busy}).encode())
            raise
        board.put_once("identity", json.dumps(identity).encode())
    else:
        identity = json.loads(_wait(board, "identity"))
        if "error" in identity:
            failed = StoreError if identity["busy"] is None else LocationBusyError
            failure = failed(f"rank 0 could not start: {identity['error']}")
            if isinstance(failure, LocationBusyError):
                failure.beside = identity["busy"]
            raise failure
        for backend, grant in zip(backends, identity["grants"], strict=True):
            if grant is not None:
                backend.join(grant)
    home = home_of(locations[identity["home"]])
    peers = _meet(place, Owner(identity["run"]))
    path = os.path.join(home, JOURNAL) if identity["kept"] else None
    journal = Journal(path, run_id=identity["run"], attempt=identity["attempt"], rank=rank)
    return Session(
        settings=settings,
        rank=rank,
        world=world,
        board=board,
        location=location,
        home=home,
        backends=backends,
        taken=[one for one, grant in zip(backends, identity["grants"], strict=True) if grant is not None],
        run=identity["run"],
        attempt=identity["attempt"],
        token=identity["token"],
        peers=peers,
        journal=journal,
        process_started=_process_started(),
        kept=identity["kept"],
        made=tuple(identity["made"]) if rank == 0 else (),
        command=command,
    )


def _meet(place: Place, owner: Owner) -> dict[int, Owner]:
    """The processes of all ranks. Each rank says who it is and waits once, for what the last one to come puts together:
    the board's work grows with the number of ranks, and not with its square."""
    board = place.board
    if board.append("peers", json.dumps([place.rank, owner.as_dict()]).encode()) == place.world:
        board.put_once("peers/all", b"[" + b",".join(board.entries("peers")) + b"]")
    known = sorted(json.loads(_wait(board, "peers/all")), key=lambda entry: int(entry[0]))
    return {rank: Owner(**record) for rank, record in known}


def _process_started() -> float:
    """When this process began, in seconds since the epoch: importing the framework is part of a restart's cost."""
    try:
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(process_start(os.getpid())) / os.sysconf("SC_CLK_TCK")
    except (ValueError, OSError, AttributeError):
        age_s = 0.0
    return time.time() - age_s


def _wait(board: Board, key: str) -> bytes:
    value = board.wait(key, _START_TIMEOUT_S)
    if value is None:
        raise TimeoutError(f"not all ranks started within {_START_TIMEOUT_S:.0f} s ({key} is missing)")
    return value


def _take(settings: Settings, locations: Sequence[str], backends: Sequence[Backend]) -> dict[str, Any]:
    """On rank 0: become the one run that writes here; returns the attempt's identity.

    A location that cannot be used is left out while another can. The home folder is that of the first location: on a
    file system it is a part of it, and goes with it.
    """
    homes = [home_of(location) for location in locations]
    missing = {home: _missing(home) for home in homes}
    name = shown(os.path.basename(locations[0].rstrip("/")))[:200] or "run"
    known, new = settings.run_id or read_last_attempt(homes[0]).run, f"{name}-{secrets.token_hex(4)}"
    failures: list[tuple[Backend, OSError]] = []
    for backend, home in zip(backends, homes, strict=True):
        if failures:  # the last attempt may have been where this one has to go
            known = known or read_last_attempt(home).run
        run = known or new
        try:
            _acquire(backend, run, settings)
            if isinstance(backend, LocalBackend):
                _check_room(backend, home)
        except LocationBusyError:
            raise
        except OSError as error:
            backend.release()
            failures.append((backend, error))
    failed = [backend for backend, _ in failures]
    if len(failed) == len(backends):
        raise _nowhere(failures)
    for backend, why in failures:
        log.warning(
            "%s cannot be used, going on without it; it is searched for checkpoints, and each save tries it again: %s",
            backend.uri,
            why,
        )
    elsewhere = backends[0] in failed and isinstance(backends[0], LocalBackend)
    chosen = next(number for number, one in enumerate(backends) if one not in failed) if elsewhere else 0
    home = homes[chosen]
    return {
        "run": run,
        "attempt": max(one.number for one in map(read_last_attempt, (homes[0], home))) + 1,
        "token": new_token(),
        "made": missing[home],
        "home": chosen,
        "kept": _make_home(home, locations[chosen]),
        "grants": [None if backend in failed else backend.grant() for backend in backends],
    }


def _missing(path: str) -> list[str]:
    """The folders that are not there, of a path, the innermost first."""
    made, path = [], os.path.abspath(path)
    while not os.path.isdir(path):
        made.append(path)
        path = os.path.dirname(path)
    return made


def _acquire(backend: Backend, run: str, settings: Settings) -> None:
    """Take a location over from a stopped or unreachable process of this very run, if its platform names the run."""
    try:
        backend.acquire(Owner(run), wait_s=_LOCK_WAIT_S, takeover=settings.takeover)
    except LocationBusyError as error:
        holder = error.holder
        # Without a name of its platform, a run has that of the last one in its folder, as two starts by mistake have.
        # One that is seen to run beside this one is no earlier attempt: it is such a start, or a parent.
        earlier = settings.run_id is not None and holder is not None and holder.run == run
        if not earlier or (holder.is_beside() and not holder.is_stopped()):
            raise
        log.warning(
            "%s is taken over from an earlier attempt of this run that does not let go: %s", backend.uri, holder
        )
        backend.acquire(Owner(run), wait_s=_LOCK_WAIT_S, takeover=True)


def _is_folder(location: str) -> bool:
    return "://" not in location or location.startswith("file://")


def _check_room(backend: LocalBackend, home: str) -> None:
    """Raise OSError if a location takes no records."""
    trial = os.path.join(home, f"room-{secrets.token_hex(6)}.tmp")
    try:
        with open(trial, "xb") as file:
            file.write(bytes(_ROOM))
            os.fsync(file.fileno())
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(trial)


def _nowhere(failures: Sequence[tuple[Backend, OSError]]) -> OSError:
    if len(failures) == 1:
        backend, error = failures[0]
        if isinstance(error, StoreError):
            return error
        failure = StoreError(f"{backend.uri} cannot be used: {error.strerror or error}")
        failure.errno = error.errno
        return failure
    kind = StoreUnavailableError if all(isinstance(error, ConnectionError) for _, error in failures) else StoreError
    return kind("no location can be used: " + "; ".join(f"{backend.uri}: {error}" for backend, error in failures))


def _make_home(home: str, location: str) -> bool:
    """Whether there is a home folder. On object storage a run can do without: nothing of it is needed to resume."""
    try:
        os.makedirs(home, exist_ok=True)
        if not _is_folder(location) and lasting_state_folder() is None:
            log.warning(
                "this user has no home folder that can be written: the journal of this run is in %s, and may go with "
                "this machine or pod; XDG_STATE_HOME names a better place",
                home,
            )
        return True
    except OSError as error:
        if _is_folder(location):
            raise
        log.warning(
            "%s cannot be made (%s): this run keeps no journal, and `holdfast ls` and `preempt` do not find it; "
            "XDG_STATE_HOME names another place",
            home,
            error.strerror or error,
        )
        return False


def announce(session: Session) -> None:
    """On rank 0: say in the home folder who runs now, and how the last attempt ended if it did not say so itself."""
    forget_old()
    path = os.path.join(session.home, ATTEMPT)
    last = read_last_attempt(session.home)
    for backend in session.taken:
        try:
            backend.assure()  # an attempt that was stopped in its start is not announced over the one that came after
        except LocationBusyError:
            raise
        except StoreError as error:
            log.warning("%s", error)
    if last.token is not None:
        boxes = folder(last.token)
        events = journal_of(session.home)
        if not any(event["event"] == "end" and event.get("attempt") == last.number for event in events):
            _tell_death(session, boxes, last)
        if is_own(boxes):
            shutil.rmtree(boxes, ignore_errors=True)
    content = {
        "run": session.run,
        "attempt": session.attempt,
        "token": session.token,
        "location": session.backends[0].uri,
        "fallback": session.backends[1].uri if len(session.backends) > 1 else None,
        "progress_file": session.progress_file,
        "world": session.world,
        "ranks": {str(rank): owner.as_dict() for rank, owner in session.peers.items()},
        "kill_wait": session.settings.kill_wait,
        "grace_period": session.settings.grace_period,
        "started": session.process_started,
        "command": dataclasses.asdict(session.command) if session.command is not None else None,
    }
    if session.kept:
        _write(path, json.dumps(content, indent=1).encode(), session)
    if launcher := os.environ.get("HOLDFAST_ANNOUNCE"):  # holdfast run wants to know where its script saves
        write_durable(launcher, session.home.encode())


def _write(path: str, content: bytes, session: Session) -> None:
    """Write a record of who runs. A run on object storage, or with a second location, goes on without."""
    try:
        write_durable(path, content)
    except OSError as error:
        if _is_folder(session.location) and len(session.backends) == 1:
            raise
        log.warning(
            "%s cannot be written (%s): `holdfast ls` and `preempt` do not find this run", path, error.strerror or error
        )


def journal_of(home: str) -> Iterator[dict[str, Any]]:
    """The events of a run. What lies there in place of a journal, and is none, has none."""
    with contextlib.suppress(RefusedFileError):
        yield from read_journal(os.path.join(home, JOURNAL))


def withdraw(session: Session) -> None:
    """On rank 0, in place of :func:`announce`: nothing trains here after all, and nothing tells of it."""
    with contextlib.suppress(OSError):  # somebody else uses it, or has taken it away
        left = os.listdir(session.home)
        if session.made and all(name == LOCK or is_grant(name) for name in left):
            for name in filter(is_grant, left):
                os.rmdir(os.path.join(session.home, name))
            with contextlib.suppress(FileNotFoundError):  # the lock of an object store is elsewhere
                os.unlink(os.path.join(session.home, LOCK))  # still held: whoever waits for it makes another
            for made in session.made:
                os.rmdir(made)


def _tell_death(session: Session, boxes: str, attempt: LastAttempt) -> None:
    """The last attempt left without a word: its black boxes say how far it came."""
    step, seen = None, None
    try:
        for name in os.listdir(boxes):
            path = os.path.join(boxes, name)
            if "." not in name and (last := last_step(path)) is not None:
                step = max(step or 0, last)
                seen = max(seen or 0.0, os.stat(path).st_mtime)
    except OSError:
        pass
    session.journal.record("died", attempt_ended=attempt.number, step=step, last_seen=seen)


Load = Callable[[Checkpoint], Callable[[], None] | None]
"""Loads a checkpoint, or reads it and returns what puts it in place once all ranks have read it too."""


def resume(session: Session, load: Load, spare: Callable[[Backend, str], bool] = lambda *_: False) -> Checkpoint | None:
    """Let every rank ``load`` the newest checkpoint that all of them can; returns it, or None if there is none.

    ``load`` raises :class:`~holdfast.errors.StoreError` if it cannot, and must leave no trace then; nor may it where
    another rank cannot. ``spare``: which folders without a manifest are another tool's checkpoints, and not ours to
    clean away.
    """
    candidates = _candidates(session, spare) if session.rank == 0 else iter(())
    number = 0
    while True:
        key = f"resume/{number}"
        if session.rank == 0:
            chosen = next(candidates, None)
            where = None if chosen is None else [list(session.backends).index(chosen.backend), chosen.name]
            session.board.put_once(key, json.dumps(where).encode())
        where = json.loads(_wait(session.board, key))
        if where is None:
            return None
        backend, name = session.backends[where[0]], where[1]
        checkpoint, put, outcome = _try_load(backend, name, load)
        if _all_ranks(session, f"{key}/result", outcome is None):
            if put is not None:
                put()
            return checkpoint
        if session.rank == 0:
            why = outcome or "another rank could not load it"
            log.warning("%s in %s cannot be used, trying the one before it: %s", name, backend.uri, why)
            session.journal.record("unusable", name=name, location=backend.uri, error=str(outcome))
            if isinstance(outcome, CheckpointCorruptError) and backend in session.taken:
                backend.set_aside(name)
        number += 1


def _try_load(
    backend: Backend, name: str, load: Load
) -> tuple[Checkpoint | None, Callable[[], None] | None, StoreError | None]:
    try:
        checkpoint = open_checkpoint(backend, name)
        if checkpoint is None:
            raise StoreError(f"{name} is not whole")
        return checkpoint, load(checkpoint), None
    except StoreError as error:
        return None, None, error


def _all_ranks(session: Session, key: str, fine: bool) -> bool:
    """Whether all ranks say that it went well."""
    if session.world == 1:
        return fine
    count = session.board.append(key, b"1" if fine else b"0")
    if count == session.world:
        verdict = b"1" if all(entry == b"1" for entry in session.board.entries(key)) else b"0"
        session.board.put_once(f"{key}/all", verdict)
    return _wait(session.board, f"{key}/all") == b"1"


def _candidates(session: Session, spare: Callable[[Backend, str], bool]) -> Iterator[Checkpoint]:
    """Whole checkpoints, newest first, after setting the place in order."""
    settings = session.settings
    for backend in session.backends:
        try:
            _start_anew(backend, settings, spare, taken=backend in session.taken)
        except StoreError as error:
            if settings.resume == "never":  # a later start, which need not be told so, would go on from what is there
                raise
            log.warning("could not look through %s: %s", backend.uri, error)
        if backend not in session.taken:
            continue
        try:
            for name in clean(backend, [name for name in backend.names() if not spare(backend, name)]):
                log.info("removed %s, which was not whole", name)
                session.journal.record("cleaned", name=name, location=backend.uri)
        except StoreError as error:
            log.warning("could not clean %s: %s", backend.uri, error)
    yield from (checkpoint for checkpoint in whole(session.backends) if settings.resumes_from(checkpoint.manifest.run))


def _start_anew(backend: Backend, settings: Settings, spare: Callable[[Backend, str], bool], *, taken: bool) -> None:
    """What this run is told not to go on from must not be found later as the newest."""
    if settings.resume == "auto":
        return
    names = backend.names()
    if settings.resume == "own":
        names = [name for name in names if _is_of_others(backend, name, settings, spare)]
    if not names:
        return
    if not taken:
        raise StoreError(
            f"HOLDFAST_RESUME={settings.resume!r}, but the {len(names)} checkpoints in {backend.uri} cannot be set "
            f"aside now, and a later start would go on from them"
        )
    if not isinstance(backend, LocalBackend):
        others = " of other runs" if settings.resume == "own" else ""
        raise ConfigError(
            f"HOLDFAST_RESUME={settings.resume!r}, but {backend.uri} holds {len(names)} checkpoints{others}; give "
            f"another location, or remove them with: holdfast prune {backend.uri} --all"
        )
    target = os.path.join(backend.root, f"previous-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")
    os.makedirs(target)
    for name in names:
        backend.assure()
        os.rename(os.path.join(backend.root, name), os.path.join(target, name))
    log.warning("starting anew as told; the checkpoints that were in %s are now in %s", backend.root, target)


def _is_of_others(backend: Backend, name: str, settings: Settings, spare: Callable[[Backend, str], bool]) -> bool:
    """Whether another run, or another tool, has committed it. What nobody has is cleaned away, whoever began it."""
    if spare(backend, name):
        return True
    try:
        checkpoint = open_checkpoint(backend, name)
    except CheckpointCorruptError:
        return False  # it is not loaded, whoever wrote it
    return checkpoint is not None and not settings.resumes_from(checkpoint.manifest.run)
