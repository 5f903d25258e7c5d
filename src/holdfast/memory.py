"""Host memory straight from the operating system: page-aligned, and in large pages where it has them.

A fresh page costs more than to copy into it, and large pages cost a fraction of that. They also let the
kernel hand long ranges to a disk.
"""

from __future__ import annotations

import contextlib
import mmap

HUGE = 2 << 20


def fresh_memory(size: int, *, inherited: bool = True) -> mmap.mmap:
    """``size`` bytes of zeros. ``inherited``: forked processes see them too, which makes later writes here slower."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = [getattr(mmap, "MADV_HUGEPAGE", None)] if size >= 2 * HUGE else []
    advice += [] if inherited else [getattr(mmap, "MADV_DONTFORK", None)]
    for hint in advice:
        if hint is not None:
            with contextlib.suppress(OSError):
                memory.madvise(hint)
    return memory
