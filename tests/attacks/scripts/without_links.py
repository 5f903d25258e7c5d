"""Runs a command whose system calls for hard links fail: python without_links.py ERRNO COMMAND…

As on file systems that have none. The kernel itself refuses them, by a filter that all children inherit.
"""

import ctypes
import os
import platform
import struct
import sys

CALLS = {"x86_64": (0xC000003E, (86, 265)), "aarch64": (0xC00000B7, (37,))}
"""The kernel's number of an architecture, and those of link and linkat."""
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse_links(number: int) -> None:
    """From now on, in this process and its children."""
    architecture, calls = CALLS[platform.machine()]
    code = [(LOAD, 0, 0, 4), (JUMP_IF_EQUAL, 1, 0, architecture), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, 0)]
    for left, call in zip(range(len(calls) - 1, -1, -1), calls, strict=True):
        code.append((JUMP_IF_EQUAL, left + 1, 0, call))
    code += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, FAIL | number)]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = Program(len(code), ctypes.cast(packed, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((NO_NEW_PRIVILEGES, 1, 0, 0, 0), (SECCOMP, FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*arguments) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    refuse_links(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
