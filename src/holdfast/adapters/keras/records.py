"""What the calls of ``fit`` of a run have left, and which call of this process each of them belongs to.

Every checkpoint holds the state of the call that was under way, and beside it what all others have left, as files that
it shares with the checkpoint before. So retention removes nothing that is needed. What is lost all the same, or does
not fit, is not used: that call is trained.
"""

from __future__ import annotations

import dataclasses
import logging
import mmap
import re
from typing import Any

from holdfast.adapters.keras.identity import (
    CONTENT,
    EPOCHS,
    MODEL,
    Identity,
    asks_for_less,
    differences,
    steady_callers,
    varying_callers,
)
from holdfast.adapters.keras.images import read_tree
from holdfast.engine.saving import Adopted
from holdfast.errors import CheckpointCorruptError, StoreError
from holdfast.store.checkpoints import Checkpoint
from holdfast.store.manifest import FileEntry
from holdfast.store.pipeline import read_checked

log = logging.getLogger("holdfast")

WEIGHTS = "model.weights.h5"
_PLACES = re.compile(r"fits/(\d+)\.(.+)|fit-(\d+)/(.+)")
"""Where a checkpoint holds the file of another call; the second is that of holdfast 0.1.0."""
_PARTS = (MODEL, "variables", "optimizer", "arguments", "shapes")
_ALWAYS = 1 << 30
"""Bytes that are kept of finished calls however little room there is."""


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


@dataclasses.dataclass(slots=True)
class Record:
    """What one call of ``fit`` has left, or is to go on with."""

    files: dict[str, Adopted]
    """By their name in a folder of their own."""
    checkpoint: Checkpoint | None
    """Where this process can read them; None: this process has trained it."""
    entries: dict[str, FileEntry]
    identity: Identity | None
    """None: it was saved by holdfast 0.1.0."""
    finished: bool
    used: bool = False
    """A call of this process has taken it, or was it."""
    state: dict[str, Any] | None = None
    weights: memoryview | None = None

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


class Records:
    """The calls of ``fit`` of one run, by number."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world
        self._all: dict[int, Record] = {}
        self._other_world = False
        self._in_step = True
        """Every call of this process so far was what it was in the attempt before."""
        self.newest: int | None = None
        """The call that was under way, or had just ended, when the checkpoint was made."""
        self._told_lost = False
        self._told_full = False

    def open(self, checkpoint: Checkpoint, state: dict[str, Any], weights: memoryview) -> None:
        """This process resumes from ``checkpoint``; ``state`` is that of the call that was under way."""
        self._other_world = checkpoint.manifest.world_size != self._world
        known = {int(number): facts for number, facts in state.get("fits", {}).items()}
        places: dict[int, dict[str, FileEntry]] = {}
        for entry in checkpoint.manifest.files:
            number, path = _place_of(entry.path, int(state["fit"]))
            places.setdefault(number, {})[path] = entry
        for number, entries in places.items():
            files = {path: _adopted(checkpoint, entry, _path(number, path)) for path, entry in entries.items()}
            facts = known.get(number, {})
            identity, finished = facts.get("identity"), bool(facts.get("finished", True))
            self._all[number] = Record(files, checkpoint, entries, identity, finished)
        self.newest = int(state["fit"])
        current = self._all[self.newest]
        current.identity, current.finished = state.get("identity"), bool(state["finished"])
        current.state, current.weights = state, weights

    # ------------------------------------------------------------------ which call is which

    def find(self, expected: int, identity: Identity) -> tuple[int, Record | None]:
        """The number in the run of a call of this process, and what was saved of it.

        ``expected``: its number if the script does what it did before.
        """
        wrong: list[str] = []
        for number in [expected, *(number for number in sorted(self._all) if number != expected)]:
            record = self._all.get(number)
            if record is None or record.used:
                continue
            differs = self._differences(record, identity, in_place=number == expected)
            if number == expected:
                wrong = differs
            if differs:
                continue
            if not self._read(record):
                del self._all[number]
                self._tell_lost(number)
                return number, None
            self._take(record, identity, number, expected)
            return number, record
        self._in_step = self._in_step and not wrong
        if wrong:
            log.warning(
                "fit %d is not what was saved as fit %d, since its %s differs: it is trained from its beginning",
                expected,
                expected,
                ", ".join(wrong),
            )
            return max(self._all) + 1, None
        if any(number > expected for number in self._all):
            self._tell_lost(expected)
        return expected, None

    def _tell_lost(self, number: int) -> None:
        if not self._told_lost:
            log.warning("what fit %d had left was not kept: such a fit is trained again", number)
        self._told_lost = True

    def _take(self, record: Record, identity: Identity, number: int, expected: int) -> None:
        record.used = True
        if number != expected:
            self._in_step = False
            log.warning("this script now begins with fit %d of the run, and takes what that had left", number)
        elif self._other_data(record, identity):
            log.warning(
                "the data of fit %d is not what it was when it was saved: without a seed for what the script draws or "
                "splits, a resumed run is another one",
                number,
            )

    def _differences(self, record: Record, identity: Identity, *, in_place: bool) -> list[str]:
        if record.identity is None:  # of 0.1.0: its number is all that is known
            return [] if in_place else ["number"]
        if self._other_world:  # batches, shards and rates may depend on how many workers there are
            return differences(record.identity, identity, parts=(MODEL,), callers=())
        callers = varying_callers(one.identity for one in self._all.values())
        if record.finished:  # a script that leaves it out comes to the next one, which nothing else may tell from it
            callers |= steady_callers(record.identity)
        found = differences(record.identity, identity, parts=_PARTS, callers=sorted(callers))
        found += [EPOCHS] if asks_for_less(record.identity, identity) else []
        if found or not self._other_data(record, identity):
            return found
        # A script that draws or splits its data without a seed never has the same again. That it is the same call can
        # then be known only where nothing else speaks against it.
        alone = len(self._all) == 1 and not differences(
            record.identity, identity, parts=(), callers=record.identity.get("callers", {})
        )
        same = in_place and self._in_step and (alone or not record.finished)
        return [] if same else [CONTENT]

    def _other_data(self, record: Record, identity: Identity) -> bool:
        # Where there are others, all must decide alike, and each sees data of its own.
        return self._world == 1 and bool(differences(record.identity, identity, parts=(CONTENT,), callers=()))

    def _read(self, record: Record) -> bool:
        """Have the state and the weights at hand; False if they are lost."""
        if record.state is not None:
            return True
        own = record.entries.get(rank_file(self._rank)) or record.entries.get(rank_file(0))
        weights = record.entries.get(WEIGHTS)
        if own is None or weights is None or record.checkpoint is None:
            return False
        try:
            record.state, record.weights = tree_in(record.checkpoint, own), bytes_of(record.checkpoint, weights)
        except (StoreError, OSError) as error:
            log.warning("%s", error)
            return False
        return True

    # ------------------------------------------------------------------ what later checkpoints hold

    def keep(self, number: int, identity: Identity, checkpoint: Checkpoint, room: int | None) -> None:
        """``checkpoint`` is what a call that is finished has left. ``room``: bytes that are free where it lies."""
        entries = {entry.path: entry for entry in checkpoint.manifest.files if _PLACES.fullmatch(entry.path) is None}
        files = {path: _adopted(checkpoint, entry, _path(number, path)) for path, entry in entries.items()}
        record = Record(files, None, entries, identity, finished=True, used=True)
        self._all.pop(number, None)
        kept = sum(one.size for one in self._all.values())
        if room is None or kept + record.size <= max(_ALWAYS, room // 4):
            self._all[number] = record
        elif not self._told_full:
            self._told_full = True
            log.warning(
                "what fit %d has left is not kept, since %.1f GB are kept already and %.1f GB are free in %s: a "
                "resumed run trains such a fit again",
                number,
                kept / 1e9,
                room / 1e9,
                checkpoint.backend.uri,
            )

    def others(self, number: int, newest: Checkpoint | None) -> list[Adopted]:
        """The files of all calls but ``number``. ``newest``: the checkpoint that was committed last."""
        held = {} if newest is None else {entry.path: entry for entry in newest.manifest.files}
        found = []
        for other, record in sorted(self._all.items()):
            for path, file in record.files.items():
                entry = held.get(file.path)
                if entry is not None and newest is not None:
                    # The one it was taken from may be removed as soon as the next checkpoint is there.
                    record.files[path] = _adopted(newest, entry, file.path)
                if other != number:
                    found.append(record.files[path])
        return found

    def facts(self, number: int) -> dict[str, Any]:
        """Of all calls but ``number``, what a checkpoint says of them besides their files."""
        return {
            str(other): {"identity": record.identity, "finished": record.finished}
            for other, record in self._all.items()
            if other != number
        }


def _place_of(path: str, current: int) -> tuple[int, str]:
    """To which call a file of a checkpoint belongs, and its name there; ``current``: the one that was under way."""
    found = _PLACES.fullmatch(path)
    if found is None:
        return current, path
    return int(found[1] or found[3]), found[2] or found[4]


def _path(number: int, path: str) -> str:
    # All in one folder, which is made durable at once, however many there are.
    return f"fits/{number}.{path}"


def _adopted(checkpoint: Checkpoint, entry: FileEntry, path: str) -> Adopted:
    """A file of a committed checkpoint, as ``path`` in a later one."""
    source, at = (checkpoint.name, entry.path) if entry.ref is None else entry.ref.split("/", 1)
    placed = dataclasses.replace(entry, path=at)
    return Adopted(path, entry.size, placed, source, home=checkpoint.backend.uri)


def bytes_of(checkpoint: Checkpoint, entry: FileEntry) -> memoryview:
    memory = memoryview(mmap.mmap(-1, max(1, entry.size)))[: entry.size]
    read_checked(checkpoint.backend, checkpoint.name, entry, into=memory)
    return memory


def tree_in(checkpoint: Checkpoint, entry: FileEntry) -> dict[str, Any]:
    try:
        tree = read_tree(bytes_of(checkpoint, entry))
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise CheckpointCorruptError(f"{checkpoint.name}/{entry.path}: {error}") from error
    if not isinstance(tree, dict) or "fit" not in tree:
        raise CheckpointCorruptError(f"{checkpoint.name}/{entry.path} is not what Keras training leaves")
    return tree
