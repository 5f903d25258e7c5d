"""Whether memory has been written since a moment in the past, as the kernel knows it, page by page.

The kernel write-protects pages on request (``userfaultfd``, asynchronous mode), lifts the protection by
itself when somebody writes, however that happens, and tells where it is still in place (``PAGEMAP_SCAN``).
To ask takes microseconds where reading the memory would take long. Linux 6.7 and newer; where it is not
to be had, nothing can be watched and everything counts as written.

Not seen by the kernel, and hence not watched: memory that other processes, or devices, write to.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import struct
from bisect import bisect_right
from collections.abc import Sequence

PAGE = mmap.PAGESIZE

Range = tuple[int, int]
"""First address, and the one behind the last; whole pages."""

_CALL = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1
_FEATURES = 1 << 0 | 1 << 13 | 1 << 15  # write protection, also of pages not there yet, lifted by the kernel itself
_API = 0xC018AA3F, struct.Struct("=QQQ")
_REGISTER = 0xC020AA00, struct.Struct("=QQQQ")
_PROTECT = 0xC018AA06, struct.Struct("=QQQ")
_SCAN = 0xC0606610, struct.Struct("=12Q")
_MODE_PROTECT, _PROTECTED, _REFUSE_UNWATCHED = 2, 1, 2
_WRITTEN, _PRESENT, _SWAPPED = 2, 8, 16


def whole_pages(address: int, size: int) -> Range:
    """The pages that lie in a piece of memory as a whole; an empty range if none does."""
    begin = -(-address // PAGE) * PAGE
    return begin, max(begin, (address + size) // PAGE * PAGE)


class Pages:
    """Watches pages of this process."""

    def __init__(self) -> None:
        self._watch = self._map = -1
        with contextlib.suppress(OSError, KeyError):
            call = _CALL[platform.machine()]
            self._watch = ctypes.CDLL(None).syscall(call, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
            self._request(_API, 0xAA, _FEATURES, 0)
            self._map = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._pid = os.getpid()

    def __del__(self) -> None:
        for fd in (self._watch, self._map):
            if fd >= 0:
                os.close(fd)

    def watch(self, ranges: Sequence[Range]) -> bool:
        """From now on :meth:`unwritten` tells of these pages. False: they cannot be watched."""
        if not self._works() or not _are_private(ranges):
            return False
        try:
            for begin, end in ranges:
                self._request(_REGISTER, begin, end - begin, _MODE_PROTECT, 0)
                self._request(_PROTECT, begin, end - begin, _PROTECTED)
        except OSError:
            return False
        return True

    def unwritten(self, ranges: Sequence[Range]) -> bool:
        """Whether none of these pages has been written, or replaced, since :meth:`watch`."""
        return self._works() and all(self._unwritten(begin, end) for begin, end in ranges)

    def _works(self) -> bool:
        return self._map >= 0 and self._pid == os.getpid()

    def _unwritten(self, begin: int, end: int) -> bool:
        """Ask for the pages that are there and still protected: this must be all of them."""
        region = (ctypes.c_uint64 * 3)()
        there = _PRESENT | _SWAPPED
        scan = (0, ctypes.addressof(region), 1, 0, _WRITTEN, _WRITTEN, there, _WRITTEN)
        try:
            found = self._request(_SCAN, _SCAN[1].size, _REFUSE_UNWATCHED, begin, end, *scan, on=self._map)
        except OSError:
            return False
        return found == 1 and (region[0], region[1]) == (begin, end)

    def _request(self, kind: tuple[int, struct.Struct], *values: int, on: int | None = None) -> int:
        number, layout = kind
        return int(fcntl.ioctl(self._watch if on is None else on, number, bytearray(layout.pack(*values))))


def _are_private(ranges: Sequence[Range]) -> bool:
    """Whether all of it is memory of this process alone, with no file behind it."""
    found: list[Range] = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            place, flags, _, _, inode = line.split(maxsplit=5)[:5]
            if flags.endswith("p") and inode == "0":
                begin, end = (int(part, 16) for part in place.split("-"))
                if found and found[-1][1] == begin:
                    begin = found.pop()[0]
                found.append((begin, end))
    for begin, end in ranges:
        place_before = bisect_right(found, (begin, 1 << 64)) - 1
        if place_before < 0 or found[place_before][1] < end:
            return False
    return True
