"""Files on their way to the disk, and what becomes of them when something goes wrong."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator

import pytest
import xxhash

from holdfast.store.base import Sink
from holdfast.store.local import LocalSink
from holdfast.store.pipeline import CHUNK, IN_FLIGHT, ChunkPool, FileWriter


class Bytes:
    """A file of known bytes, in buffers of the pool."""

    def __init__(self, path: str, data: bytes, step: int = CHUNK) -> None:
        self.path, self.size = path, len(data)
        self._data, self._step = data, step

    def chunks(self, pool: ChunkPool) -> Iterator[memoryview]:
        for begin in range(0, self.size, self._step):
            piece = self._data[begin : begin + self._step]
            chunk = pool.take()
            chunk[: len(piece)] = piece
            yield chunk[: len(piece)]


class Watched(Sink):
    """Keeps what it is told, at its own pace, and objects to being let go of while it writes."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.told: list[bytes] = []
        self.ends: list[str] = []
        self._inside = threading.Semaphore(0)
        self._fails_at = fails_at

    def write(self, chunk: memoryview) -> None:
        self.write_at(sum(map(len, self.told)), chunk)

    def write_at(self, offset: int, chunk: memoryview) -> None:
        self._inside.release()
        assert not self.ends
        time.sleep(random.uniform(0, 0.003))
        fails = self._fails_at == len(self.told)
        if not fails:
            self.told.append(bytes(chunk))
        self._inside.acquire()
        if fails:
            raise OSError("the disk is broken")

    def finish(self) -> None:
        assert not self._inside._value
        self.ends.append("finished")

    def abort(self) -> None:
        assert not self._inside._value
        self.ends.append("aborted")


class WatchedAtOnce(Watched):
    at_once = True


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 4097])
@pytest.mark.parametrize("step", [CHUNK, 1 << 20, 100_001])
def test_a_file_is_on_the_disk_as_it_was_given(tmp_path, size, step):
    if size // step > 100:
        step = CHUNK
    data = os.urandom(size)
    writer = FileWriter()
    images = [Bytes(name, data, step) for name in "ab"]
    entries = [writer.write(image, lambda path, size: LocalSink(str(tmp_path / path), size)) for image in images]
    writer.join()
    for entry in entries:
        assert (tmp_path / entry.path).read_bytes() == data
        assert (entry.size, entry.checksum) == (size, xxhash.xxh3_128_hexdigest(data))


@pytest.mark.parametrize("kind", [Watched, WatchedAtOnce])
def test_every_file_is_finished_once_and_after_its_last_chunk(kind):
    writer = FileWriter()
    sinks = {}
    files = {f"file-{number}": os.urandom(number * 1000) for number in range(12)}

    def open_sink(path, size):
        sinks[path] = kind()
        return sinks[path]

    for path, data in files.items():
        writer.write(Bytes(path, data, 700), open_sink)
    writer.join()
    for path, data in files.items():
        assert sinks[path].ends == ["finished"]
        if kind is Watched:
            assert b"".join(sinks[path].told) == data
        else:
            assert sorted(sinks[path].told) == sorted(data[i : i + 700] for i in range(0, len(data), 700))


@pytest.mark.parametrize("kind", [Watched, WatchedAtOnce])
@pytest.mark.parametrize("fails_at", range(3))
def test_no_sink_is_left_open_after_an_error(kind, fails_at):
    writer = FileWriter()
    sinks = []

    def open_sink(path, size):
        sinks.append(kind(fails_at=fails_at if len(sinks) == 1 else None))
        return sinks[-1]

    def write_all():
        for number in range(100):
            writer.write(Bytes(f"file-{number}", bytes(5000), 1000), open_sink)
            while not sinks[0].ends:  # else the second file may fail before the first is finished
                time.sleep(0.001)

    with pytest.raises(OSError, match="broken"):
        write_all()
    writer.abort()
    for thread in writer._threads:
        thread.join(60.0)
    assert [sink.ends for sink in sinks[:1]] == [["finished"]]
    assert [sink.ends for sink in sinks[1:]] == [["aborted"]] * (len(sinks) - 1)
    with pytest.raises(OSError, match="broken"):
        writer.write(Bytes("later", bytes(10)), open_sink)
    assert sinks[-1].ends == ["aborted"], "opened after the error, and left open"


def test_an_image_that_raises_lets_go_of_its_sink():
    class Broken(Bytes):
        def chunks(self, pool):
            yield from list(super().chunks(pool))[:1]
            raise RuntimeError("the device is gone")

    sink = Watched()
    writer = FileWriter()
    with pytest.raises(RuntimeError, match="gone"):
        writer.write(Broken("model", bytes(100), 50), lambda path, size: sink)
    writer.abort()
    for thread in writer._threads:
        thread.join(60.0)
    assert sink.ends == ["aborted"]


def test_buffers_are_aligned_and_come_back():
    pool = ChunkPool()
    taken = [pool.take() for _ in range(IN_FLIGHT)]
    assert all(len(chunk) == CHUNK for chunk in taken)
    for chunk in taken:
        pool.give_back(chunk[:10])
    pool.give_back(memoryview(bytearray(5)))  # not one of its own
    again = threading.Thread(target=lambda: [pool.take() for _ in range(IN_FLIGHT)], daemon=True)
    again.start()
    again.join(60.0)
    assert not again.is_alive()
    assert pool._free.empty()
