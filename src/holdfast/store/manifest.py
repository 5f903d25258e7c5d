"""The manifest: what belongs to a checkpoint. It carries a checksum of itself.

Loading a manifest, like loading anything from a checkpoint, runs no code: it is JSON. It may come from storage that
others write to: each value has the type and the bounds that are documented here, or the whole manifest is refused.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import xxhash

from holdfast.base.words import is_name, shown
from holdfast.errors import CheckpointCorruptError

FORMAT = 1
NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")
REASONS = ("jit", "periodic", "rescue", "final")
_REASON = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_CHECKSUM = re.compile(r"[0-9a-f]{1,128}")
_MOST = 10**18
_LONGEST = 1 << 16


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
        path, ref, size = _text(entry["path"], "path"), entry.get("ref"), _count(entry["size"], "size")
        ref = None if ref is None else _text(ref, "ref")
        for relative in (path, ref or path):
            # A manifest comes from shared storage: it must not be able to name files elsewhere.
            if "\0" in relative or not {"", ".", ".."}.isdisjoint(relative.split("/")):
                raise ValueError(f"path {relative!r} leaves the checkpoint")
        if ref is not None and ("/" not in ref or step_of(ref.split("/", 1)[0]) is None):
            raise ValueError(f"ref {ref!r} leads to no checkpoint")
        checksum = entry["xxh3_128"]
        if not isinstance(checksum, str) or not _CHECKSUM.fullmatch(checksum):
            raise ValueError(f"{path!r} has the checksum {_briefly(checksum)}")
        return cls(path, size, checksum, ref)


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
                step=_count(body["step"], "step"),
                epoch=None if body["epoch"] is None else _count(body["epoch"], "epoch"),
                world_size=_count(body["world_size"], "world_size"),
                reason=_reason(body["reason"]),
                complete=bool(body["complete"]),
                inexact=tuple(_text(words, "inexact") for words in body["inexact"]),
                created=_name(body["created"], "created"),
                run=_name(body["run"], "run"),
                attempt=_count(body["attempt"], "attempt"),
                timings={_name(phase, "timings"): _seconds(value) for phase, value in dict(body["timings"]).items()},
                extra=dict(body["extra"]),
                files=tuple(FileEntry.from_dict(entry) for entry in body["files"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise CheckpointCorruptError(f"the manifest cannot be read: {error}") from error


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ValueError(f"{name} is {_briefly(value)}, and no count")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"timings hold {_briefly(value)}, which is no number of seconds")
    return value


def _name(value: Any, name: str) -> str:
    if not is_name(value):
        raise ValueError(f"{name} is {_briefly(value)}, and no name")
    return str(value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise ValueError(f"{name} is {_briefly(value)}, and no text")
    return value


def _reason(value: Any) -> str:
    if not isinstance(value, str) or not _REASON.fullmatch(value):
        raise ValueError(f"reason is {_briefly(value)}, and no word")
    return value


def _briefly(value: Any) -> str:
    text = shown(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _seal(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return str(xxhash.xxh3_128_hexdigest(canonical))
