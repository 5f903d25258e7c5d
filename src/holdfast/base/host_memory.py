"""Host memory straight from the operating system, page-aligned."""

from __future__ import annotations

import contextlib
import mmap

HUGE = 2 << 20
"""Bytes of a large page."""


def fresh_memory(size: int) -> mmap.mmap:
    """Zeros for this process alone."""
    return mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def lasting_memory(size: int) -> mmap.mmap:
    """The same for buffers that are used again and again. Forked processes do not have them.

    In large pages where the system has them: they cost more to get, and are copied and written to disks faster. Hidden
    from forked processes, since pages that two processes share are copied at the next write.
    """
    memory = fresh_memory(size)
    hints = ["MADV_DONTFORK"] if size < 2 * HUGE else ["MADV_DONTFORK", "MADV_HUGEPAGE"]
    for hint in hints:
        if hasattr(mmap, hint):
            with contextlib.suppress(OSError):  # a kernel that was built without it
                memory.madvise(getattr(mmap, hint))
    return memory
