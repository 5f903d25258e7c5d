"""Buffers that a forward pass changes, such as running statistics, as they were at a step boundary.

A save from inside a step needs them as they were before it. With DDP rank 0's are the ones that count,
so on the CPU they are kept in shared memory, like the black box: a survivor of rank 0 finds them there.
Two copies are used in turn, each marked with its step after it is whole.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Sequence

import torch

from holdfast.recorder.shared import lasting_map, read_left

_HEADER = 4096
_MARKS = struct.Struct("@QQ")


class KeptBuffers:
    """The last two boundaries' values of some tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor], path: str | None) -> None:
        self.tensors = list(tensors)
        self.path = path if not any(tensor.is_cuda for tensor in tensors) else None
        size = _HEADER + 2 * _set_size(tensors)
        self._memory = lasting_map(self.path, size)
        self._marks = memoryview(self._memory)[: _MARKS.size].cast("Q")
        self._copies = [
            [torch.empty_like(tensor) for tensor in tensors]
            if self.path is None
            else _views(self._memory, tensors, turn)
            for turn in (0, 1)
        ]

    def keep(self, step: int) -> None:
        """The tensors are now as at the end of ``step``."""
        turn = step % 2
        self._marks[turn] = 0
        torch._foreach_copy_(self._copies[turn], self.tensors)
        self._marks[turn] = step + 1

    def at(self, step: int) -> list[torch.Tensor] | None:
        """Their values at the end of ``step``; None if they are not kept."""
        return self._copies[step % 2] if self._marks[step % 2] == step + 1 else None

    def remove(self) -> None:
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)


def read_kept(path: str, like: Sequence[torch.Tensor], step: int) -> list[torch.Tensor] | None:
    """What another process kept of tensors of the same shapes; None if it kept nothing of that step."""
    try:
        data = bytearray(read_left(path))
    except OSError:
        return None
    if len(data) != _HEADER + 2 * _set_size(like) or _MARKS.unpack_from(data)[step % 2] != step + 1:
        return None
    return _views(data, like, step % 2)


def _set_size(tensors: Sequence[torch.Tensor]) -> int:
    return sum(_padded(tensor) for tensor in tensors)


def _padded(tensor: torch.Tensor) -> int:
    size: int = tensor.numel() * tensor.element_size()
    return -(-size // 64) * 64


def _views(memory: mmap.mmap | bytearray, tensors: Sequence[torch.Tensor], turn: int) -> list[torch.Tensor]:
    offset = _HEADER + turn * _set_size(tensors)
    views = []
    for tensor in tensors:
        size = tensor.numel()
        view = (
            torch.frombuffer(memory, dtype=tensor.dtype, count=size, offset=offset)
            if size
            else torch.empty_like(tensor)
        )
        views.append(view.view(tensor.shape))
        offset += _padded(tensor)
    return views
