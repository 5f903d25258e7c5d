"""One save, on all ranks, from images to the commit.

Every rank writes its own files and tells the leader what it wrote, through the storage location
itself: nothing else need be alive. The leader writes what all ranks share, gathers the parts, and
commits. The others leave only when they see the commit.

The leader is rank 0. In a rescue, or when rank 0 dies on the way, it is the first survivor to claim
the folder: identical steps are committed once. What dead ranks can no longer write is made from what
they left behind.

A rank whose write fails says so on the job's board: the others leave that location with it, instead of
waiting there for a commit that cannot come.

With a deadline, the location that is expected to finish in time is tried first, judged by measured
speed; a location that fails or hangs is left while there is still time for the next: for what the next
is expected to take and two seconds more, or half of the time where that is less.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from holdfast.agree import Board
from holdfast.base.clock import SYSTEM_CLOCK, Clock, Deadline
from holdfast.base.host_memory import fresh_memory
from holdfast.base.process import Owner
from holdfast.base.timeouts import OverdueError, within
from holdfast.errors import CheckpointExistsError, StoreError, StoreUnavailableError
from holdfast.store.base import Backend
from holdfast.store.checkpoints import Checkpoint, open_checkpoint, retain
from holdfast.store.manifest import FileEntry, Manifest, checkpoint_name
from holdfast.store.pipeline import CHUNK, ChunkPool, FileWriter, Image, read_checked

log = logging.getLogger(__name__)

MARGIN_S = 0.75
"""Left between the last moment of a save and the deadline, for the way out of the process."""
_FALLBACK_S = 2.0
"""Left to the next location beyond what a save there is expected to take: a guess, often, or measured once."""
_HEIR, _HERE, _WANTED = "heir", "here-", "wanted-"
_OFFER_S = 0.5
"""How long an heir lets a rank of its machine that lives offer its part, before it takes it from the black box."""
_PERIODIC_LIMIT_S = 600.0


class Record(Protocol):
    """The journal, as far as a save needs it."""

    def record(self, event: str, /, **fields: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Adopted:
    """A file whose content a committed checkpoint holds already."""

    path: str
    size: int
    entry: FileEntry
    source: str
    home: str | None = None
    """Where that checkpoint lies: at another location the file is left out. None: the save fails without it."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A file of which it is just being found out whether a committed checkpoint holds it already."""

    path: str
    size: int
    outcome: Callable[[], Image | Adopted]
    """Waits until that is known."""


Part = Image | Adopted | Pending


class _Copy:
    """The bytes of a file of another checkpoint, once they are read."""

    def __init__(self, home: Backend, file: Adopted) -> None:
        self.path, self.size = file.path, file.size
        self._bytes = memoryview(fresh_memory(max(1, file.size)))[: file.size]
        read_checked(home, file.source, dataclasses.replace(file.entry, ref=None), into=self._bytes)

    def chunks(self, pool: ChunkPool) -> Iterator[memoryview]:
        for begin in range(0, self.size, CHUNK):
            yield self._bytes[begin : begin + CHUNK]


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What the ranks have to write. Built when it is asked for: live state is read as late as possible."""

    own: Callable[[], Sequence[Part]]
    """This rank's part."""
    shared: Callable[[], Sequence[Part]]
    """What one rank writes for all."""
    of: Callable[[int], Sequence[Image] | None] = lambda rank: None
    """Another rank's part, from what it left on this machine; None if that is not enough."""
    inexact: Sequence[str] = ()
    """What of it is not exact, in words; complete once ``shared`` was called."""
    own_inexact: Sequence[str] = ()
    """What of this rank's own part is not exact."""
    settle: Callable[[], None] = lambda: None
    """Waits until nothing of it is read from live state any more. The save may begin before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What is to be saved, and why."""

    step: int
    reason: str
    epoch: int | None = None
    complete: bool = False
    claimed: bool = False
    """There is no appointed leader: the first to claim the folder leads."""
    deadline: Deadline | None = None
    began: float = field(default_factory=time.monotonic)
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return checkpoint_name(self.step)


def _in_turn(parts: Sequence[Part]) -> Iterator[Image | Adopted]:
    """Small files first, since they are made durable while large ones are written; those not yet known last."""
    yield from sorted((part for part in parts if not isinstance(part, Pending)), key=lambda part: part.size)
    yield from (part.outcome() for part in parts if isinstance(part, Pending))


def _bounded(action: Callable[[], Manifest], limit: Deadline) -> Manifest:
    try:
        return within(limit.remaining_s(), action, "holdfast-write")
    except OverdueError:
        raise StoreUnavailableError("the location did not answer in time") from None


@dataclass(frozen=True, slots=True)
class _Try:
    """One save's try at one location, until it has to be given up."""

    backend: Backend
    limit: Deadline
    is_last: bool
    """There is no other location to go to."""
    board: Board | None
    key: str
    """On the board: the ranks whose part of the write failed."""

    def tell_failure(self, rank: int, error: Exception) -> None:
        if self.board is not None:
            with contextlib.suppress(OSError):  # without the board the others find out when their time is up
                self.board.append(self.key, json.dumps([rank, str(error)]).encode())

    def failures(self) -> dict[int, str]:
        """By rank, why."""
        if self.board is not None:
            with contextlib.suppress(OSError):
                return {int(rank): str(why) for rank, why in map(json.loads, self.board.entries(self.key))}
        return {}


@dataclass(slots=True, kw_only=True)
class Saver:
    """Carries saves out for one rank."""

    backends: Sequence[Backend]
    rank: int
    world: int
    run: str
    attempt: int
    token: str
    """Shared by the ranks of one attempt: a part without it is a leftover of another."""
    keep: int
    journal: Record
    replicated: bool = True
    """Whether each rank holds all that is shared, so that any of them can lead."""
    peers: Mapping[int, Owner] = field(default_factory=dict)
    gone: Callable[[], Collection[int]] = tuple
    """Ranks, also of other machines, that were silent when all were asked: their part will not come."""
    board: Board | None = None
    """On which the ranks tell each other that a write has failed."""
    clock: Clock = SYSTEM_CLOCK
    take: Callable[[Backend, bool], None] = lambda backend, leads: None
    """Takes a location for this run, if that was not possible at its start; True: this rank may come to lead there.
    Raises StoreError if it cannot be had."""
    retire: Callable[[Backend], Sequence[str]] | None = None
    """Removes old checkpoints and names them, where it is not for the newest ``keep`` alone to stay."""
    speeds: dict[str, float] = field(default_factory=dict)
    """Bytes a second that each location was seen to take."""
    committed: Manifest | None = None
    committed_at: Backend | None = None
    created: int = 0
    committed_wall: float | None = None
    _pool: ChunkPool = field(default_factory=ChunkPool)
    _tries: Counter[tuple[int, str]] = field(default_factory=Counter)
    _given_up: set[tuple[str, str]] = field(default_factory=set)
    """Locations and names of saves that failed: a rank that was behind may have begun them anew since."""

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """This attempt begins at ``checkpoint``: nothing older need be saved, and how fast its place is is known."""
        self.committed, self.committed_at = checkpoint.manifest, checkpoint.backend
        self._learn_speed(checkpoint.manifest, checkpoint.backend)

    def _learn_speed(self, manifest: Manifest, backend: Backend) -> None:
        """From what the manifest says, so that all ranks judge a location alike."""
        seconds = manifest.timings.get("write_s", 0.0)
        if seconds > 0 and manifest.size > 1 << 20:
            self.speeds[backend.uri] = manifest.size / seconds

    def expected_s(self, backend: Backend, size: int) -> float:
        """Seconds that a save of this size should take there; a guess of 200 MB/s before the first one."""
        return 0.3 + size / self.speeds.get(backend.uri, 200e6)

    def write(self, save: Save, files: Files, size: int) -> Manifest:
        """Save; returns the manifest, and only once the checkpoint is committed. Raises StoreError if it is not."""
        last: Exception | None = None
        for attempt in self._attempts(save, size):
            backend = attempt.backend
            if attempt.limit.passed() and last is not None:
                break
            try:
                return _bounded(lambda: self._write_to(attempt, save, files), attempt.limit)  # noqa: B023
            except CheckpointExistsError:
                existing = open_checkpoint(backend, save.name)
                if existing is not None:
                    return self._note_commit(existing.manifest, backend, save, 0)
            except Exception as error:
                if not isinstance(error, StoreUnavailableError):
                    self._clear(backend, save)
                attempt.tell_failure(self.rank, error)
                if not isinstance(error, (OSError, TimeoutError)):
                    raise
                last = error
                self.journal.record(
                    "save_failed", step=save.step, reason=save.reason, location=backend.uri, error=str(error)
                )
                log.warning("could not save step %d to %s: %s", save.step, backend.uri, error)
        raise StoreError(f"step {save.step} could not be saved anywhere; last error: {last}") from last

    def decline(self, save: Save, why: str) -> None:
        """Tell the others that this rank takes no part in a periodic save."""
        for attempt in self._attempts(save, 0):
            attempt.tell_failure(self.rank, StoreError(why))

    def complete(self, save: Save) -> Manifest:
        """Say of the checkpoint that is committed already that the run ends there."""
        assert self.committed is not None
        assert self.committed_at is not None
        self.committed = dataclasses.replace(self.committed, complete=True)
        if self.rank == 0:
            self.committed_at.amend(save.name, self.committed.encode())
        return self.committed

    def _choices(self, save: Save, size: int) -> list[tuple[Backend, Deadline]]:
        """Locations in the order to try, each with the moment at which to give it up."""
        backends = list(self.backends)
        if save.deadline is None:
            return [(backend, Deadline.after(_PERIODIC_LIMIT_S, self.clock)) for backend in backends]
        end = save.deadline.earlier(MARGIN_S)
        if len(backends) > 1 and self.expected_s(backends[0], size) > end.remaining_s():
            backends.sort(key=lambda backend: self.expected_s(backend, size))
            log.warning(
                "%s is too slow for the %.1f s left, saving to %s",
                self.backends[0].uri,
                end.remaining_s(),
                backends[0].uri,
            )
        choices = []
        for index, backend in enumerate(backends):
            after = sum(self.expected_s(other, size) + _FALLBACK_S for other in backends[index + 1 :])
            # A location keeps at least half of the time: an estimate that is too careful must not starve it.
            choices.append((backend, end.earlier(min(after, end.remaining_s() / 2))))
        return choices

    def _attempts(self, save: Save, size: int) -> list[_Try]:
        choices = self._choices(save, size)
        board = self.board if self.world > 1 else None
        self._tries[save.step, save.reason] += 1
        key = f"failed/{save.step}/{save.reason}/{self._tries[save.step, save.reason]}"
        return [
            _Try(backend, limit, index == len(choices), board, f"{key}/{self.backends.index(backend)}")
            for index, (backend, limit) in enumerate(choices, 1)
        ]

    def _clear(self, backend: Backend, save: Save) -> None:
        """Give back the room that a periodic save has taken and cannot use; after a notice there is no time for it."""
        if save.deadline is None and self.rank == 0:
            if self.world > 1:
                self._given_up.add((backend.uri, save.name))
            self._discard(backend, save.name)

    def _clear_others(self, backend: Backend, save: Save) -> None:
        """Once more for saves that failed before: a rank that came to one later than rank 0 has written its part."""
        failed = {name for uri, name in self._given_up if uri == backend.uri and name != save.name}
        if failed and save.deadline is None:
            for name in failed.intersection(backend.names()):
                self._discard(backend, name)

    def _discard(self, backend: Backend, name: str) -> None:
        try:
            if backend.read_manifest(name) is None:
                backend.discard(name)
        except StoreError as error:
            log.warning("could not remove what was written of %s: %s", name, error)

    def _write_to(self, attempt: _Try, save: Save, files: Files) -> Manifest:
        began = time.monotonic()
        backend = attempt.backend
        self.take(backend, save.claimed)
        self._clear_others(backend, save)
        backend.begin(save.name)
        leads = self._claim(backend, save) if save.claimed else self.rank == 0
        if save.claimed and not leads and self._is_near(self._heir(backend, save)):
            # The heir asks for this rank's part, or takes it from the black box: it alone decides, so that no file has
            # two writers. An offer that is withdrawn is never met.
            self._say(backend, save, _HERE, self.rank)
            try:
                return self._await_commit(attempt, save, files)
            except BaseException:
                with contextlib.suppress(StoreError):
                    self._say(backend, save, _HERE, self.rank, token="")
                raise
        images = [*files.own(), *(files.shared() if leads else ())]
        entries = self._put(attempt, save, images)
        if not leads:
            self._hand_in(backend, save, files, entries)
            return self._await_commit(attempt, save, files)
        return self._lead(attempt, save, files, entries, began)

    def _hand_in(self, backend: Backend, save: Save, files: Files, entries: Sequence[FileEntry]) -> None:
        """Tell the leader what this rank has written."""
        part = {
            "token": self.token,
            "files": [entry.as_dict() for entry in entries],
            "inexact": list(files.own_inexact),
        }
        backend.put_part(save.name, f"rank-{self.rank:05d}", json.dumps(part).encode())

    def _claim(self, backend: Backend, save: Save) -> bool:
        """Try to become the one that leads this save."""
        claim = {"token": self.token, "rank": self.rank, "host": socket.gethostname()}
        won = backend.claim_part(save.name, _HEIR, json.dumps(claim).encode())
        # An heir that has committed takes its claim away after that: to win then means to have come too late.
        if won and backend.read_manifest(save.name) is not None:
            raise CheckpointExistsError(f"{save.name} was committed by another rank")
        return won

    def _heir(self, backend: Backend, save: Save) -> dict[str, Any] | None:
        """Who claimed this save; None: nobody, or it is committed already."""
        claim = backend.read_parts(save.name).get(_HEIR)
        return None if claim is None else dict(json.loads(claim))

    @staticmethod
    def _is_near(heir: dict[str, Any] | None) -> bool:
        return heir is None or heir["host"] == socket.gethostname()

    def _put(self, attempt: _Try, save: Save, parts: Sequence[Part]) -> list[FileEntry]:
        """Write the files durably."""
        entries: list[FileEntry] = []
        backend = attempt.backend
        writer = FileWriter(attempt.limit, self._pool)
        try:
            for image in _in_turn(parts):
                found: Image | FileEntry | None = image if not isinstance(image, Adopted) else None
                if isinstance(image, Adopted):
                    found = self._adopt(attempt, save, image)
                if isinstance(found, FileEntry):
                    entries.append(found)
                elif found is not None:
                    entries.append(writer.write(found, lambda path, size: backend.create(save.name, path, size)))
            writer.join()
        except BaseException:
            writer.abort()
            self._pool = ChunkPool()  # the disk threads may hold chunks of the old one for as long as they hang
            raise
        return entries

    def _adopt(self, attempt: _Try, save: Save, file: Adopted) -> Image | FileEntry | None:
        """The entry of a file that need not be written, or its bytes where the location cannot refer to them.

        None: it is left out, which the checkpoint can do without.
        """
        backend = attempt.backend
        if file.home in (None, backend.uri):
            extra = backend.adopt(save.name, file.path, file.source, file.entry.path)
            if extra is not None:
                return FileEntry(file.path, file.size, file.entry.checksum, extra.get("ref"))
        try:
            home = backend if file.home is None else next(one for one in self.backends if one.uri == file.home)
            left_s = attempt.limit.remaining_s()
            if save.deadline is not None and (home is not backend or self.expected_s(backend, file.size) > left_s / 2):
                raise StoreError("there is no time to copy it")  # and its home may be what does not answer
            return _Copy(home, file)
        except (StoreError, OSError, StopIteration) as error:
            if file.home is None:
                raise StoreError(f"{backend.uri} cannot refer to {file.source}/{file.entry.path}: {error}") from error
            log.warning("%s is not carried into %s in %s: %s", file.path, save.name, backend.uri, error)
            return None

    def _lead(self, attempt: _Try, save: Save, files: Files, entries: list[FileEntry], began: float) -> Manifest:
        backend = attempt.backend
        written = time.monotonic()
        inexact = self._gather(attempt, save, files, entries)
        gathered = time.monotonic()
        manifest = Manifest(
            step=save.step,
            reason=save.reason,
            epoch=save.epoch,
            complete=save.complete,
            world_size=self.world,
            files=tuple(sorted(entries, key=lambda entry: entry.path)),
            created=datetime.fromtimestamp(self.clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            run=self.run,
            attempt=self.attempt,
            inexact=(*files.inexact, *inexact),
            timings={
                "before_write_s": round(began - save.began, 4),
                "write_s": round(written - began, 4),
                "gather_s": round(gathered - written, 4),
            },
            extra=dict(save.extra),
        )
        backend.commit(save.name, manifest.encode())
        self._note_commit(manifest, backend, save, time.monotonic() - began)
        if save.deadline is None:
            try:
                # Each rank has written its part, and with that has left the saves before it: none comes back.
                self._clear_others(backend, save)
                self._given_up = {(uri, name) for uri, name in self._given_up if uri != backend.uri}
                for name in retain(backend, self.keep) if self.retire is None else self.retire(backend):
                    self.journal.record("removed", name=name, location=backend.uri)
            except StoreError as error:
                log.warning("could not remove old checkpoints: %s", error)
        return manifest

    def _gather(self, attempt: _Try, save: Save, files: Files, entries: list[FileEntry]) -> list[str]:
        """Add the other ranks' files; returns what could not be had exactly."""
        backend, limit = attempt.backend, attempt.limit
        missing = set(range(self.world)) - {self.rank}
        asked: set[int] = set()
        inexact = list(files.own_inexact)
        pause = 0.005
        began = time.monotonic()
        while missing:
            parts = backend.read_parts(save.name)
            for part, data in parts.items():
                rank = int(part.removeprefix("rank-")) if part.startswith("rank-") else -1
                content = json.loads(data)
                if rank in missing and content["token"] == self.token:
                    entries += [FileEntry.from_dict(entry) for entry in content["files"]]
                    inexact += content.get("inexact", ())
                    missing.discard(rank)
            failed = attempt.failures() if missing else {}
            for rank, why in failed.items():
                if rank in missing and (save.deadline is None or not attempt.is_last):
                    raise StoreError(f"rank {rank} could not write its part of step {save.step}: {why}")
            late = limit.passed(reserve_s=1.0) and save.deadline is not None
            offers = save.claimed and not late and time.monotonic() - began < _OFFER_S
            gone = self.gone()
            for rank in sorted(missing):
                offered = save.claimed and self._is_said(parts, _HERE, rank)
                if offered and rank not in asked:
                    asked.add(rank)
                    self._say(backend, save, _WANTED, rank)
                may_write = offered or (offers and rank in self.peers and rank not in gone)
                if may_write and rank not in failed and not self._is_dead(rank):
                    continue
                if save.claimed or late or rank in failed or self._is_dead(rank):
                    images = files.of(rank) if self.replicated else None
                    if images is not None:
                        entries += self._put(attempt, save, images)
                        missing.discard(rank)
            dead = [rank for rank in sorted(missing) if rank in gone or self._is_dead(rank)]
            if dead and save.deadline is None:
                raise StoreError(f"rank {dead[0]} died before it wrote its part of step {save.step}")
            if missing and (late or missing <= {*dead, *failed}):
                break
            if missing:
                if limit.passed():
                    raise StoreUnavailableError(f"rank {min(missing)} did not write its part in time")
                time.sleep(pause)
                pause = min(pause * 1.5, 0.2)
        if missing and not self.replicated:
            raise StoreError(f"the part of rank {min(missing)} is missing and no other rank holds a copy of it")
        return inexact + [f"the random state and data position of rank {rank} are lost" for rank in sorted(missing)]

    def _say(self, backend: Backend, save: Save, kind: str, rank: int, token: str | None = None) -> None:
        word = {"token": self.token if token is None else token}
        backend.put_part(save.name, f"{kind}{rank:05d}", json.dumps(word).encode())

    def _is_said(self, parts: Mapping[str, bytes], kind: str, rank: int) -> bool:
        """Whether this attempt has left such a word for, or of, a rank."""
        data = parts.get(f"{kind}{rank:05d}")
        return data is not None and json.loads(data)["token"] == self.token

    def dead_peers(self) -> list[int]:
        """Ranks of this machine that are gone."""
        return [rank for rank in self.peers if rank != self.rank and self._is_dead(rank)]

    def _is_dead(self, rank: int) -> bool:
        return rank in self.peers and self.peers[rank].is_dead()

    def _await_commit(self, attempt: _Try, save: Save, files: Files) -> Manifest:
        """Wait for the leader's commit; take over from rank 0 if it is seen to be dead or to have failed."""
        backend = attempt.backend
        pause = 0.005
        asked = False
        while True:
            parts = backend.read_parts(save.name)
            heir = dict(json.loads(parts[_HEIR])) if _HEIR in parts else None
            if not asked and self._is_said(parts, _WANTED, self.rank):
                asked = True
                self._hand_in(backend, save, files, self._put(attempt, save, files.own()))
            leader = int(heir["rank"]) if heir else 0
            error = attempt.failures().get(leader)
            dead = self._is_dead(leader)
            found = open_checkpoint(backend, save.name)  # after the look at the leader, who may commit and then leave
            if found is not None:
                return self._note_commit(found.manifest, backend, save, 0)
            if dead or error is not None:
                why = f"rank {leader}, which led the save of step {save.step}, " + (
                    f"failed: {error}" if error else "died"
                )
                elsewhere = not dead and not attempt.is_last
                if heir is not None or elsewhere or not self.replicated or save.deadline is None:
                    raise StoreError(why)
                began = time.monotonic()
                if self._claim(backend, save):
                    log.warning("%s; rank %d goes on", why, self.rank)
                    entries = self._put(attempt, save, [*files.own(), *files.shared()])
                    return self._lead(attempt, save, files, entries, began)
            if attempt.limit.passed():
                raise StoreUnavailableError(f"{save.name} was not committed in time")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.2)

    def _note_commit(self, manifest: Manifest, backend: Backend, save: Save, seconds: float) -> Manifest:
        self.committed, self.committed_at = manifest, backend
        self._learn_speed(manifest, backend)
        self.committed_wall = self.clock.wall()
        self.created += 1
        if seconds:
            self.journal.record(
                "commit",
                step=save.step,
                reason=save.reason,
                name=save.name,
                location=backend.uri,
                bytes=manifest.size,
                seconds=round(seconds, 4),
                since_request_s=round(time.monotonic() - save.began, 4),
                inexact=list(manifest.inexact),
                **manifest.timings,
            )
        return manifest
