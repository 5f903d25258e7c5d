"""What a file of tensors looks like on disk, before it is there: safetensors, laid out for direct I/O.

The header is padded so that the tensors begin on a page: the image of a file can be written from
memory without another copy. Tensors that fill whole cache lines come first, so that all large ones
begin on one: copies to odd addresses are slower. Any safetensors reader loads the result.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = 4096
_LINE = 64
_PIECE = 16 << 20
METADATA = "holdfast"
"""Key in a file's safetensors metadata under which holdfast keeps the JSON part of a state."""

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}
_PLACE = itemgetter(0, 1)
_quoted = json.encoder.encode_basestring_ascii
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Pool(Protocol):
    def take(self) -> memoryview: ...


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as a flat view; a copy only where the tensor is not contiguous."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy flat bytes into host memory."""
    copy_range(target, 0, source, 0, source.numel())


def copy_range(target: torch.Tensor, at: int, source: torch.Tensor, begin: int, count: int) -> None:
    """Copy some of the bytes into host memory. From host memory with ``memmove``, on the calling thread alone.

    torch's own copy wakes its pool of threads for every tensor, and is slower where addresses are odd.
    """
    if source.is_cpu:
        ctypes.memmove(target.data_ptr() + at, source.data_ptr() + begin, count)
    else:
        target[at : at + count].copy_(source[begin : begin + count])


class TensorImage:
    """One safetensors file, still made of live tensors."""

    def __init__(
        self,
        path: str,
        tensors: Mapping[str, torch.Tensor],
        metadata: Mapping[str, str] | None = None,
        *,
        volatile: bool = True,
    ) -> None:
        self.path = path
        self.volatile = volatile
        """Whether the content is expected to differ from save to save."""
        # Whole cache lines first, then wide types first: every tensor then begins at a multiple of its element size.
        ordered = [(tensor.nbytes % _LINE != 0, -tensor.itemsize, name, tensor) for name, tensor in tensors.items()]
        ordered.sort(key=_PLACE)
        self.tensors = [tensor for _, _, _, tensor in ordered]
        entries = [f'"__metadata__":{json.dumps({"format": "pt", **(metadata or {})})}']
        offset = 0
        for _, _, name, tensor in ordered:
            try:
                dtype = _NAMES[tensor.dtype]
            except KeyError:
                raise TypeError(f"{name} has type {tensor.dtype}, which safetensors cannot hold") from None
            end = offset + tensor.nbytes
            shape = [*tensor.shape]
            entries.append(f'{_quoted(name)}:{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{offset},{end}]}}')
            offset = end
        text = f"{{{','.join(entries)}}}".encode()
        text += b" " * (-(8 + len(text)) % PAGE)
        self.header = len(text).to_bytes(8, "little") + text
        self.size = len(self.header) + offset

    def chunks(self, pool: Pool) -> Iterator[memoryview]:
        """Gather header and tensors into buffers of the pool, one after the other."""
        chunk, used = pool.take(), 0
        target = torch.frombuffer(chunk, dtype=torch.uint8)
        header = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        for source in (header, *self.tensors):
            data = flat_bytes(source)
            begin, size = 0, data.numel()
            while begin < size:
                count = min(len(chunk) - used, size - begin)
                copy_range(target, used, data, begin, count)
                used += count
                begin += count
                if used == len(chunk):
                    yield chunk
                    chunk, used = pool.take(), 0
                    target = torch.frombuffer(chunk, dtype=torch.uint8)
        yield chunk[:used]

    def pieces(self) -> Iterator[memoryview]:
        """The bytes in order, to be read and not kept: those in host memory are not copied."""
        yield memoryview(self.header)
        for tensor in self.tensors:
            data = flat_bytes(tensor)
            for begin in range(0, data.numel(), _PIECE):
                yield memoryview(data[begin : begin + _PIECE].cpu().numpy())


class BytesImage:
    """A small file whose bytes are at hand."""

    volatile = True

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.size = len(data)
        self._data = data

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(self._data)

    def chunks(self, pool: Pool) -> Iterator[memoryview]:
        view = memoryview(self._data)
        for begin in range(0, len(view), 1 << 20):
            yield view[begin : begin + (1 << 20)]


def parse(memory: memoryview) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors, as views of ``memory``, and metadata of a safetensors file that lies in memory."""
    length = int.from_bytes(memory[:8], "little")
    if not 0 < length <= len(memory) - 8:
        raise ValueError(f"a header of {length} bytes in a file of {len(memory)}")
    header = json.loads(bytes(memory[8 : 8 + length]))
    metadata = header.pop("__metadata__", {})
    base = 8 + length
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= len(memory) - base:
            raise ValueError(f"tensor {name!r} lies outside the file")
        # A storage for each: a view of one for all would take all of it along wherever it is pickled.
        data = torch.empty(0, dtype=torch.uint8)
        if end > begin:
            data = torch.frombuffer(memory, dtype=torch.uint8, offset=base + begin, count=end - begin)
        dtype = _DTYPES[entry["dtype"]]
        if (base + begin) % dtype.itemsize:
            data = data.clone()
        tensors[name] = data.view(dtype).reshape(entry["shape"])
    return tensors, metadata
