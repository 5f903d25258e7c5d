"""What a place for checkpoints must be able to do: one small abstract class.

A backend keeps *checkpoint folders* by name. A folder is **whole** once :meth:`Backend.commit` has
returned, and from no earlier moment; until then :meth:`Backend.read_manifest` answers None for it.
Everything else about checkpoints (what a manifest says, which is the newest, retention, verification)
is written once, on top of these methods, in :mod:`holdfast.store.checkpoints`.

A backend of your own passes ``holdfast.testing.BackendContract``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from holdfast.base.process import Owner

SENTINEL = "checkpoint-is-incomplete.txt"
"""Inside a folder from its first byte until its commit."""

MANIFEST = "holdfast.json"
"""Inside a folder that is whole: what belongs to it, with sizes and checksums."""

PARTS = ".parts"
"""Subfolder in which the ranks tell the committing rank what they wrote; gone after the commit."""


class Sink(ABC):
    """A file of a checkpoint that is being written, front to back. Not visible as whole before the commit."""

    at_once: bool = False
    """Whether :meth:`write_at` may be called, by several threads at once, instead of :meth:`write`."""

    @abstractmethod
    def write(self, chunk: memoryview) -> None:
        """Append. The chunk may be reused by the caller once this returns."""

    def write_at(self, offset: int, chunk: memoryview) -> None:
        """Write at ``offset``. The chunks of a file are all written, without gaps, before :meth:`finish`."""
        raise NotImplementedError

    @abstractmethod
    def finish(self) -> None:
        """Make all that was written durable, and close."""

    @abstractmethod
    def abort(self) -> None:
        """Give up: close, and let go of what is held. Never raises, whatever was called before."""


class Backend(ABC):
    """A place that holds checkpoint folders."""

    uri: str
    """The location as the user gave it, without credentials. A ``str``: ``Path`` eats the slashes of ``s3://``."""

    read_size: int = 8 << 20
    """Bytes that :meth:`read_into` is best asked for at a time: more where it reads in parallel."""

    @abstractmethod
    def names(self) -> list[str]:
        """The names of all checkpoint folders, whole or not. Raises nothing when the location does not exist."""

    @abstractmethod
    def read_manifest(self, name: str) -> bytes | None:
        """The manifest of a whole folder; None if the folder is not whole or not there.

        Raises :class:`~holdfast.errors.CheckpointCorruptError` if something lies in its place that is no file.
        """

    @abstractmethod
    def sizes(self, name: str) -> dict[str, int]:
        """Path and size of each file that lies in the folder now, manifest and sentinel included.

        A link is no file, whatever it leads to, nor is a pipe or a device.
        """

    @abstractmethod
    def read_into(self, name: str, path: str, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset`` of a file; returns how many bytes were read, short only at the end."""

    @abstractmethod
    def begin(self, name: str) -> None:
        """Make the folder, marked as not whole. Ranks that write one checkpoint together each call this.

        Raises :class:`~holdfast.errors.CheckpointExistsError` if a whole folder has the name.
        """

    @abstractmethod
    def create(self, name: str, path: str, size: int) -> Sink:
        """Start to write a file of ``size`` bytes into a folder that was begun."""

    @abstractmethod
    def adopt(self, name: str, path: str, source: str, source_path: str) -> dict[str, Any] | None:
        """Let the folder hold a file that another whole folder holds already, without storing its bytes again.

        ``source`` and ``source_path`` name the place where the bytes lie: if the other folder's manifest has a
        ``ref`` for the file, they are the two parts of that ``ref``, so that refs never lead to refs. Until the
        commit, retention must not remove ``source`` (:func:`holdfast.store.checkpoints.retain`'s ``protect``).

        Returns what the manifest must say besides size and checksum (a ``ref`` where the file stays in the
        other folder, nothing where it lies in both), or None where this is not possible.
        """

    @abstractmethod
    def put_part(self, name: str, part: str, data: bytes) -> None:
        """Tell the other ranks something about the folder that is being written. All or nothing."""

    @abstractmethod
    def claim_part(self, name: str, part: str, data: bytes) -> bool:
        """Like :meth:`put_part`, but only the first caller succeeds: True for it, False for all others."""

    @abstractmethod
    def read_parts(self, name: str) -> dict[str, bytes]:
        """What the ranks have told so far."""

    @abstractmethod
    def commit(self, name: str, manifest: bytes) -> None:
        """From the return of this call on, and from no earlier moment, the folder is whole, power cut included.

        If it raises, the folder is not whole, except where the store's answer was lost: then it may be, and what
        it holds is then all there. Raises :class:`~holdfast.errors.LocationBusyError` instead of committing if the
        location was acquired through this object and another run has taken it over since, and
        :class:`~holdfast.errors.CheckpointExistsError` if the folder is whole already.
        """

    @abstractmethod
    def amend(self, name: str, manifest: bytes) -> None:
        """Replace the manifest of a whole folder. All or nothing; the folder stays whole throughout."""

    @abstractmethod
    def discard(self, name: str, keep: Callable[[str], bool] | None = None) -> None:
        """Remove a folder; it is not whole any more before its first byte goes.

        Files for which ``keep`` says True stay: another folder refers to them.
        """

    @abstractmethod
    def set_aside(self, name: str) -> None:
        """Mark a folder as not whole: what was found damaged is never loaded again. It may be begun anew."""

    @abstractmethod
    def acquire(self, owner: Owner, *, wait_s: float = 0.0, takeover: bool = False) -> None:
        """Become the only run that writes here, until :meth:`release` or death.

        A run that died is no obstacle. ``takeover`` says that the other run is known to be gone, or may be pushed
        aside: its next commit raises.

        Raises :class:`~holdfast.errors.LocationBusyError`, naming the other, if it is still there after ``wait_s``.
        """

    def grant(self) -> str:
        """What the other ranks of the run that holds the location are told, for :meth:`join`; empty: nothing."""
        return ""

    def join(self, grant: str) -> None:  # noqa: B027
        """Write for the run that holds the location by ``grant``, as another of its ranks, until it is taken over."""

    def assure(self) -> None:  # noqa: B027
        """Raise :class:`~holdfast.errors.LocationBusyError` if the location was acquired or joined through this object
        and another run, or a restart of this one, has taken it over since.

        Once this would raise, the methods that write a folder raise it too, wherever the run was when it was displaced.
        """

    @abstractmethod
    def release(self) -> None:
        """Let another run write here. Does nothing where nothing is held."""

    def free_bytes(self) -> int | None:
        """Room left, where it can be known."""
        return None

    def close(self) -> None:
        """Let go of all that is held."""
        self.release()
