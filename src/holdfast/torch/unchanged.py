"""Which files of a save the last committed checkpoint holds already: they are neither copied nor written again.

That is known by their checksums: what torch counts as a tensor's version does not see changes by
``.data``. To read the bytes takes time, so it is done while the other files are on their way to the disk,
and only once for memory that the kernel can watch: as long as no page of it is written it holds what it
held when its checksum was taken.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from holdfast.engine.saving import Adopted, Part, Pending
from holdfast.staging.images import TensorImage
from holdfast.staging.pages import Pages, Range, whole_pages
from holdfast.staging.threads import Shared
from holdfast.store.manifest import FileEntry, Manifest
from holdfast.store.pipeline import Image, digest_of

_WATCHED_FROM = 128 << 10
"""Bytes of a tensor that is worth being watched; of smaller ones a copy is kept."""

_MOST_RANGES = 8192
"""A range may need up to two of the 65,530 mappings that a process has by default."""

_WRITTEN_BY_DEVICES = ("mpi", "ucc")
"""Backends of torch.distributed whose network cards may write to host memory behind the kernel's back."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the bytes of a file lie: whole pages, and the rest."""

    header: bytes
    pages: list[Range]
    rest: list[Range]

    @classmethod
    def of(cls, image: TensorImage) -> _Layout | None:
        """None: some of it cannot be watched."""
        if dist.is_available() and dist.is_initialized() and str(dist.get_backend()) in _WRITTEN_BY_DEVICES:
            return None
        pages: list[Range] = []
        rest: list[Range] = []
        has_devices = torch.cuda.is_initialized()
        for tensor in image.tensors:
            if not tensor.is_cpu or not tensor.is_contiguous() or (has_devices and tensor.is_pinned()):
                return None
            begin, size = tensor.data_ptr(), tensor.nbytes
            end = begin + size
            if size < _WATCHED_FROM:
                rest.append((begin, end))
            else:
                first, last = whole_pages(begin, size)
                pages.append((first, last))
                rest += ((begin, first), (last, end))
        return cls(image.header, pages, rest) if len(pages) <= _MOST_RANGES else None

    def read_rest(self) -> bytes:
        return b"".join(ctypes.string_at(begin, end - begin) for begin, end in self.rest)


class Memory:
    """What is known from one save to the next: files whose memory is watched since their checksum was taken."""

    def __init__(self) -> None:
        self._pages = Pages()
        self._known: dict[str, tuple[_Layout, bytes, str]] = {}
        self._changing: set[str] = set()
        """Files that were found changed: to watch them is not worth it."""

    def matches(self, image: TensorImage, checksum: str) -> bool:
        """Whether a file, of its bytes as they are now, has the checksum. For several threads, one for each file."""
        layout, path = _Layout.of(image), image.path
        known, rest, found = self._known.pop(path, (None, b"", ""))
        unwritten = layout is not None and layout == known and self._pages.unwritten(layout.pages)
        if layout is None or not (unwritten and layout.read_rest() == rest):
            # The order matters: what is written while the bytes are read is seen next time.
            watched = layout is not None and path not in self._changing and self._pages.watch(layout.pages)
            rest = layout.read_rest() if layout is not None and watched else b""
            found = digest_of(image.pieces())
            if not watched:
                layout = None
        if found != checksum:
            self._changing.add(path)
            return False
        self._changing.discard(path)
        if layout is not None:
            self._known[path] = (layout, rest, found)
        return True


class Comparison:
    """Compares files with those of ``committed``, on other threads, from now on.

    ``stage`` copies files out of the way of training; without it they stay as they are.
    """

    def __init__(
        self,
        images: Sequence[Any],
        committed: Manifest | None,
        memory: Memory,
        stage: Callable[[list[Any]], Sequence[Image]] | None = None,
    ) -> None:
        self._images = images
        self._committed = committed.name if committed is not None else ""
        self._memory = memory
        self._stage = stage or list
        self._waits_for_settle = stage is not None
        self._entries = {(file.path, file.size): file for file in (committed.files if committed is not None else ())}
        self._found: dict[str, Image | Adopted] = {}
        self._settled = threading.Event()
        self._error: BaseException | None = None
        self._candidates = [
            image for image in images if not image.volatile and (image.path, image.size) in self._entries
        ]
        self._work = Shared(self._compare, self._candidates)

    def parts(self) -> list[Part]:
        """What to write: those that are being compared are pending, all others are staged."""
        known = [image for image in self._images if image not in self._candidates]
        pending = [Pending(image.path, image.size, partial(self._outcome, image.path)) for image in self._candidates]
        return [*self._stage(known), *pending]

    def settle(self) -> None:
        """Take part until it is known of every file; what has changed is then copied. Until then nothing may change."""
        if self._settled.is_set():
            return
        try:
            self._work.finish()
            for image in self._stage([image for image in self._candidates if image.path not in self._found]):
                self._found[image.path] = image
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._settled.set()

    def _outcome(self, path: str) -> Image | Adopted:
        if not self._waits_for_settle:
            self.settle()
        self._settled.wait()
        if self._error is not None:
            raise self._error
        return self._found[path]

    def _compare(self, image: TensorImage) -> None:
        entry: FileEntry = self._entries[image.path, image.size]
        if self._memory.matches(image, entry.checksum):
            source, path = (self._committed, entry.path) if entry.ref is None else entry.ref.split("/", 1)
            self._found[image.path] = Adopted(image.path, image.size, dataclasses.replace(entry, path=path), source)
