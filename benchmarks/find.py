"""The newest whole checkpoint among a thousand: what a start has to wait for before it loads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from bench import Bench, Row, in_turn, seconds

COUNT = 1000
FILES = {
    "model.safetensors": 4096,
    "optimizer.safetensors": 8192,
    "rank-00000.safetensors": 512,
    "run.safetensors": 256,
}
LIMIT_S = 0.05


def measure(bench: Bench) -> list[Row]:
    from holdfast.store.local import LocalBackend

    root = bench.path("local")
    _fill(lambda path, data: _write(os.path.join(root, path), data))
    found = in_turn(bench.rounds(21, 7), {"local": _search(LocalBackend(root))})["local"]
    typical = sorted(found)[len(found) // 2]
    row = Row(
        f"newest whole of {COUNT} checkpoints, local",
        seconds(found),
        f"≤ {LIMIT_S * 1e3:.0f} ms",
        typical <= LIMIT_S,
        {"seconds": found},
    )
    return [row, _object_store(bench)]


def _object_store(bench: Bench) -> Row:
    what = f"newest whole of {COUNT} checkpoints, object store in memory"
    try:
        import obstore
        from obstore.store import MemoryStore
    except ImportError:
        return Row(what, "not installed: pip install 'holdfast[s3]'")
    from holdfast.store.object import ObjectBackend

    store = MemoryStore()
    _fill(lambda path, data: obstore.put(store, f"runs/{path}", data))
    with contextlib.closing(ObjectBackend("s3://bench/runs", store=store)) as backend:
        found = in_turn(bench.rounds(21, 7), {"object": _search(backend)})["object"]
    return Row(what, seconds(found), values={"seconds": found})


def _fill(write: Callable[[str, bytes], Any]) -> None:
    from holdfast.store.manifest import FileEntry, Manifest

    for step in range(1, COUNT + 1):
        entries = tuple(FileEntry(path, size, "0" * 32) for path, size in FILES.items())
        manifest = Manifest(
            step=step,
            reason="periodic",
            world_size=1,
            files=entries,
            created="2026-01-01T00:00:00Z",
            run="bench",
            attempt=1,
        )
        for path, size in FILES.items():
            write(f"{manifest.name}/{path}", bytes(size))
        write(f"{manifest.name}/holdfast.json", manifest.encode())


def _write(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def _search(backend: Any) -> Callable[[], None]:
    from holdfast.store.checkpoints import whole

    def search() -> None:
        assert next(whole([backend])).step == COUNT

    return search
