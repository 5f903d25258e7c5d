"""A framework's own checkpoint without its writes: what it would put into files becomes images of files.

Frameworks save by handing tensors and a path to ``torch.save`` and ``safetensors``. Inside :func:`capturing`, and on
the thread that entered it, such calls for paths below one folder write nothing: the objects are kept. Whatever is
written to that folder in another way lies there and is picked up afterwards, so that nothing depends on every call
being caught. :func:`images` then turns all of it into files for a save, either copied out of training's way or made
of the live tensors themselves.

The files are those that the framework would have written: ``torch.save`` itself lays out its archive, but hands over
addresses instead of bytes where tensors are large.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from holdfast.staging.arena import Arena, StagedImage
from holdfast.staging.images import BytesImage, Pool, TensorImage
from holdfast.staging.threads import for_each
from holdfast.torch.patches import CAPTURE, TABLES

_LARGE = 16 << 10
"""Tensors from this size on are referred to; smaller ones are copied along with what lies between them."""
_PIECE = 8 << 20
_NO_CRC_FROM = 1 << 20
"""Archives with this many bytes of tensors get no CRC of their own: the manifest has a better checksum."""

_lock = threading.RLock()


@dataclass(slots=True)
class Captured:
    """What a framework wanted to write below ``folder``."""

    folder: str
    substitute: Callable[[str, Any], Any]
    """Called with the path, relative to the folder, and the object of each ``torch.save``; what it returns is saved."""
    pickled: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[Mapping[str, torch.Tensor], Mapping[str, str]]] = field(default_factory=dict)

    def relative(self, path: Any) -> str | None:
        """The path below the folder; None if it lies elsewhere or is no path."""
        if not isinstance(path, str | os.PathLike):
            return None
        relative = os.path.relpath(os.path.abspath(os.fspath(path)), self.folder)
        return None if relative.startswith("..") else relative

    def save(self, original: Callable[..., None]) -> Callable[..., None]:
        """Stands in for ``torch.save``."""

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            path = self.relative(f) if not args and not kwargs else None
            if path is None:
                original(obj, f, *args, **kwargs)
            else:
                self.tensors.pop(path, None)
                self.pickled[path] = self.substitute(path, obj)

        return save

    def save_file(self, original: Callable[..., None]) -> Callable[..., None]:
        """Stands in for ``safetensors.torch.save_file``."""

        def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
            path = self.relative(filename)
            if path is None or not _fit(tensors):
                original(tensors, filename, metadata)
            else:
                self.pickled.pop(path, None)
                self.tensors[path] = (dict(tensors), dict(metadata or {}))

        return save_file


@contextlib.contextmanager
def capturing(folder: str, substitute: Callable[[str, Any], Any] = lambda path, value: value) -> Iterator[Captured]:
    """While the block runs, keep what this thread saves below ``folder``. One block at a time runs in a process."""
    with _lock, contextlib.ExitStack() as stack:
        captured = Captured(os.path.abspath(folder), substitute)
        for table in TABLES:
            stack.enter_context(table.applied(CAPTURE, captured, thread=True))
        yield captured


def _fit(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether their bytes are those of their memory. All else is left to safetensors itself, to write or to refuse."""
    for value in tensors.values():
        if not _is_plain(value) or not value.is_contiguous() or value.device.type == "meta":
            return False
    try:
        TensorImage("", tensors)
    except TypeError:  # a type that is too new
        return False
    return True


# ---------------------------------------------------------------------- images of what was captured


class Archive:
    """A file of ``torch.save``, still made of the tensors that it refers to."""

    volatile = True

    def __init__(self, path: str, segments: Sequence[bytes | memoryview], keep: Any) -> None:
        self.path = path
        self.size = sum(len(segment) for segment in segments)
        self.ready: torch.cuda.Event | None = None
        """On a device, when the bytes have arrived."""
        self._segments = segments
        self._keep = keep

    def pieces(self) -> Iterator[memoryview]:
        """The bytes in order, to be read and not kept."""
        if self.ready is not None:
            self.ready.synchronize()
        for segment in self._segments:
            view = memoryview(segment)
            for begin in range(0, len(view), _PIECE):
                yield view[begin : begin + _PIECE]

    def chunks(self, pool: Pool) -> Iterator[memoryview]:
        """The bytes, gathered into buffers of the pool."""
        chunk, used = pool.take(), 0
        for piece in self.pieces():
            while piece:
                count = min(len(chunk) - used, len(piece))
                _copy(chunk[used : used + count], piece[:count])
                used += count
                piece = piece[count:]
                if used == len(chunk):
                    yield chunk
                    chunk, used = pool.take(), 0
        yield chunk[:used]

    def staged(self, arena: Arena) -> StagedImage:
        """A copy in the arena."""
        memory = arena.block(self.path, self.size)
        work: list[tuple[memoryview, memoryview]] = []
        offset = 0
        for piece in self.pieces():
            work.append((memory[offset : offset + len(piece)], piece))
            offset += len(piece)
        for_each(lambda item: _copy(*item), work)
        return StagedImage(self.path, memory, None)


def _copy(target: memoryview, source: memoryview) -> None:
    if len(source) < _LARGE or source.readonly:
        target[:] = source
    else:  # outside of the interpreter lock
        ctypes.memmove(_address(target), _address(source), len(source))


def _address(writable: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(writable))


class _Recorder:
    """A file for ``torch.save`` that remembers where large tensors lie instead of their bytes."""

    def __init__(self, known: Mapping[int, int], least: int) -> None:
        self.segments: list[bytes | memoryview] = []
        self._known = sorted(known.items())
        self._least = least
        self._small = bytearray()

    def write(self, data: memoryview) -> int:
        size = len(data)
        if size >= self._least:
            address = numpy.frombuffer(data, dtype=numpy.uint8).ctypes.data
            if self._lives_on(address, size):
                self._flush_small()
                self.segments.append(memoryview((ctypes.c_char * size).from_address(address)).cast("B"))
                return size
        self._small += data
        return size

    def _lives_on(self, address: int, size: int) -> bool:
        """Whether this is memory of a tensor that the archive holds, and no copy made for the call."""
        place = bisect.bisect_right(self._known, (address, sys.maxsize)) - 1
        return place >= 0 and address + size <= self._known[place][0] + self._known[place][1]

    def _flush_small(self) -> None:
        if self._small:
            self.segments.append(bytes(self._small))
            self._small = bytearray()

    def flush(self) -> None:
        self._flush_small()


def archive(path: str, value: Any) -> Archive:
    """What ``torch.save`` would write. Large tensors in host memory are referred to, all others copied now."""
    return _archive(path, value, _storages(value, on_host=True), _LARGE)


def _archive(path: str, value: Any, known: Mapping[int, int], least: int) -> Archive:
    """``known``: address and size of what may be referred to, from ``least`` bytes on."""
    recorder = _Recorder(known, least)
    crc = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(crc and sum(known.values()) < _NO_CRC_FROM)
        torch.save(value, recorder)
    finally:
        torch.serialization.set_crc32_options(crc)
    recorder.flush()
    return Archive(path, recorder.segments, value)


def _storages(value: Any, *, on_host: bool) -> dict[int, int]:
    """Address and size of the memory of all tensors in ``value`` that lie on the host, or on a device."""
    if isinstance(value, Mapping):
        return _storages(list(value.values()), on_host=on_host)
    if isinstance(value, list | tuple):
        found: dict[int, int] = {}
        for item in value:
            found |= _storages(item, on_host=on_host)
        return found
    if not _is_plain(value) or (value.device.type == "cpu") != on_host:
        return {}
    storage = value.untyped_storage()
    return {storage.data_ptr(): storage.nbytes()}


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided


class _Twins:
    """Host copies of what lies on a device, one for each storage."""

    def __init__(self, memory: memoryview | None = None) -> None:
        self.known: dict[int, int] = {}
        self._memory = memory
        self._copies: dict[int, torch.Tensor] = {}
        self._used = 0

    def of(self, value: Any) -> Any:
        """The same value with its tensors on the host. The copies are queued, and may not have arrived yet."""
        if isinstance(value, dict):
            twin = type(value)() if type(value) is not dict else {}
            twin.update({key: self.of(item) for key, item in value.items()})
            return twin
        if type(value) in (list, tuple):
            return type(value)(self.of(item) for item in value)
        if not _is_plain(value) or value.device.type == "cpu":
            return value
        storage = value.untyped_storage()
        copy = self._copies.get(storage.data_ptr())
        if copy is None:
            source = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            copy = self._copies[storage.data_ptr()] = self._room(source.numel())
            copy.copy_(source, non_blocking=True)
            self.known[copy.data_ptr()] = copy.numel()
        twin = torch.empty(0, dtype=value.dtype)
        return twin.set_(copy.untyped_storage(), value.storage_offset(), value.size(), value.stride())

    def _room(self, size: int) -> torch.Tensor:
        if self._memory is None or not size:
            return torch.empty(size, dtype=torch.uint8)
        begin = self._used
        self._used += _padded(size)
        return torch.frombuffer(self._memory[begin : begin + size], dtype=torch.uint8)


def _padded(size: int) -> int:
    return -(-size // 64) * 64


class FileImage:
    """A file that lies in the folder already, too large to be kept in memory."""

    volatile = True

    def __init__(self, path: str, source: str, keep: Any) -> None:
        self.path = path
        self.size = os.path.getsize(source)
        self._source = source
        self._keep = keep

    def chunks(self, pool: Pool) -> Iterator[memoryview]:
        with open(self._source, "rb", buffering=0) as file:
            left = self.size
            while left:
                chunk = pool.take()
                count = file.readinto(chunk[: min(len(chunk), left)])
                if not count:
                    raise OSError(f"{self._source} has become shorter while it was saved")
                left -= count
                yield chunk[:count]


def images(captured: Captured, keep: Any, arena: Arena | None) -> list[Any]:
    """The files: copied into the arena, or, without one, made of the live tensors.

    ``keep``: what must live until they are written, such as the folder itself.
    """
    found: list[Any] = [TensorImage(path, tensors, meta) for path, (tensors, meta) in captured.tensors.items()]
    if arena is not None:
        found = list(arena.stage(found))
    for path, value in captured.pickled.items():
        found.append(_archived(path, value, arena))
    caught = {image.path for image in found}
    return found + [image for image in lying(captured.folder, keep) if image.path not in caught]


def _archived(path: str, value: Any, arena: Arena | None) -> Any:
    on_device = sum(_padded(size) for size in _storages(value, on_host=False).values())
    if not on_device:
        image = archive(path, value)
        return image if arena is None or image.size < _LARGE else image.staged(arena)
    if arena is None or not torch.cuda.is_available():
        return archive(path, _Twins().of(value))
    with arena.copying(path, on_device) as (memory, ready):
        twins = _Twins(memory)
        # What is still on its way is referred to, however small; all else is copied here and now.
        twin = twins.of(value)
        image = _archive(path, twin, twins.known, 1)
    image.ready = ready
    return image


_IN_MEMORY = 64 << 20


def lying(folder: str, keep: Any) -> Iterator[BytesImage | FileImage]:
    """The files that lie below ``folder``."""
    for parent, _, files in os.walk(folder):
        for name in sorted(files):
            full = os.path.join(parent, name)
            path = os.path.relpath(full, folder)
            if os.path.getsize(full) > _IN_MEMORY:
                yield FileImage(path, full, keep)
            else:
                with open(full, "rb") as file:
                    yield BytesImage(path, file.read())
