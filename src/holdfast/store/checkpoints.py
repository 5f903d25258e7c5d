"""Checkpoints at rest: the newest whole one, verification, retention, and cleaning.

Guarantees: what :func:`whole` yields was committed; what :func:`retain` removes is never the last
whole checkpoint nor anything that a kept one refers to; :func:`clean` removes only what is not whole,
and is called only by the run that holds the location.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.base.words import shown
from holdfast.errors import CheckpointCorruptError, StoreError
from holdfast.store.base import SENTINEL, Backend
from holdfast.store.manifest import FileEntry, Manifest, step_of
from holdfast.store.pickled import is_pickle, refusal, refused
from holdfast.store.pipeline import StoredFile, read_checked

log = logging.getLogger(__name__)

WHOLE, UNFINISHED, DAMAGED = "whole", "unfinished", "damaged"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint and where it lies."""

    name: str
    backend: Backend
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def location(self) -> str:
        return f"{self.backend.uri.rstrip('/')}/{self.name}"


def open_checkpoint(backend: Backend, name: str) -> Checkpoint | None:
    """The checkpoint of that name, if it is whole as far as its manifest and its file sizes tell.

    None: it is not whole, or not there. Raises :class:`~holdfast.errors.CheckpointCorruptError` if it was committed
    and something is missing now.
    """
    checkpoint = _decoded(backend, name)
    if checkpoint is not None and (problem := missing_or_truncated(checkpoint)) is not None:
        raise CheckpointCorruptError(f"{name}: {problem}")
    return checkpoint


def _decoded(backend: Backend, name: str) -> Checkpoint | None:
    data = backend.read_manifest(name)
    if data is None:
        return None
    manifest = Manifest.decode(data)
    if manifest.name != name:
        raise CheckpointCorruptError(f"{name} holds the manifest of {manifest.name}")
    return Checkpoint(name, backend, manifest)


def whole(backends: Sequence[Backend]) -> Iterator[Checkpoint]:
    """All whole checkpoints of all locations, newest first; at the same step, in the order of the locations.

    What is damaged or out of reach is skipped, with a warning. Looks at no more folders than the caller takes: the
    newest of thousands costs one listing of the location, one manifest and one listing of its folder.
    """
    candidates: list[tuple[int, int, str]] = []
    for order, backend in enumerate(backends):
        try:
            candidates += [(-(step_of(name) or 0), order, name) for name in backend.names()]
        except StoreError as error:
            log.warning("cannot list %s: %s", backend.uri, error)
    for _, order, name in sorted(candidates):
        try:
            checkpoint = open_checkpoint(backends[order], name)
        except StoreError as error:
            log.warning("skipping %s in %s: %s", name, backends[order].uri, error)
            continue
        if checkpoint is not None:
            yield checkpoint


def verify(checkpoint: Checkpoint, on_bytes: Callable[[int], None] | None = None) -> list[str]:
    """Read every byte; returns what is wrong, in words. An empty list: whole."""
    problems: list[str] = []
    wrong_size = dict(_wrong_sizes(checkpoint))
    for entry in checkpoint.manifest.files:
        if entry.path in wrong_size:
            problems.append(f"{checkpoint.name}: {wrong_size[entry.path]}")
            continue
        try:
            read_checked(checkpoint.backend, checkpoint.name, entry, on_bytes=on_bytes)
            if is_pickle(entry.path) and (names := _refused(checkpoint, entry)):
                problems.append(f"{checkpoint.name}/{shown(entry.path)} {refusal(names)}")
        except (StoreError, OSError) as error:
            problems.append(str(error))
    return problems


def _refused(checkpoint: Checkpoint, entry: FileEntry) -> list[str]:
    with io.BufferedReader(StoredFile(checkpoint.backend, checkpoint.name, entry)) as file:
        return refused(entry.path, file)


def missing_or_truncated(checkpoint: Checkpoint) -> str | None:
    """A quick look, without reading the bytes: the first file that is missing or has the wrong size."""
    return next((problem for _, problem in _wrong_sizes(checkpoint)), None)


def _wrong_sizes(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    sizes: dict[str, dict[str, int]] = {}
    for entry in checkpoint.manifest.files:
        folder, _, path = (entry.ref or f"{checkpoint.name}/{entry.path}").partition("/")
        if folder not in sizes:
            sizes[folder] = checkpoint.backend.sizes(folder)
        if (size := sizes[folder].get(path)) != entry.size:
            place = shown(entry.path if entry.ref is None else f"{entry.path} (kept as {entry.ref})")
            yield entry.path, f"{place} has {'no' if size is None else size} bytes instead of {entry.size}"


def rows_of(backend: Backend, *, fallback: bool = False) -> list[dict[str, Any]]:
    """All checkpoint folders of one location, newest first."""
    found = []
    for name in sorted(backend.names(), key=lambda name: -(step_of(name) or 0)):
        row: dict[str, Any] = {
            "name": name,
            "step": step_of(name),
            "epoch": None,
            "reason": None,
            "bytes": None,
            "created": None,
            "world_size": None,
            "complete": False,
            "exact": None,
            "state": UNFINISHED,
            "problem": None,
            "location": backend.uri,
            "fallback": fallback,
        }
        try:
            checkpoint = open_checkpoint(backend, name)
        except CheckpointCorruptError as error:
            row.update(state=DAMAGED, problem=str(error))
        else:
            if checkpoint is not None:
                row.update(facts_of(checkpoint))
        found.append(row)
    return found


def facts_of(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "step": manifest.step,
        "epoch": manifest.epoch,
        "reason": manifest.reason,
        "bytes": manifest.size,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "complete": manifest.complete,
        "exact": not manifest.inexact,
        "state": WHOLE,
    }


def unfinished(backend: Backend) -> list[str]:
    """Folders that are not whole: being written, or left by a writer that died."""
    return [name for name in backend.names() if not _is_committed(backend, name)]


def _is_committed(backend: Backend, name: str) -> bool:
    """Whether the folder was committed, damaged since or not."""
    try:
        return backend.read_manifest(name) is not None
    except CheckpointCorruptError:
        return True


def clean(backend: Backend, names: Iterable[str] | None = None) -> list[str]:
    """Remove folders that are not whole, of those in ``names`` if given. Only for the run that holds the location.

    Files in them that a whole checkpoint refers to stay.
    """
    removed = [name for name in (backend.names() if names is None else names) if not _is_committed(backend, name)]
    if removed:
        needed = set().union(*_references(backend).values())
        for name in removed:
            _discard(backend, name, needed)
    return removed


def retain(backend: Backend, keep: int, protect: Iterable[str] = ()) -> list[str]:
    """Keep the newest ``keep`` whole checkpoints and those in ``protect``; returns the names of those removed.

    ``protect`` names at least those from which a save under way adopts files. What an earlier call had to leave
    because a kept checkpoint referred to it goes once none does. Raises, before anything is removed, if a manifest
    is out of reach: it could refer to what would go.
    """
    assert keep >= 1
    protected = set(protect)
    kept = list(whole([backend]))
    doomed = [checkpoint.name for checkpoint in kept[keep:] if checkpoint.name not in protected]
    leftovers = _leftovers(backend, kept[:keep], protected)
    if doomed or leftovers:
        references = _references(backend)
        # The newest first, since they refer to older ones; and each is whole until its turn comes.
        for name in doomed:
            references.pop(name, None)
            _discard(backend, name, set().union(*references.values()))
            if any(ref.startswith(f"{name}/") for later in doomed for ref in references.get(later, ())):
                leftovers.append(name)
        for name in leftovers:
            _discard(backend, name, set().union(*references.values()))
    return doomed


def _discard(backend: Backend, name: str, needed: set[str]) -> None:
    backend.discard(name, keep=lambda path: f"{name}/{path}" in needed)


def _leftovers(backend: Backend, kept: Sequence[Checkpoint], protected: set[str]) -> list[str]:
    """Folders older than all that is kept, neither whole nor being written: what retention left of them."""
    if not kept:
        return []
    older = [name for name in backend.names() if (step_of(name) or 0) < kept[-1].step and name not in protected]
    return [name for name in older if not _is_committed(backend, name) and SENTINEL not in backend.sizes(name)]


def _references(backend: Backend) -> dict[str, set[str]]:
    """By committed checkpoint, the files that it needs although they lie in another folder.

    One whose manifest is damaged cannot be loaded and needs nothing; one that is out of reach now may need
    anything, hence that error is not caught.
    """
    references: dict[str, set[str]] = {}
    for name in backend.names():
        try:
            checkpoint = _decoded(backend, name)
        except CheckpointCorruptError:
            continue
        if checkpoint is not None:
            references[name] = {entry.ref for entry in checkpoint.manifest.files if entry.ref is not None}
    return references
