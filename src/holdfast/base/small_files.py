"""Files that another user may have put where one of ours is expected: opened and read without trusting their name.

Guarantees, of every function here:

- It does not wait. A pipe or a device in place of the file is refused, not read.
- It follows no link in the last part of a path (:func:`open_below`: in no part below the folder), and what it checks
  is the descriptor that it reads from, so that nothing can be put in its place in between.
- It reads no more than a limit that the caller names. A larger file is refused, not cut.
- With ``own``, the file belongs to this user or to root, and nobody else can write it.

A refusal is :class:`RefusedFileError`, an OSError: whoever can do without the file treats it as one that is missing.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any

SMALL = 1 << 20
"""Bytes of the largest record that this package writes for itself, such as ``attempt.json``."""

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class RefusedFileError(OSError):
    """There is something of that name, and it is no file that may be read. The message says why."""

    def __str__(self) -> str:  # OSError would print the arguments as a tuple
        return str(self.args[0])


def open_regular(path: str | os.PathLike[str], *, own: bool = False, dir_fd: int | None = None) -> int:
    """A descriptor to read from a regular file, which is no link. The caller closes it."""
    try:
        fd = os.open(path, _FLAGS, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise RefusedFileError(f"{os.fspath(path)} is a link, which is not followed") from None
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise RefusedFileError(f"{os.fspath(path)} is not a regular file") from None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise RefusedFileError(f"{os.fspath(path)} is not a regular file")
        if own and found.st_uid not in (os.geteuid(), 0):
            raise RefusedFileError(f"{os.fspath(path)} belongs to another user ({found.st_uid})")
        if own and found.st_mode & 0o022:
            raise RefusedFileError(f"{os.fspath(path)} can be written by other users")
        return fd
    except BaseException:
        os.close(fd)
        raise


def is_own(path: str | os.PathLike[str]) -> bool:
    """Whether something is there that belongs to this user: a file, a folder, or the link itself."""
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


def open_below(folder: str, path: str) -> int:
    """As :func:`open_regular`, of ``folder/path``: no folder on the way down from ``folder`` is a link either."""
    *parents, name = path.split("/")
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            inner = _open_folder(parent, at, os.path.join(folder, path))
            os.close(at)
            at = inner
        try:
            return open_regular(name, dir_fd=at)
        except RefusedFileError as error:
            raise RefusedFileError(os.path.join(folder, *parents, str(error))) from None
    finally:
        os.close(at)


def _open_folder(name: str, dir_fd: int, path: str) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as error:
        # What the kernel says of a link that was to be a folder differs between versions.
        if error.errno == errno.ELOOP or stat.S_ISLNK(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            raise RefusedFileError(f"{path} lies behind a link, which is not followed") from None
        raise


def read_open(fd: int, path: str | os.PathLike[str], limit: int = SMALL) -> bytes:
    """All of an open regular file; closes it."""
    with os.fdopen(fd, "rb", buffering=0) as file:
        if os.fstat(fd).st_size > limit:
            raise RefusedFileError(f"{os.fspath(path)} is larger than the {limit} bytes that are read of it")
        data = bytearray()
        while len(data) <= limit and (more := file.read(limit + 1 - len(data))):
            data += more
    if len(data) > limit:  # it has grown since
        raise RefusedFileError(f"{os.fspath(path)} is larger than the {limit} bytes that are read of it")
    return bytes(data)


def read_small(path: str | os.PathLike[str], limit: int = SMALL, *, own: bool = False) -> bytes:
    """All of a small file. Raises FileNotFoundError and the like as ``open`` does, else :class:`RefusedFileError`."""
    return read_open(open_regular(path, own=own), path, limit)


def json_object(data: bytes) -> dict[str, Any]:
    """A JSON object; empty if the bytes are none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_json(path: str | os.PathLike[str], limit: int = SMALL, *, own: bool = False) -> dict[str, Any]:
    """The JSON object in a small file. One that is missing, refused or garbled is as good as empty."""
    try:
        return json_object(read_small(path, limit, own=own))
    except OSError:
        return {}
