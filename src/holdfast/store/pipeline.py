"""Writing and reading files with checksums at the speed of the disk, in bounded memory.

Hashing runs in the calling thread, the disk in others; all let go of the interpreter lock. A few chunks
are in flight at a time, whatever the size of the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from holdfast.base.clock import Deadline
from holdfast.base.host_memory import HUGE, fresh_memory, lasting_memory
from holdfast.base.words import shown
from holdfast.errors import CheckpointCorruptError, StoreUnavailableError
from holdfast.store.base import Backend, Sink
from holdfast.store.manifest import FileEntry

CHUNK = 4 << 20
"""Bytes handed to the disk at a time: large enough for full speed, small enough to stay in the caches."""

IN_FLIGHT = 4
"""Chunks between hashing and the disk."""

READERS = 2
"""Threads that read: to get fresh memory takes them longer than to copy into it."""

WRITERS = 2
"""Threads that write: the disk has its next request before the last one is answered."""


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
        memory = lasting_memory(count * CHUNK + HUGE)
        begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE
        for offset in range(begin, len(memory), HUGE):
            memory[offset] = 0  # gets the page now and not when there is a deadline
        for offset in range(begin, begin + count * CHUNK, CHUNK):
            buffer = (ctypes.c_char * CHUNK).from_buffer(memory, offset)
            self._owned.add(id(buffer))
            self._free.put(memoryview(buffer).cast("B"))

    def take(self) -> memoryview:
        while True:
            try:
                return self._free.get(timeout=0.25 if self.deadline else None)
            except queue.Empty:
                if self.deadline is not None and self.deadline.passed():
                    raise StoreUnavailableError("the store did not take the bytes before the deadline") from None

    def give_back(self, chunk: memoryview) -> None:
        if id(chunk.obj) in self._owned:
            self._free.put(memoryview(chunk.obj).cast("B"))


def digest_of(pieces: Iterable[memoryview]) -> str:
    """The checksum that a file of these bytes would have, without writing it."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return str(digest.hexdigest())


class _File:
    """A file on its way to the disk."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.written = 0
        """How many of its chunks are written."""
        self.held = 1
        """How many still need the sink: chunks in the queue or being written, and whoever brings more of them."""
        self.finished = False


@dataclass(frozen=True, slots=True)
class _Item:
    """A chunk of a file, or its end."""

    file: _File
    number: int
    offset: int
    chunk: memoryview | None


class FileWriter:
    """Writes images to sinks: the calling thread hashes, threads of its own talk to the disk.

    With a deadline, a store that hangs is given up when it passes; without one, never.
    """

    def __init__(self, deadline: Deadline | None = None, pool: ChunkPool | None = None) -> None:
        self._pool = pool or ChunkPool()
        self._pool.deadline = deadline
        self._deadline = deadline
        self._queue: queue.Queue[_Item | None] = queue.Queue(IN_FLIGHT)
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._drain, name="holdfast-disk", daemon=True) for _ in range(WRITERS)
        ]
        for thread in self._threads:
            thread.start()

    def _drain(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self._carry_out(item)
            except BaseException as error:
                self._error = self._error or error
            self._let_go(item)
        self._queue.put(None)  # for the other threads

    def _carry_out(self, item: _Item) -> None:
        file, chunk = item.file, item.chunk
        if chunk is None or not file.sink.at_once:
            # The chunks before this one left the queue before it: the other threads have them, or are done.
            with self._changed:
                self._changed.wait_for(lambda: file.written == item.number or self._error is not None)
            if self._error is not None:
                return
        if chunk is None:
            file.sink.finish()
            file.finished = True
        elif file.sink.at_once:
            file.sink.write_at(item.offset, chunk)
        else:
            file.sink.write(chunk)

    def _let_go(self, item: _Item) -> None:
        if item.chunk is not None:
            self._pool.give_back(item.chunk)
        with self._changed:
            if item.chunk is not None:
                item.file.written += 1
            self._changed.notify_all()
        self._release(item.file)

    def _release(self, file: _File) -> None:
        """One less needs the sink. The last one leaves no sink open that was not finished."""
        with self._changed:
            file.held -= 1
            abandoned = file.held == 0 and not file.finished
        if abandoned:
            file.sink.abort()

    def _put(self, item: _Item | None) -> None:
        if item is not None:
            with self._changed:
                item.file.held += 1
        try:
            while True:
                if self._error is not None:
                    raise self._error
                try:
                    return self._queue.put(item, timeout=0.25 if self._deadline else None)
                except queue.Full:
                    if self._deadline is not None and self._deadline.passed():
                        raise StoreUnavailableError("the store did not take the bytes before the deadline") from None
        except BaseException:
            if item is not None:
                self._release(item.file)
            raise

    def write(self, image: Image, open_sink: Callable[[str, int], Sink]) -> FileEntry:
        """Write one file. Its bytes are durable once :meth:`join` has returned."""
        file = _File(open_sink(image.path, image.size))
        try:
            digest = xxhash.xxh3_128()
            written = number = 0
            for number, chunk in enumerate(image.chunks(self._pool), 1):
                digest.update(chunk)
                self._put(_Item(file, number - 1, written, chunk))
                written += len(chunk)
            assert written == image.size, f"{image.path}: {written} bytes instead of {image.size}"
            self._put(_Item(file, number, written, None))
        finally:
            self._release(file)
        return FileEntry(image.path, image.size, digest.hexdigest())

    def join(self) -> None:
        """Wait until all is durable; raises what went wrong."""
        self._put(None)
        for thread in self._threads:
            thread.join(self._deadline.remaining_s() if self._deadline else None)
        if self._error is not None:
            raise self._error
        if any(thread.is_alive() for thread in self._threads):
            raise StoreUnavailableError("the store did not make the bytes durable before the deadline")

    def abort(self) -> None:
        """Give up what is not written yet; the threads end as soon as the store lets them."""
        with self._changed:
            self._error = self._error or StoreUnavailableError("the save was given up")
            self._changed.notify_all()
        try:
            while True:
                item = self._queue.get_nowait()
                if item is not None:
                    self._let_go(item)
        except queue.Empty:
            self._queue.put(None)


def _fetched(
    backend: Backend, folder: str, path: str, chunks: Iterable[tuple[int, memoryview]]
) -> Iterator[memoryview]:
    """Fill the chunks from their offsets, in order, one of them before the caller asks."""
    ready: queue.Queue[memoryview | BaseException | None] = queue.Queue(1)
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
    pool = [memoryview(fresh_memory(step)) for _ in range(3)]
    chunks = (
        (offset, pool[index % 3][: min(step, size - offset)]) for index, offset in enumerate(range(0, size, step))
    )
    return _fetched(backend, folder, path, chunks)


def _read_ahead(backend: Backend, folder: str, path: str, into: memoryview) -> Iterator[memoryview]:
    """Fill ``into`` by several threads; what is there already is handed out in order, for the caller to hash."""
    step = backend.read_size
    chunks = [into[offset : offset + step] for offset in range(0, len(into), step)]
    done: list[queue.SimpleQueue[int | BaseException]] = [queue.SimpleQueue() for _ in chunks]
    left = iter(range(len(chunks)))
    stop = threading.Event()

    def fetch() -> None:
        for number in left:
            if stop.is_set():
                return
            try:
                done[number].put(backend.read_into(folder, path, number * step, chunks[number]))
            except BaseException as error:
                done[number].put(error)
                return

    # One that asks for more at a time reads in parallel itself.
    count = min(READERS if step <= Backend.read_size else 1, len(chunks))
    threads = [threading.Thread(target=fetch, name="holdfast-read", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        for number, chunk in enumerate(chunks):
            size = done[number].get()
            if isinstance(size, BaseException):
                raise size
            yield chunk[:size]
            if size < len(chunk):
                return
    finally:
        # The caller may leave early, and may then use the memory for something else.
        stop.set()
        for thread in threads:
            thread.join()


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
        raise CheckpointCorruptError(f"{folder}/{shown(entry.path)} has {done} bytes instead of {entry.size}")
    if digest.hexdigest() != entry.checksum:
        raise CheckpointCorruptError(
            f"{folder}/{shown(entry.path)}: the checksum of its {done} bytes does not match the manifest"
        )


class StoredFile(io.RawIOBase):
    """A file of a checkpoint that is read where it lies, any part of it at any time."""

    def __init__(self, backend: Backend, folder: str, entry: FileEntry) -> None:
        self._backend = backend
        self._folder, self._path = (folder, entry.path) if entry.ref is None else tuple(entry.ref.split("/", 1))
        self._size = entry.size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, self._size - self._at)]
        count = self._backend.read_into(self._folder, self._path, self._at, wanted) if wanted else 0
        self._at += count
        return count
