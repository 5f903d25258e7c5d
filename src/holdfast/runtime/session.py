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
from holdfast.base.run_directory import ATTEMPT, JOURNAL, default_location, home_of
from holdfast.base.small_files import RefusedFileError, is_own
from holdfast.base.words import shown
from holdfast.config import Settings
from holdfast.errors import CheckpointCorruptError, ConfigError, HoldfastError, LocationBusyError, StoreError
from holdfast.progress import Journal, read_journal
from holdfast.recorder.boxes import folder, forget_old, last_step
from holdfast.runtime.unfinished import Command
from holdfast.store import Backend, open_backend
from holdfast.store.checkpoints import Checkpoint, clean, open_checkpoint, whole
from holdfast.store.local import LOCK, LocalBackend, write_durable

log = logging.getLogger("holdfast")

_START_TIMEOUT_S = 1800.0
"""Ranks may start, and load, minutes apart."""

_LOCK_WAIT_S = 5.0
"""A rank of the last attempt may still be on its way out."""


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
    run: str
    attempt: int
    token: str
    peers: dict[int, Owner]
    journal: Journal
    process_started: float
    made: tuple[str, ...]
    """Folders that were not there before, the innermost first; on rank 0."""
    command: Command | None = None

    @property
    def box_folder(self) -> str:
        return folder(self.token)

    @property
    def progress_file(self) -> str:
        """Where none is given: beside local checkpoints, else in the run's home folder."""
        beside = self.home if "://" in self.location else self.location
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
    home = home_of(location)
    backends = [open_backend(location)]
    if settings.fallback:
        backends.append(open_backend(settings.fallback))
    if rank == 0:
        try:
            identity = _take(settings, location, home, backends)
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
    board.put_once(f"peer/{rank}", json.dumps(Owner(identity["run"]).as_dict()).encode())
    peers = {other: Owner(**json.loads(_wait(board, f"peer/{other}"))) for other in range(world)}
    journal = Journal(os.path.join(home, JOURNAL), run_id=identity["run"], attempt=identity["attempt"], rank=rank)
    return Session(
        settings=settings,
        rank=rank,
        world=world,
        board=board,
        location=location,
        home=home,
        backends=backends,
        run=identity["run"],
        attempt=identity["attempt"],
        token=identity["token"],
        peers=peers,
        journal=journal,
        process_started=_process_started(),
        made=tuple(identity["made"]) if rank == 0 else (),
        command=command,
    )


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


def _take(settings: Settings, location: str, home: str, backends: Sequence[Backend]) -> dict[str, Any]:
    """On rank 0: become the one run that writes here; returns the attempt's identity."""
    made, path = [], os.path.abspath(home)
    while not os.path.isdir(path):
        made.append(path)
        path = os.path.dirname(path)
    os.makedirs(home, exist_ok=True)
    last = read_last_attempt(home)
    name = shown(os.path.basename(location.rstrip("/")))[:200] or "run"
    run = settings.run_id or last.run or f"{name}-{secrets.token_hex(4)}"
    for backend in backends:
        try:
            backend.acquire(Owner(run), wait_s=_LOCK_WAIT_S, takeover=settings.takeover)
        except ConnectionError as error:
            if backend is backends[0] and len(backends) == 1:
                raise
            log.warning("%s cannot be reached, going on without it: %s", backend.uri, error)
    return {"run": run, "attempt": last.number + 1, "token": new_token(), "made": made}


def announce(session: Session) -> None:
    """On rank 0: say in the home folder who runs now, and how the last attempt ended if it did not say so itself."""
    forget_old()
    path = os.path.join(session.home, ATTEMPT)
    last = read_last_attempt(session.home)
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
    write_durable(path, json.dumps(content, indent=1).encode())
    if launcher := os.environ.get("HOLDFAST_ANNOUNCE"):  # holdfast run wants to know where its script saves
        write_durable(launcher, session.home.encode())


def journal_of(home: str) -> Iterator[dict[str, Any]]:
    """The events of a run. What lies there in place of a journal, and is none, has none."""
    with contextlib.suppress(RefusedFileError):
        yield from read_journal(os.path.join(home, JOURNAL))


def withdraw(session: Session) -> None:
    """On rank 0, in place of :func:`announce`: nothing trains here after all, and nothing tells of it."""
    with contextlib.suppress(OSError):  # somebody else uses it, or has taken it away
        if session.made and set(os.listdir(session.home)) <= {LOCK}:
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
            if isinstance(outcome, CheckpointCorruptError):
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
            _start_anew(backend, settings, spare)
        except StoreError as error:
            if settings.resume == "never":  # a later start, which need not be told so, would go on from what is there
                raise
            log.warning("could not look through %s: %s", backend.uri, error)
        try:
            for name in clean(backend, [name for name in backend.names() if not spare(backend, name)]):
                log.info("removed %s, which was not whole", name)
                session.journal.record("cleaned", name=name, location=backend.uri)
        except StoreError as error:
            log.warning("could not clean %s: %s", backend.uri, error)
    yield from (checkpoint for checkpoint in whole(session.backends) if settings.resumes_from(checkpoint.manifest.run))


def _start_anew(backend: Backend, settings: Settings, spare: Callable[[Backend, str], bool]) -> None:
    """What this run is told not to go on from must not be found later as the newest."""
    if settings.resume == "auto":
        return
    names = backend.names()
    if settings.resume == "own":
        names = [name for name in names if _is_of_others(backend, name, settings, spare)]
    if not names:
        return
    if not isinstance(backend, LocalBackend):
        others = " of other runs" if settings.resume == "own" else ""
        raise ConfigError(
            f"HOLDFAST_RESUME={settings.resume!r}, but {backend.uri} holds {len(names)} checkpoints{others}; give "
            f"another location, or remove them with: holdfast prune {backend.uri} --all"
        )
    target = os.path.join(backend.root, f"previous-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")
    os.makedirs(target)
    for name in names:
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
