"""Disks that are full, broken, read-only or not ours: a clear error, and the older checkpoint stays."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.base.clock import Deadline
from holdfast.base.process import Owner
from holdfast.errors import StoreError, StoreUnavailableError
from holdfast.store.base import Sink
from holdfast.store.checkpoints import clean, retain, verify, whole
from holdfast.store.local import LocalBackend
from holdfast.store.pipeline import ChunkPool, FileWriter
from holdfast.testing.backend_contract import manifest_for, sample, save_checkpoint, write_file

NOBODY = 65534


def steps(backend: LocalBackend) -> list[int]:
    """The checkpoints that are there; each must be whole."""
    found = list(whole([backend]))
    assert [verify(checkpoint) for checkpoint in found] == [[]] * len(found)
    return [checkpoint.step for checkpoint in found]


def mount(*arguments: str) -> None:
    """Mount, or skip where that is not allowed."""
    if os.geteuid() != 0 or subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")


def in_a_child(work: Callable[[], None]) -> None:
    """Run in a forked process, for what cannot be undone in this one."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    with open(disk / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))


def test_a_full_disk_is_noticed_before_the_bytes_are_written(small_disk: Path) -> None:
    backend = LocalBackend(str(small_disk))
    save_checkpoint(backend, 1, {"model": sample(1, 1 << 20)})
    backend.begin("checkpoint-2")
    with pytest.raises(StoreError) as raised:
        backend.create("checkpoint-2", "model", 100 << 20)
    assert raised.value.errno == errno.ENOSPC
    assert "disk is full" in str(raised.value)
    assert steps(backend) == [1]


def test_a_disk_that_fills_up_while_writing_leaves_the_older_checkpoint(small_disk: Path) -> None:
    backend = LocalBackend(str(small_disk))
    save_checkpoint(backend, 1, {"model": sample(1, 1 << 20)})
    backend.begin("checkpoint-2")
    sink = backend.create("checkpoint-2", "model", 0)  # of unknown size: nothing is reserved
    for _ in range(2):
        sink.write(memoryview(bytes(1 << 20)))
    with pytest.raises(StoreError) as raised:
        sink.write(memoryview(bytes(2 << 20)))
    sink.abort()
    assert raised.value.errno == errno.ENOSPC
    assert steps(backend) == [1]


def test_a_full_disk_can_be_cleaned_up(small_disk: Path) -> None:
    backend = LocalBackend(str(small_disk))
    for step in (1, 2, 3):
        save_checkpoint(backend, step, {"model": sample(step, 1 << 20)})
    backend.begin("checkpoint-4")
    entry = write_file(backend, "checkpoint-4", "model", sample(4, 500 << 10))
    fill(small_disk)
    with pytest.raises(StoreError) as raised:
        backend.commit("checkpoint-4", manifest_for(4, [entry]).encode())
    assert raised.value.errno == errno.ENOSPC
    backend.begin("checkpoint-5")
    with pytest.raises(StoreError):
        backend.put_part("checkpoint-5", "rank-0", b"x" * 5000)
    assert steps(backend) == [3, 2, 1]
    again = LocalBackend(str(small_disk))
    again.acquire(Owner("next"))
    assert retain(again, keep=1) == ["checkpoint-2", "checkpoint-1"]
    assert sorted(clean(again)) == ["checkpoint-4", "checkpoint-5"]
    save_checkpoint(again, 5, {"model": sample(5, 1 << 20)})
    assert steps(again) == [5, 3]
    again.release()


def test_a_limit_on_the_size_of_files_is_an_error_like_any_other(tmp_path: Path) -> None:
    save_checkpoint(LocalBackend(str(tmp_path)), 1, {"model": sample(1, 1 << 20)})

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        backend = LocalBackend(str(tmp_path))
        with pytest.raises(StoreError) as raised:
            save_checkpoint(backend, 2, {"model": sample(2, 3 << 20)})
        assert raised.value.errno == errno.EFBIG
        assert steps(backend) == [1]

    in_a_child(work)


@pytest.mark.parametrize("call", ["write", "fsync", "ftruncate", "rename"])
def test_a_broken_disk_says_so_and_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    backend = LocalBackend(str(tmp_path))
    save_checkpoint(backend, 1, {"model": sample(1, 1 << 20)})

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken)
        with pytest.raises(StoreError) as raised:
            save_checkpoint(backend, 2, {"model": sample(2, 1 << 20)})
    assert raised.value.errno == errno.EIO
    assert str(tmp_path) in str(raised.value)
    assert steps(backend) == [1]
    clean(backend)
    save_checkpoint(backend, 2, {"model": sample(2, 1 << 20)})
    assert steps(backend) == [2, 1]


def test_a_disk_that_cannot_be_read_is_skipped_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = LocalBackend(str(tmp_path))
    for step in (1, 2, 3):
        save_checkpoint(backend, step, {"model": b"1"})
    really = os.lstat

    def broken(path: Any, **kwargs: Any) -> os.stat_result:
        if "checkpoint-3" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really(path, **kwargs)

    monkeypatch.setattr(os, "lstat", broken)
    assert [checkpoint.step for checkpoint in whole([backend])] == [2, 1]
    assert "skipping checkpoint-3" in caplog.text
    with pytest.raises(StoreError):
        retain(backend, keep=1)
    monkeypatch.undo()
    assert steps(backend) == [3, 2, 1], "retention removed something although it could not see everything"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_location_of_somebody_else(tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == 0 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    location = tmp_path / "theirs"
    save_checkpoint(LocalBackend(str(location)), 1, {"model": b"1"})
    (location / "checkpoint-1").chmod(0o755)
    hidden = tmp_path / "hidden"
    save_checkpoint(LocalBackend(str(hidden)), 1, {"model": b"1"})
    hidden.chmod(0o700)

    owner = Owner("mine")

    def work() -> None:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        backend = LocalBackend(str(location))
        assert steps(backend) == [1]
        attempts: list[Callable[[], object]] = [
            lambda: backend.begin("checkpoint-2"),
            lambda: backend.acquire(owner),
            lambda: backend.discard("checkpoint-1"),
            lambda: backend.set_aside("checkpoint-1"),
            lambda: backend.put_part("checkpoint-1", "rank-0", b""),
            lambda: LocalBackend(str(hidden)).names(),
            lambda: LocalBackend(str(hidden)).read_manifest("checkpoint-1"),
        ]
        for attempt in attempts:
            with pytest.raises(StoreError) as raised:
                attempt()
            assert raised.value.errno == errno.EACCES
            assert "owner and mode" in str(raised.value)
        assert next(whole([LocalBackend(str(hidden)), backend])).step == 1
        assert steps(backend) == [1]

    in_a_child(work)


def test_a_location_that_became_read_only(tmp_path: Path) -> None:
    location, view = tmp_path / "location", tmp_path / "view"
    save_checkpoint(LocalBackend(str(location)), 1, {"model": b"1"})
    view.mkdir()
    mount("--bind", "-o", "ro", str(location), str(view))
    try:
        backend = LocalBackend(str(view))
        with pytest.raises(StoreError) as raised:
            save_checkpoint(backend, 2, {"model": b"2"})
        assert raised.value.errno == errno.EROFS
        assert "read-only" in str(raised.value)
        with pytest.raises(StoreError):
            backend.discard("checkpoint-1")
        assert steps(backend) == [1]
    finally:
        subprocess.run(["umount", "-l", str(view)], check=True)


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for location in (str(tmp_path / "file"), str(tmp_path / "file" / "below")):
        backend = LocalBackend(location)
        assert backend.names() == []
        assert backend.read_manifest("checkpoint-1") is None
        assert list(whole([backend])) == []
        for attempt in (
            lambda backend=backend: backend.begin("checkpoint-1"),
            lambda backend=backend: backend.acquire(Owner("x")),
        ):
            with pytest.raises(StoreError) as raised:
                attempt()
            assert raised.value.errno in (errno.ENOTDIR, errno.EEXIST)

    backend = LocalBackend(str(tmp_path))
    save_checkpoint(backend, 1, {"model": b"1"})
    (tmp_path / "checkpoint-2").write_text("not a folder")
    with pytest.raises(StoreError) as raised:
        backend.begin("checkpoint-2")
    assert raised.value.errno in (errno.ENOTDIR, errno.EEXIST)
    assert steps(backend) == [1]
    assert clean(backend) == [], "what is not ours is not removed"
    backend.begin("checkpoint-3")
    write_file(backend, "checkpoint-3", "deep", b"a file")
    with pytest.raises(StoreError) as raised:
        write_file(backend, "checkpoint-3", "deep/er", b"a file below a file")
    assert raised.value.errno in (errno.ENOTDIR, errno.EEXIST)
    assert steps(backend) == [1]


def test_a_link_to_a_checkpoint_is_read_and_only_the_link_is_removed(tmp_path: Path) -> None:
    elsewhere = LocalBackend(str(tmp_path / "elsewhere"))
    save_checkpoint(elsewhere, 1, {"model": b"1"})
    backend = LocalBackend(str(tmp_path / "here"))
    save_checkpoint(backend, 2, {"model": b"2"})
    (tmp_path / "here" / "checkpoint-1").symlink_to(tmp_path / "elsewhere" / "checkpoint-1")
    assert steps(backend) == [2, 1]
    assert retain(backend, keep=1) == ["checkpoint-1"]
    assert steps(backend) == [2]
    assert steps(elsewhere) == [1]


class _HungSink(Sink):
    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.go_on = threading.Event()

    def write(self, chunk: memoryview) -> None:
        self.go_on.wait(30.0)

    def finish(self) -> None:
        self.go_on.wait(30.0)

    def abort(self) -> None:
        self.aborted.set()


class _Image:
    path = "model"
    size = 256 << 20

    def chunks(self, pool: ChunkPool) -> Iterator[memoryview]:
        for _ in range(self.size // (8 << 20)):
            yield pool.take()


def test_a_disk_that_hangs_is_given_up_at_the_deadline() -> None:
    sink = _HungSink()
    began = time.monotonic()
    writer = FileWriter(Deadline.after(0.5))
    with pytest.raises(StoreUnavailableError):
        writer.write(_Image(), lambda path, size: sink)
    writer.abort()
    assert time.monotonic() - began < 20.0
    sink.go_on.set()
    assert sink.aborted.wait(20.0), "the sink was not let go of"
