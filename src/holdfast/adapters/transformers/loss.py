"""A rank's sum of losses since the last log, as it was at the end of the last steps.

The Trainer adds to it within a step, and its mean over the ranks is what is logged. Like the black box it lies in
shared memory, so that the log of a run is right even where a rank was killed. On a device the sum is copied there,
since reading it would wait for the device, and dies with its process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from typing import Any

import torch

from holdfast.recorder.shared import lasting_map, read_left

_RECORD = struct.Struct("@Qdd")
_SLOT = 32


class Losses:
    def __init__(self, path: str | None) -> None:
        self._path = path
        self._memory = lasting_map(path, mmap.PAGESIZE)
        self._on_device: list[torch.Tensor] = []

    def note(self, step: int, loss: torch.Tensor, flos: float) -> Any:
        """The sum at the end of ``step``: a number, or on a device a tensor that stays as it is for a step more."""
        if loss.device.type != "cpu":
            if not self._on_device:
                self._on_device = [torch.empty_like(loss), torch.empty_like(loss)]
            copy = self._on_device[step % 2]
            copy.copy_(loss)
            return copy
        value = loss.item()
        _RECORD.pack_into(self._memory, step % 2 * _SLOT, step, value, flos)
        return value

    def remove(self) -> None:
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


def losses_of(path: str, step: int) -> tuple[float | None, float]:
    """Loss and floating-point operations that another process noted for ``step``; None and 0: it noted none."""
    try:
        data = read_left(path)
        noted, loss, flos = _RECORD.unpack_from(data, step % 2 * _SLOT)
    except (OSError, struct.error):
        return None, 0.0
    return (loss, flos) if noted == step else (None, 0.0)
