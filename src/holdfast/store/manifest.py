"""The manifest: what belongs to a checkpoint. It carries a checksum of itself.

Loading a manifest, like loading anything from a checkpoint, runs no code: it is JSON.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import xxhash

from holdfast.errors import CheckpointCorruptError

FORMAT = 1
NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")
REASONS = ("jit", "periodic", "rescue", "final")


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def step_of(name: str) -> int | None:
    """The step in a folder's name; None if it is no checkpoint folder."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    path: str
    size: int
    checksum: str
    """XXH3, 128 bits, over all bytes, in hexadecimal."""
    ref: str | None = None
    """``<folder>/<path>`` where the bytes lie, if not in this folder itself."""

    def as_dict(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"path": self.path, "size": self.size, "xxh3_128": self.checksum}
        if self.ref is not None:
            entry["ref"] = self.ref
        return entry

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> FileEntry:
        path, ref, size = str(entry["path"]), entry.get("ref"), int(entry["size"])
        for relative in (path, ref or path):
            # A manifest comes from shared storage: it must not be able to name files elsewhere.
            if "\0" in relative or not {"", ".", ".."}.isdisjoint(relative.split("/")):
                raise ValueError(f"path {relative!r} leaves the checkpoint")
        if ref is not None and ("/" not in ref or step_of(ref.split("/", 1)[0]) is None):
            raise ValueError(f"ref {ref!r} leads to no checkpoint")
        if size < 0:
            raise ValueError(f"{path!r} has {size} bytes")
        return cls(path, size, str(entry["xxh3_128"]), ref)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a whole checkpoint consists of."""

    step: int
    reason: str
    world_size: int
    files: tuple[FileEntry, ...]
    created: str
    run: str
    attempt: int
    epoch: int | None = None
    complete: bool = False
    """The run reached its end: starting it again has nothing left to do."""
    inexact: tuple[str, ...] = ()
    """What could not be saved exactly, in words; empty for an exact checkpoint."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds, by phase."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the adapter wants to find again."""

    @property
    def name(self) -> str:
        return checkpoint_name(self.step)

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files)

    def encode(self) -> bytes:
        body = {
            "format": FORMAT,
            "step": self.step,
            "epoch": self.epoch,
            "world_size": self.world_size,
            "reason": self.reason,
            "complete": self.complete,
            "inexact": list(self.inexact),
            "created": self.created,
            "run": self.run,
            "attempt": self.attempt,
            "timings": self.timings,
            "extra": self.extra,
            "files": [entry.as_dict() for entry in self.files],
        }
        return json.dumps({**body, "xxh3_128": _seal(body)}, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        try:
            body = json.loads(data)
            seal = body.pop("xxh3_128")
            if seal != _seal(body):
                raise ValueError("its own checksum does not match")
            if body["format"] != FORMAT:
                raise ValueError(f"format {body['format']!r} is not {FORMAT}, which this version of holdfast reads")
            return cls(
                step=int(body["step"]),
                epoch=body["epoch"],
                world_size=int(body["world_size"]),
                reason=str(body["reason"]),
                complete=bool(body["complete"]),
                inexact=tuple(body["inexact"]),
                created=str(body["created"]),
                run=str(body["run"]),
                attempt=int(body["attempt"]),
                timings=dict(body["timings"]),
                extra=dict(body["extra"]),
                files=tuple(FileEntry.from_dict(entry) for entry in body["files"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise CheckpointCorruptError(f"the manifest cannot be read: {error}") from error


def _seal(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return str(xxhash.xxh3_128_hexdigest(canonical))
