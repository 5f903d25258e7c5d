"""Checkpoints without torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.store.local import LocalBackend
from holdfast.store.manifest import FileEntry, Manifest, checkpoint_name
from holdfast.store.pipeline import ChunkPool, FileWriter


@dataclass
class Bytes:
    """A file of a checkpoint."""

    path: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    def chunks(self, pool: ChunkPool) -> Iterator[memoryview]:
        yield memoryview(self.data)


def make_checkpoint(
    location: str | Path,
    step: int,
    *,
    reason: str = "periodic",
    run: str = "test",
    attempt: int = 1,
    complete: bool = False,
    size: int = 5000,
    write_s: float = 0.01,
) -> None:
    backend = LocalBackend(str(location))
    name = checkpoint_name(step)
    backend.begin(name)
    writer = FileWriter()
    entries: list[FileEntry] = [
        writer.write(Bytes(path, bytes([step % 251]) * size), lambda path, size: backend.create(name, path, size))
        for path in ("model.safetensors", "rank-00000.safetensors")
    ]
    writer.join()
    manifest = Manifest(
        step=step,
        reason=reason,
        epoch=step // 10,
        world_size=1,
        files=tuple(entries),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        run=run,
        attempt=attempt,
        complete=complete,
        timings={"before_write_s": 0.0, "write_s": write_s, "gather_s": 0.0},
    )
    backend.commit(name, manifest.encode())
