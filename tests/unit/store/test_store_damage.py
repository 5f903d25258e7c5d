"""Damage at rest is found, and the newest whole checkpoint before it is used."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
import xxhash
from obstore.store import MemoryStore

from holdfast.errors import CheckpointCorruptError, StoreError
from holdfast.store.base import MANIFEST, Backend
from holdfast.store.checkpoints import clean, open_checkpoint, retain, verify, whole
from holdfast.store.local import LocalBackend
from holdfast.store.manifest import FileEntry, Manifest
from holdfast.store.object import ObjectBackend
from holdfast.store.pipeline import read_checked
from holdfast.testing.backend_contract import manifest_for, sample, save_checkpoint


class Place:
    """A location with checkpoints 1 and 2, and a way past its backend."""

    backend: Backend

    def read(self, path: str) -> bytes:
        raise NotImplementedError

    def write(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    def remove(self, path: str) -> None:
        raise NotImplementedError


class LocalPlace(Place):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backend = LocalBackend(str(folder))

    def read(self, path: str) -> bytes:
        return (self.folder / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        (self.folder / path).write_bytes(data)

    def remove(self, path: str) -> None:
        (self.folder / path).unlink()


class MemoryPlace(Place):
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.backend = ObjectBackend("s3://bucket/prefix", store=self.store)

    def read(self, path: str) -> bytes:
        return bytes(obstore.get(self.store, f"prefix/{path}").bytes())

    def write(self, path: str, data: bytes) -> None:
        obstore.put(self.store, f"prefix/{path}", data)

    def remove(self, path: str) -> None:
        obstore.delete(self.store, f"prefix/{path}")


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place: Place = LocalPlace(tmp_path) if request.param == "local" else MemoryPlace()
    for step in (1, 2):
        files = {"model": sample(("model", step), 1 << 20), "sub/rng": sample(("rng", step), 100), "empty": b""}
        save_checkpoint(place.backend, step, files)
    yield place
    place.backend.close()


def usable(place: Place) -> list[int]:
    """What a run could go on from: whole, and every byte as it was."""
    return [checkpoint.step for checkpoint in whole([place.backend]) if verify(checkpoint) == []]


@pytest.mark.parametrize("where", [0, 4096, (1 << 20) - 1])
def test_a_flipped_bit_is_found(place: Place, where: int) -> None:
    data = bytearray(place.read("checkpoint-2/model"))
    data[where] ^= 0x10
    place.write("checkpoint-2/model", bytes(data))
    checkpoint = next(whole([place.backend]))
    assert checkpoint.step == 2
    assert verify(checkpoint) == ["checkpoint-2/model: the checksum of its 1048576 bytes does not match the manifest"]
    entry = next(entry for entry in checkpoint.manifest.files if entry.path == "model")
    into = bytearray(entry.size)
    with pytest.raises(CheckpointCorruptError):
        read_checked(place.backend, "checkpoint-2", entry, memoryview(into))
    assert into == data
    assert usable(place) == [1]


def test_a_truncated_file_is_found_without_reading_it(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = next(whole([place.backend]))
    place.write("checkpoint-2/model", place.read("checkpoint-2/model")[:-1])
    assert verify(checkpoint) == ["checkpoint-2: model has 1048575 bytes instead of 1048576"]
    with pytest.raises(CheckpointCorruptError, match="model has 1048575 bytes"):
        open_checkpoint(place.backend, "checkpoint-2")
    assert [checkpoint.step for checkpoint in whole([place.backend])] == [1]
    assert "skipping checkpoint-2" in caplog.text
    assert "model has 1048575 bytes instead of 1048576" in caplog.text


def test_a_file_with_more_bytes_is_found(place: Place) -> None:
    place.write("checkpoint-2/sub/rng", place.read("checkpoint-2/sub/rng") + b"x")
    assert usable(place) == [1]


@pytest.mark.parametrize("path", ["model", "sub/rng", "empty"])
def test_a_missing_file_is_found(place: Place, path: str) -> None:
    checkpoint = next(whole([place.backend]))
    place.remove(f"checkpoint-2/{path}")
    assert len(verify(checkpoint)) == 1
    with pytest.raises(CheckpointCorruptError, match=f"{path} has no bytes"):
        open_checkpoint(place.backend, "checkpoint-2")
    assert usable(place) == [1]


def test_a_missing_file_that_another_checkpoint_holds_is_found() -> None:
    place = MemoryPlace()
    first = save_checkpoint(place.backend, 1, {"frozen": b"same"})
    save_checkpoint(place.backend, 2, {"other": b"2"})
    save_checkpoint(place.backend, 3, {"frozen": b"same"}, unchanged_since=first)
    place.remove("checkpoint-1/frozen")
    assert usable(place) == [2]


@pytest.mark.parametrize("keep", [0, 1, 100, -2])
def test_a_torn_manifest_is_found(place: Place, keep: int) -> None:
    place.write(f"checkpoint-2/{MANIFEST}", place.read(f"checkpoint-2/{MANIFEST}")[:keep])
    with pytest.raises(CheckpointCorruptError, match="manifest cannot be read"):
        open_checkpoint(place.backend, "checkpoint-2")
    assert usable(place) == [1]
    assert retain(place.backend, keep=1) == []
    assert clean(place.backend) == [], "a checkpoint that was committed is not removed without a word"


def test_a_manifest_in_which_one_letter_changed_is_found(place: Place) -> None:
    data = place.read(f"checkpoint-2/{MANIFEST}")
    place.write(f"checkpoint-2/{MANIFEST}", data.replace(b"periodic", b"periodik"))
    with pytest.raises(CheckpointCorruptError, match="checksum"):
        open_checkpoint(place.backend, "checkpoint-2")
    assert usable(place) == [1]


def test_the_manifest_of_another_checkpoint_is_found(place: Place) -> None:
    place.write(f"checkpoint-2/{MANIFEST}", place.read(f"checkpoint-1/{MANIFEST}"))
    with pytest.raises(CheckpointCorruptError, match="holds the manifest of checkpoint-1"):
        open_checkpoint(place.backend, "checkpoint-2")
    assert usable(place) == [1]


@pytest.mark.parametrize(
    "entry",
    [
        {"path": "../../etc/passwd"},
        {"path": "/etc/passwd"},
        {"path": "a/../../b"},
        {"path": "a//b"},
        {"path": "./a"},
        {"path": ""},
        {"path": "a\0b"},
        {"path": "a", "ref": "../x/passwd"},
        {"path": "a", "ref": "/etc/passwd"},
        {"path": "a", "ref": "no-checkpoint/passwd"},
        {"path": "a", "ref": "checkpoint-1"},
        {"path": "a", "ref": "checkpoint-1/../../x"},
        {"path": "a", "ref": 7},
        {"path": "a", "size": -1},
        {"path": "a", "size": float("inf")},
        {"path": "a", "size": "many"},
    ],
)
def test_a_manifest_that_points_elsewhere_is_refused(place: Place, entry: dict[str, Any]) -> None:
    body = json.loads(manifest_for(2, []).encode())
    del body["xxh3_128"]
    body["files"] = [{"size": 1, "xxh3_128": "00", **entry}]
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    body["xxh3_128"] = xxhash.xxh3_128_hexdigest(canonical)
    place.write(f"checkpoint-2/{MANIFEST}", json.dumps(body).encode())
    with pytest.raises(CheckpointCorruptError):
        open_checkpoint(place.backend, "checkpoint-2")
    assert usable(place) == [1]


@pytest.mark.parametrize("data", [b"[" * 200_000, b"null", b"[]", b"\xff\xfe", b'{"xxh3_128": 1}', b"7", b'"x"'])
def test_a_manifest_that_is_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointCorruptError):
        Manifest.decode(data)


def test_a_manifest_of_a_later_format_is_named_as_such() -> None:
    body = json.loads(manifest_for(2, []).encode())
    del body["xxh3_128"]
    body["format"] = 2
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    body["xxh3_128"] = xxhash.xxh3_128_hexdigest(canonical)
    with pytest.raises(CheckpointCorruptError, match="format 2"):
        Manifest.decode(json.dumps(body).encode())


def test_a_manifest_comes_back_as_it_was() -> None:
    manifest = dataclasses.replace(
        manifest_for(7, [FileEntry("größe", 3, "ab"), FileEntry("x", 0, "cd", "checkpoint-1/x")]),
        epoch=3,
        complete=True,
        inexact=("something",),
        timings={"write_s": 0.5},
        extra={"a": [1, None, "ü"]},
    )
    assert Manifest.decode(manifest.encode()) == manifest


def test_a_second_location_serves_when_the_first_is_damaged_or_away(tmp_path: Path) -> None:
    first, second = LocalBackend(str(tmp_path / "first")), LocalBackend(str(tmp_path / "second"))
    for backend, steps in ((first, (1, 3)), (second, (2, 3))):
        for step in steps:
            save_checkpoint(backend, step, {"model": sample(step, 10)})
    found = [(checkpoint.step, checkpoint.backend is first) for checkpoint in whole([first, second])]
    assert found == [(3, True), (3, False), (2, False), (1, True)]
    os.truncate(tmp_path / "first" / "checkpoint-3" / "model", 5)
    assert [checkpoint.step for checkpoint in whole([first, second])] == [3, 2, 1]

    class Away(LocalBackend):
        def names(self) -> list[str]:
            raise StoreError("out of reach")

    assert [checkpoint.step for checkpoint in whole([Away(str(tmp_path / "first")), second])] == [3, 2]


def test_the_newest_of_a_thousand_costs_a_handful_of_operations(tmpfs_path: Path) -> None:
    memory = ObjectBackend("s3://bucket/prefix", store=MemoryStore())
    for step in range(1, 1001):
        memory._client.put("write", f"prefix/checkpoint-{step}/{MANIFEST}", manifest_for(step, []).encode())
    operations: Counter[str] = Counter()
    really = memory._client.call

    def counted(what: str, *args: Any, **kwargs: Any) -> Any:
        operations[what.split()[0]] += 1
        return really(what, *args, **kwargs)

    memory._client.call = counted  # type: ignore[method-assign]
    assert next(whole([memory])).step == 1000
    assert operations == {"list": 1, "read": 1}
    assert len(memory.names()) == 1000

    local = LocalBackend(str(tmpfs_path))
    for step in range(1, 1001):
        folder = tmpfs_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / MANIFEST).write_bytes(manifest_for(step, []).encode())
    opened: list[str] = []

    class Counting(LocalBackend):
        def read_manifest(self, name: str) -> bytes | None:
            opened.append(name)
            return super().read_manifest(name)

        def sizes(self, name: str) -> dict[str, int]:
            opened.append(name)
            return super().sizes(name)

    assert next(whole([Counting(local.root)])).step == 1000
    assert opened == ["checkpoint-1000"]


def test_the_newest_of_a_thousand_on_a_real_server(s3_uri: str, s3_env: str) -> None:
    backend = ObjectBackend(s3_uri)
    prefix = s3_uri.split("/", 3)[3]

    async def many(store: Any) -> None:
        import asyncio

        for start in range(1, 1101, 100):
            await asyncio.gather(
                *(
                    obstore.put_async(store, f"{prefix}/checkpoint-{step}/{MANIFEST}", manifest_for(step, []).encode())
                    for step in range(start, start + 100)
                )
            )

    backend._client.call("write", many)
    assert len(backend.names()) == 1100, "a listing of more than one page"
    assert next(whole([backend])).step == 1100
