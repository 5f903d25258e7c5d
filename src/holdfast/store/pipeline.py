"""Writing and reading files with checksums at the speed of the disk, in bounded memory.

Hashing runs in the calling thread, the disk in another; both let go of the interpreter lock. A few
chunks are in flight at a time, whatever the size of the file.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
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
        self.deadline: Deadline | None = None
        for _ in range(count):
            view = memoryview(mmap.mmap(-1, CHUNK))
            self._owned.add(id(view.obj))
            self._free.put(view)

    def take(self) -> memoryview:
        while True:
            try:
                return self._free.get(timeout=0.25 if self.deadline else None)
            except queue.Empty:
                if self.deadline is not None and self.deadline.passed():
                    raise StoreUnavailableError("the store did not take the bytes before the deadline") from None

    def give_back(self, chunk: memoryview) -> None:
        if id(chunk.obj) in self._owned:
            self._free.put(memoryview(chunk.obj))


def digest_of(pieces: Iterable[memoryview]) -> str:
    """The checksum that a file of these bytes would have, without writing it."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return str(digest.hexdigest())


class FileWriter:
    """Writes images to sinks: the calling thread hashes, one thread of its own talks to the disk.

    With a deadline, a store that hangs is given up when it passes; without one, never.
    """

    def __init__(self, deadline: Deadline | None = None, pool: ChunkPool | None = None) -> None:
        self._pool = pool or ChunkPool()
        self._pool.deadline = deadline
        self._deadline = deadline
        # A sink: the file that follows. A chunk: its bytes. True: its end. None: no more files.
        self._queue: queue.Queue[Sink | memoryview | bool | None] = queue.Queue(IN_FLIGHT)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._drain, name="holdfast-disk", daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        sink: Sink | None = None
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, Sink):
                    sink = item
                elif self._error is None and sink is not None:
                    if isinstance(item, memoryview):
                        sink.write(item)
                    else:
                        sink.finish()
                        sink = None
            except BaseException as error:
                self._error = error
            if isinstance(item, memoryview):
                self._pool.give_back(item)
            if self._error is not None and sink is not None:
                sink.abort()
                sink = None
        if sink is not None:
            sink.abort()

    def _put(self, item: Sink | memoryview | bool | None) -> None:
        while True:
            if self._error is not None:
                raise self._error
            try:
                return self._queue.put(item, timeout=0.25 if self._deadline else None)
            except queue.Full:
                if self._deadline is not None and self._deadline.passed():
                    raise StoreUnavailableError("the store did not take the bytes before the deadline") from None

    def write(self, image: Image, open_sink: Callable[[str, int], Sink]) -> FileEntry:
        """Write one file. Its bytes are durable once :meth:`join` has returned."""
        self._put(open_sink(image.path, image.size))
        digest = xxhash.xxh3_128()
        written = 0
        for chunk in image.chunks(self._pool):
            digest.update(chunk)
            written += len(chunk)
            self._put(chunk)
        assert written == image.size, f"{image.path}: {written} bytes instead of {image.size}"
        self._put(True)
        return FileEntry(image.path, image.size, digest.hexdigest())

    def join(self) -> None:
        """Wait until all is durable; raises what went wrong."""
        self._put(None)
        self._thread.join(self._deadline.remaining_s() if self._deadline else None)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise StoreUnavailableError("the store did not make the bytes durable before the deadline")

    def abort(self) -> None:
        """Give up what is not written yet; the disk thread ends as soon as the store lets it."""
        self._error = self._error or StoreUnavailableError("the save was given up")
        try:
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, Sink):
                    item.abort()
                elif isinstance(item, memoryview):
                    self._pool.give_back(item)
        except queue.Empty:
            self._queue.put(None)


def _fetched(
    backend: Backend, folder: str, path: str, chunks: Iterable[tuple[int, memoryview]], ahead: int
) -> Iterator[memoryview]:
    """Fill the chunks from their offsets, in order, up to ``ahead`` of them before the caller asks."""
    ready: queue.Queue[memoryview | BaseException | None] = queue.Queue(ahead)
    stop = threading.Event()

    def fetch() -> None:
        try:
            for offset, chunk in chunks:
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
        thread.join()
    finally:
        # The caller may leave early, and may then use the memory for something else.
        stop.set()
        while thread.is_alive():
            with contextlib.suppress(queue.Empty):
                ready.get(timeout=0.05)


def read_chunks(backend: Backend, folder: str, path: str, size: int) -> Iterator[memoryview]:
    """A file in order, one chunk ahead of the reader. A chunk is valid until the next one is asked for."""
    step = min(backend.read_size, max(size, 1))
    # One with the reader, one that waits, one that is being filled.
    pool = [memoryview(mmap.mmap(-1, step)) for _ in range(3)]
    chunks = (
        (offset, pool[index % 3][: min(step, size - offset)]) for index, offset in enumerate(range(0, size, step))
    )
    return _fetched(backend, folder, path, chunks, ahead=1)


def _read_ahead(backend: Backend, folder: str, path: str, into: memoryview) -> Iterator[memoryview]:
    """Fill ``into`` in order while the caller hashes what is there already."""
    step = backend.read_size
    chunks = ((offset, into[offset : offset + step]) for offset in range(0, len(into), step))
    return _fetched(backend, folder, path, chunks, ahead=0)


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
