"""A file as a notice."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.notice import FileSource, Notice

POLL_S = 0.01
QUIET_S = 0.3
"""Absence cannot be awaited: this many polls without a notice count as none."""


class Watch:
    """A started source and what it delivered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = FileSource(path, POLL_S)
        self._notices: queue.Queue[Notice] = queue.Queue()
        self._looks = 0
        self._look, self.source._identify = self.source._identify, self._counted  # type: ignore[method-assign]
        self.source.start(self._notices.put)

    def _counted(self) -> tuple[int, int] | None:
        self._looks += 1
        return self._look()

    def notice(self) -> Notice:
        return self._notices.get(timeout=20)

    def is_quiet(self) -> bool:
        """Also where nobody looked in that time: by then the file was looked at once more, from begin to end."""
        thread, looks, until = self.source._thread, self._looks + 2, time.monotonic() + 20
        try:
            self._notices.get(timeout=QUIET_S)
        except queue.Empty:
            while thread is not None and thread.is_alive() and self._looks < looks:
                assert time.monotonic() < until
                time.sleep(POLL_S)
            return self._notices.empty()
        return False


@pytest.fixture
def watches() -> Iterator[list[Watch]]:
    started: list[Watch] = []
    yield started
    for watch in started:
        watch.source.stop()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stop-please"


def watch(path: Path, watches: list[Watch]) -> Watch:
    watches.append(Watch(path))
    return watches[-1]


def put(path: Path, content: bytes | str) -> None:
    """Writes whole: nobody sees a part."""
    beside = path.with_name("beside")
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    beside.rename(path)


def test_a_file_that_appears_is_a_notice_once(path: Path, watches: list[Watch]) -> None:
    watched = watch(path, watches)
    before, before_wall = time.monotonic(), time.time()
    path.touch()
    notice = watched.notice()
    assert (notice.source, notice.detail, notice.grace_s) == ("file", str(path), None)
    assert before <= notice.at <= time.monotonic()
    assert notice.wall == pytest.approx(before_wall, abs=20)
    os.utime(path, (1, 1))
    assert watched.is_quiet()


def test_a_file_left_by_an_earlier_life_does_not_stop_this_one(path: Path, watches: list[Watch]) -> None:
    path.touch()
    assert watch(path, watches).is_quiet()


def test_an_old_file_that_is_touched_again_is_a_notice(path: Path, watches: list[Watch]) -> None:
    path.touch()
    os.utime(path, (1, 1))
    watched = watch(path, watches)
    path.touch()
    assert watched.notice().detail == str(path)


def test_an_old_file_that_is_replaced_with_the_same_time_is_a_notice(path: Path, watches: list[Watch]) -> None:
    put(path, "old")
    os.utime(path, (1, 1))
    watched = watch(path, watches)
    beside = path.with_name("beside")
    beside.write_text("new")
    os.utime(beside, (1, 1))
    beside.rename(path)
    assert watched.notice().detail == f"{path}: new"


def test_removing_an_old_file_is_not_a_notice(path: Path, watches: list[Watch]) -> None:
    path.touch()
    watched = watch(path, watches)
    path.unlink()
    assert watched.is_quiet()
    path.touch()
    assert watched.notice().detail == str(path)


def test_a_folder_that_does_not_exist_yet_is_waited_for(tmp_path: Path, watches: list[Watch]) -> None:
    path = tmp_path / "later" / "stop-please"
    watched = watch(path, watches)
    path.parent.mkdir()
    path.touch()
    assert watched.notice().detail == str(path)


@pytest.mark.parametrize(
    ("content", "grace_s"),
    [
        ('{"grace": 20}', 20.0),
        ('{"grace": 0.5, "why": "drain"}', 0.5),
        ('{"grace": 0}', 0.0),
        ('{"grace": -1}', None),
        ('{"grace": true}', None),
        ('{"grace": "20"}', None),
        ('{"grace": NaN}', None),
        ('{"grace": Infinity}', None),
        (json.dumps({"grace": 10**400}), None),
        ('{"why": "drain"}', None),
        ("[20]", None),
        ("20", None),
        ("[" * 4000, None),
        (json.dumps({"more than 4 KiB": "x" * 5000, "grace": 20}), None),
        ("node drain", None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_grace_period_is_taken_from_json_alone(
    path: Path, watches: list[Watch], content: str, grace_s: float | None
) -> None:
    watched = watch(path, watches)
    put(path, content)
    assert watched.notice().grace_s == grace_s


def test_text_is_quoted(path: Path, watches: list[Watch]) -> None:
    watched = watch(path, watches)
    put(path, "  node drain\n by the\tadmin \n")
    assert watched.notice().detail == f"{path}: node drain by the admin"


@pytest.mark.parametrize(
    "content",
    [os.urandom(100_000), b"\0" * 10_000_000, b"\x1b[2J" * 1000, b"\xff\xfe"],
    ids=["random", "zeros", "escapes", "no text"],
)
def test_garbage_is_a_notice_and_harmless(path: Path, watches: list[Watch], content: bytes) -> None:
    watched = watch(path, watches)
    put(path, content)
    notice = watched.notice()
    assert notice.grace_s is None
    assert notice.detail.isprintable()
    assert len(notice.detail) < len(str(path)) + 250


def test_what_is_written_right_after_the_creation_is_still_read(path: Path, watches: list[Watch]) -> None:
    watched = watch(path, watches)
    read = watched.source._read

    def read_then_written() -> bytes:
        content = read()
        path.write_text('{"grace": 7}')
        return content

    watched.source._read = read_then_written  # type: ignore[method-assign]
    path.touch()
    assert watched.notice().grace_s == 7.0


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_what_cannot_be_read_is_a_notice_all_the_same(path: Path, watches: list[Watch], make: object) -> None:
    watched = watch(path, watches)
    assert callable(make)
    make(path)
    assert watched.notice().detail == str(path)


def test_a_path_that_cannot_be_looked_at_is_said_once_and_is_no_notice(
    tmp_path: Path, watches: list[Watch], caplog: pytest.LogCaptureFixture
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)  # ELOOP, for root too
    with caplog.at_level(logging.WARNING, "holdfast"):
        watched = watch(loop, watches)
        assert watched.is_quiet()
    [record] = caplog.records
    assert str(loop) in record.getMessage()
    put(loop, "in place of the link, at once")
    # It may have been there all the time: only what changes from here on is a notice.
    assert watched.is_quiet()
    put(loop, "now")
    assert watched.notice().detail == f"{loop}: now"


def test_stop_ends_the_thread_at_once_and_nothing_is_delivered_afterwards(path: Path) -> None:
    notices: list[Notice] = []
    source = FileSource(path, poll_s=3600)
    before = set(threading.enumerate())
    source.start(notices.append)
    (thread,) = set(threading.enumerate()) - before
    began = time.monotonic()
    source.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert time.monotonic() - began < 15
    path.touch()
    assert notices == []


def test_a_source_may_start_again_and_takes_the_file_as_known(path: Path, watches: list[Watch]) -> None:
    watched = watch(path, watches)
    path.touch()
    watched.notice()
    watched.source.stop()
    again: queue.Queue[Notice] = queue.Queue()
    watched.source.start(again.put)
    with pytest.raises(queue.Empty):
        again.get(timeout=QUIET_S)
    put(path, "again")
    assert again.get(timeout=20).detail == f"{path}: again"


@pytest.mark.parametrize("poll_s", [0, -1.0, float("nan")])
def test_a_poll_interval_that_is_no_time_is_refused(path: Path, poll_s: float) -> None:
    with pytest.raises(ConfigError, match="poll_s="):
        FileSource(path, poll_s)
