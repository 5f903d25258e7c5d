"""Checkpoints at rest: the newest whole one, verification, retention, and cleaning.

Guarantees: what :func:`whole` yields was committed; what :func:`retain` removes is never the last
whole checkpoint nor anything that a kept one refers to; :func:`clean` removes only what is not whole,
and is called only by the run that holds the location.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.errors import CheckpointCorruptError, StoreError
from holdfast.store.base import Backend
from holdfast.store.manifest import Manifest, step_of
from holdfast.store.pipeline import read_checked

log = logging.getLogger(__name__)


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
    """The checkpoint of that name, if it is whole as far as its manifest and its file sizes tell."""
    data = backend.read_manifest(name)
    if data is None:
        return None
    manifest = Manifest.decode(data)
    if manifest.name != name:
        raise CheckpointCorruptError(f"{name} holds the manifest of {manifest.name}")
    return Checkpoint(name, backend, manifest)


def whole(backends: Sequence[Backend]) -> Iterator[Checkpoint]:
    """All whole checkpoints of all locations, newest first; at the same step, in the order of the locations.

    Looks at no more folders than the caller takes: the newest of thousands costs one listing and one manifest.
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
    for entry in checkpoint.manifest.files:
        try:
            read_checked(checkpoint.backend, checkpoint.name, entry, on_bytes=on_bytes)
        except (StoreError, OSError) as error:
            problems.append(str(error))
    return problems


def missing_or_truncated(checkpoint: Checkpoint) -> str | None:
    """A quick look, without reading the bytes: the first file that is missing or has the wrong size."""
    sizes = checkpoint.backend.sizes(checkpoint.name)
    for entry in checkpoint.manifest.files:
        if entry.ref is None and sizes.get(entry.path) != entry.size:
            return f"{entry.path} has {sizes.get(entry.path, 'no')} bytes instead of {entry.size}"
    return None


def unfinished(backend: Backend) -> list[str]:
    """Folders that are not whole: being written, or left by a writer that died."""
    return [name for name in backend.names() if backend.read_manifest(name) is None]


def clean(backend: Backend, names: Iterable[str] | None = None) -> list[str]:
    """Remove folders that are not whole. Only for the run that holds the location."""
    removed = []
    referenced = _references(backend)
    for name in unfinished(backend) if names is None else names:
        backend.discard(name, keep=lambda path, name=name: f"{name}/{path}" in referenced)  # type: ignore[misc]
        removed.append(name)
    return removed


def retain(backend: Backend, keep: int, protect: Iterable[str] = ()) -> list[str]:
    """Keep the newest ``keep`` whole checkpoints and those in ``protect``; returns the names of those removed."""
    assert keep >= 1
    kept = list(whole([backend]))
    doomed = [checkpoint.name for checkpoint in kept[keep:] if checkpoint.name not in set(protect)]
    if doomed:
        referenced = _references(backend, without=set(doomed))
        for name in reversed(doomed):
            backend.discard(name, keep=lambda path, name=name: f"{name}/{path}" in referenced)  # type: ignore[misc]
    return doomed


def _references(backend: Backend, without: set[str] | None = None) -> set[str]:
    """Files that whole checkpoints need although they lie in another folder."""
    return {
        entry.ref
        for checkpoint in whole([backend])
        if checkpoint.name not in (without or set())
        for entry in checkpoint.manifest.files
        if entry.ref is not None
    }
