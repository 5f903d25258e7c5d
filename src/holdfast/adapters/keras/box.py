"""How far this rank has come, in shared memory: for ``holdfast top``, and for whoever finds the process dead."""

from __future__ import annotations

import contextlib
import os
import struct

from holdfast.recorder.boxes import BOUNDARY, HEADER, MAGIC, SLOT, SLOTS
from holdfast.recorder.shared import lasting_map


class StepBox:
    """The last completed step. :meth:`note` is on the hot path: a few stores into memory."""

    def __init__(self, path: str | None, rank: int) -> None:
        self.path = path
        size = HEADER + SLOTS * SLOT
        memory = lasting_map(path, size)
        memory[: len(MAGIC)] = MAGIC
        memory[64:80] = struct.pack("<QQ", rank, os.getpid())
        self._numbers = memoryview(memory).cast("Q")
        self._sequence = 0

    def note(self, step: int) -> None:
        """``step`` is complete."""
        sequence = self._sequence = self._sequence + 1
        numbers, at = self._numbers, (HEADER + (sequence & 1) * SLOT) // 8
        numbers[at] = 0
        numbers[at + 1] = BOUNDARY
        numbers[at + 2] = step
        numbers[at] = sequence  # last: until then it is no record

    def remove(self) -> None:
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            with contextlib.suppress(OSError):  # other ranks' boxes are still there
                os.rmdir(os.path.dirname(self.path))
