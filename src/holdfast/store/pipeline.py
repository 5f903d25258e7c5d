"""Writing and reading files with checksums at the speed of the disk, in bounded memory.

Hashing runs in the calling thread, the disk in another; both let go of the interpreter lock. A few
chunks are in flight at a time, whatever the size of the file.
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import xxhash

from holdfast.clock import Deadline
from holdfast.errors import CheckpointCorruptError, StoreUnavailableError
from holdfast.store.base import Backend, Sink
from holdfast.store.manifest import FileEntry

CHUNK = 8 << 20
"""Bytes handed to the disk at a time: large enough for full speed, small enough for bounded memory."""

IN_FLIGHT = 4
"""Chunks between hashing and the disk."""


class Image(Protocol):
    """A file that is to be written: known size, read once, front to back."""

    path: str
    size: int

    def chunks(self, pool: ChunkPool) -> Iterator[memoryview]:
        """The bytes, in pieces of at most :data:`CHUNK`; a piece taken from ``pool`` is given back by the writer."""


class ChunkPool:
    """A fixed set of page-aligned buffers. Taking one waits until the disk has given one back."""

    def __init__(self, count: int = IN_FLIGHT) -> None:
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._owned: set[int] = set()
        for _ in range(count):
            view = memoryview(mmap.mmap(-1, CHUNK))
            self._owned.add(id(view.obj))
            self._free.put(view)

    def take(self) -> memoryview:
        return self._free.get()

    def give_back(self, chunk: memoryview) -> None:
        if id(chunk.obj) in self._owned:
            self._free.put(memoryview(chunk.obj))


@dataclass(slots=True)
class _Failure:
    error: BaseException | None = None


class FileWriter:
    """Writes images to sinks: the calling thread hashes, one thread of its own talks to the disk."""

    def __init__(self, deadline: Deadline | None = None) -> None:
        self._pool = ChunkPool()
        self._deadline = deadline
        self._queue: queue.Queue[tuple[Callable[[], None], memoryview | None] | None] = queue.Queue(IN_FLIGHT)
        self._failure = _Failure()
        self._thread = threading.Thread(target=self._drain, name="holdfast-disk", daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        while (item := self._queue.get()) is not None:
            action, chunk = item
            if self._failure.error is None:
                try:
                    action()
                except BaseException as error:
                    self._failure.error = error
            if chunk is not None:
                self._pool.give_back(chunk)

    def _put(self, item: tuple[Callable[[], None], memoryview | None] | None) -> None:
        """Hand over to the disk thread; a disk that hangs past the deadline is given up."""
        while True:
            if self._failure.error is not None and item is not None:
                raise self._failure.error
            try:
                self._queue.put(item, timeout=0.25 if self._deadline else None)
                return
            except queue.Full:
                if self._deadline is not None and self._deadline.passed():
                    raise StoreUnavailableError("the store did not take the bytes before the deadline") from None

    def write(self, image: Image, open_sink: Callable[[str, int], Sink]) -> FileEntry:
        """Write one file. Its bytes are durable once :meth:`join` has returned."""
        sink = open_sink(image.path, image.size)
        digest = xxhash.xxh3_128()
        written = 0
        for chunk in image.chunks(self._pool):
            digest.update(chunk)
            written += len(chunk)
            self._put((lambda sink=sink, chunk=chunk: sink.write(chunk), chunk))  # type: ignore[misc]
        assert written == image.size, f"{image.path}: {written} bytes instead of {image.size}"
        self._put((sink.finish, None))
        return FileEntry(image.path, image.size, digest.hexdigest())

    def join(self) -> None:
        """Wait until all is durable; raises what went wrong."""
        self._put(None)
        timeout = self._deadline.remaining_s() if self._deadline else None
        self._thread.join(timeout)
        if self._failure.error is not None:
            raise self._failure.error
        if self._thread.is_alive():
            raise StoreUnavailableError("the store did not make the bytes durable before the deadline")


def read_chunks(backend: Backend, folder: str, path: str, size: int) -> Iterator[memoryview]:
    """A file in order, one chunk ahead of the reader."""
    pool: list[memoryview] = [memoryview(mmap.mmap(-1, CHUNK)) for _ in range(3)]
    ready: queue.Queue[memoryview | BaseException | None] = queue.Queue(1)
    stop = threading.Event()

    def fetch() -> None:
        try:
            for index, offset in enumerate(range(0, size, CHUNK)):
                chunk = pool[index % 3][: min(CHUNK, size - offset)]
                count = backend.read_into(folder, path, offset, chunk)
                if stop.is_set():
                    return
                ready.put(chunk[:count])
                if count < len(chunk):
                    break
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=fetch, name="holdfast-read", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        while thread.is_alive():
            try:
                ready.get(timeout=0.05)
            except queue.Empty:
                continue


def read_checked(
    backend: Backend,
    folder: str,
    entry: FileEntry,
    into: memoryview | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Read every byte of a file, into ``into`` if given; raises if the bytes are not those of the manifest."""
    source, path = (folder, entry.path) if entry.ref is None else tuple(entry.ref.split("/", 1))
    digest = xxhash.xxh3_128()
    done = 0
    chunks: Iterable[memoryview]
    chunks = (
        read_chunks(backend, source, path, entry.size) if into is None else _read_ahead(backend, source, path, into)
    )
    for chunk in chunks:
        digest.update(chunk)
        done += len(chunk)
        if on_bytes is not None:
            on_bytes(len(chunk))
    if done != entry.size:
        raise CheckpointCorruptError(f"{folder}/{entry.path} has {done} bytes instead of {entry.size}")
    if digest.hexdigest() != entry.checksum:
        raise CheckpointCorruptError(
            f"{folder}/{entry.path}: the checksum of its {done} bytes does not match the manifest"
        )


def _read_ahead(backend: Backend, folder: str, path: str, into: memoryview) -> Iterator[memoryview]:
    """Fill ``into`` in order while the caller hashes what is there already."""
    ready: queue.SimpleQueue[memoryview | BaseException | None] = queue.SimpleQueue()

    def fetch() -> None:
        try:
            for offset in range(0, len(into), CHUNK):
                chunk = into[offset : offset + CHUNK]
                count = backend.read_into(folder, path, offset, chunk)
                ready.put(chunk[:count])
                if count < len(chunk):
                    break
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    threading.Thread(target=fetch, name="holdfast-read", daemon=True).start()
    while (item := ready.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item
