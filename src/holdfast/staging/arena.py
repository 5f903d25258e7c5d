"""Out of the way of training: one reused copy of the state in host memory.

Training waits for the copy alone. On CUDA the copy runs on a stream of its own into page-locked
memory: the device waits for it, the program does not. The memory is kept from save to save, so that
only the first save pays for fresh pages, and there is never more than one copy.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from holdfast.base.host_memory import lasting_memory
from holdfast.staging.images import BytesImage, Pool, TensorImage, copy_range, flat_bytes
from holdfast.staging.threads import for_each

CHUNK = 4 << 20
"""How much is written at a time."""
PIECE = 8 << 20
"""How much a thread copies at a time."""

_Piece = tuple[torch.Tensor, int, torch.Tensor, int, int]
"""What to copy: into which bytes and from where on, from which bytes and from where on, and how many."""


class StagedImage:
    """A file whose bytes lie in the arena."""

    def __init__(self, path: str, memory: memoryview, ready: torch.cuda.Event | None) -> None:
        self.path = path
        self.size = len(memory)
        self.volatile = True
        self._memory = memory
        self._ready = ready

    def chunks(self, pool: Pool) -> Iterator[memoryview]:
        if self._ready is not None:
            self._ready.synchronize()
        for begin in range(0, self.size, CHUNK):
            yield self._memory[begin : begin + CHUNK]


class Arena:
    """Host memory for one staged state. :meth:`stage` may be called again once the last one is written."""

    def __init__(self) -> None:
        self._blocks: dict[str, mmap.mmap] = {}
        self._pinned: set[str] = set()
        self._stream: torch.cuda.Stream | None = None
        self._preparing: threading.Thread | None = None

    def block(self, path: str, size: int) -> memoryview:
        """Memory for a file of ``size`` bytes; the same as last time where it is large enough."""
        block = self._blocks.get(path)
        if block is None or len(block) < size:
            self._release(path)
            block = self._blocks[path] = lasting_memory(size)
        return memoryview(block)[:size]

    def prepare(self, images: Sequence[TensorImage | BytesImage]) -> None:
        """Get the memory that these images will need, behind training's back: fresh pages cost more than the copy."""
        sizes = {image.path: image.size for image in images if isinstance(image, TensorImage)}
        on_device = {
            image.path for image in images if isinstance(image, TensorImage) and any(t.is_cuda for t in image.tensors)
        }

        self.reserve(sizes, on_device)

    def reserve(self, sizes: Mapping[str, int], on_device: Collection[str]) -> None:
        """The same where only the sizes are known: by path, and which of the files come from a device."""

        def touch() -> None:
            for path, size in sizes.items():
                torch.frombuffer(self.block(path, size), dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()
                if path in on_device:
                    self._pin(path)

        self._preparing = threading.Thread(target=touch, name="holdfast-memory", daemon=True)
        self._preparing.start()

    def stage(self, images: Sequence[TensorImage | BytesImage]) -> list[StagedImage | BytesImage]:
        """Copy. On return CPU tensors may change again; CUDA tensors too, for work queued after this call."""
        self.ready()
        staged: list[StagedImage | BytesImage] = []
        ready: torch.cuda.Event | None = None
        if any(tensor.is_cuda for image in images if isinstance(image, TensorImage) for tensor in image.tensors):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            ready = torch.cuda.Event()
        pieces: list[_Piece] = []
        for image in images:
            if isinstance(image, BytesImage):
                staged.append(image)
                continue
            memory = self.block(image.path, image.size)
            memory[: len(image.header)] = image.header
            if ready is not None:
                self._pin(image.path)
            with torch.cuda.stream(self._stream):  # does nothing where there is none
                pieces += self._begin_copy(image, torch.frombuffer(memory, dtype=torch.uint8))
            staged.append(StagedImage(image.path, memory, ready))
        if ready is not None and self._stream is not None:
            ready.record(self._stream)
            torch.cuda.current_stream().wait_stream(self._stream)
        for_each(lambda piece: copy_range(*piece), pieces)
        return staged

    def ready(self) -> None:
        """Wait for the memory that is being got."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    @contextlib.contextmanager
    def copying(self, path: str, size: int) -> Iterator[tuple[memoryview, torch.cuda.Event]]:
        """Page-locked memory for a file; copies that the block queues from the device run on a stream of their own.

        The event tells when they have arrived. Work that is queued on the device after the block waits for them.
        """
        self.ready()
        memory = self.block(path, size)
        self._pin(path)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            yield memory, event
        event.record(self._stream)
        torch.cuda.current_stream().wait_stream(self._stream)

    @staticmethod
    def _begin_copy(image: TensorImage, target: torch.Tensor) -> Iterator[_Piece]:
        """Queue the copies from the device; the pieces that are left to copy from host memory."""
        offset = len(image.header)
        for tensor in image.tensors:
            data = flat_bytes(tensor)
            size = data.numel()
            if data.is_cuda:
                target[offset : offset + size].copy_(data, non_blocking=True)
            else:
                for begin in range(0, size, PIECE):
                    yield target, offset + begin, data, begin, min(PIECE, size - begin)
            offset += size

    def _pin(self, path: str) -> None:
        if path not in self._pinned:
            block = torch.frombuffer(self._blocks[path], dtype=torch.uint8)
            torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)
            self._pinned.add(path)

    def _release(self, path: str) -> None:
        block = self._blocks.pop(path, None)
        if block is not None and path in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(torch.frombuffer(block, dtype=torch.uint8).data_ptr())
            self._pinned.discard(path)
