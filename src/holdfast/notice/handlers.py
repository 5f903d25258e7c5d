"""A signal's handler as the kernel has it, whichever library put it there and whatever Python believes.

TensorFlow, for one, puts a handler of its own in place from C++: Python's table still shows the one before, which is
never called again. The kernel's entry can be read and written from any thread, which Python's own functions cannot.
"""

from __future__ import annotations

import ctypes

_SIZE = 512
"""More than a ``struct sigaction`` has on any platform."""


def handler_of(signum: int) -> bytes | None:
    """The kernel's entry, to be compared and put back; None where it cannot be had."""
    entry = ctypes.create_string_buffer(_SIZE)
    return entry.raw if _sigaction(signum, None, entry) else None


def put_back(signum: int, entry: bytes) -> bool:
    """Make it the kernel's entry again; False where that is not possible."""
    return _sigaction(signum, ctypes.create_string_buffer(entry, _SIZE), None)


def _sigaction(signum: int, new: ctypes.Array[ctypes.c_char] | None, old: ctypes.Array[ctypes.c_char] | None) -> bool:
    try:
        function = ctypes.CDLL(None).sigaction
    except (OSError, AttributeError):
        return False
    return bool(function(ctypes.c_int(signum), new, old) == 0)
