"""Files in shared memory that outlive the process that writes them, on a machine that others use and that may be full.

- **Nobody else reads, writes or replaces them.** The folder is one that this user has made and nobody else may enter,
  which is checked on its descriptor; a file is made anew in it, without following links.
- **A full device does no harm.** Room is reserved before it is mapped, since writing to a mapped page that cannot be
  had ends the process by SIGBUS. Without room ordinary memory takes its place, and one warning says what that means.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import stat
import threading
from collections.abc import Iterator

from holdfast.base.private_folders import is_private

log = logging.getLogger("holdfast")

_told = threading.Event()


def lasting_map(path: str | None, size: int) -> mmap.mmap:
    """``size`` bytes that whoever finds this process dead can read at ``path``; ordinary memory if that is None, or
    cannot be had."""
    if path is not None:
        try:
            return new_map(path, size)
        except OSError as error:
            tell_of(error, path)
    return mmap.mmap(-1, size)


def new_map(path: str, size: int) -> mmap.mmap:
    """A new file in a folder of this user alone, mapped. Raises OSError if there is no room, or no such folder."""
    with _own_folder(os.path.dirname(path)) as folder:
        name = os.path.basename(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        file = _create(name, folder)
        try:
            os.posix_fallocate(file, 0, size)
            return mmap.mmap(file, size)
        except OSError:
            os.unlink(name, dir_fd=folder)
            raise
        finally:
            os.close(file)


def longer_map(path: str, size: int) -> mmap.mmap:
    """The file that :func:`new_map` has made there, with room added at its end. Raises OSError if there is none."""
    with _own_folder(os.path.dirname(path)) as folder:
        file = os.open(os.path.basename(path), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            os.posix_fallocate(file, 0, size)
            return mmap.mmap(file, size)
        finally:
            os.close(file)


def leave(path: str, data: bytes) -> None:
    """Replace a small file there. Raises OSError if that fails: then there is none, and not an older one."""
    with _own_folder(os.path.dirname(path)) as folder:
        name = os.path.basename(path)
        temporary = f"{name}.tmp"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            with os.fdopen(_create(temporary, folder), "wb") as file:
                file.write(data)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            for one in (temporary, name):
                with contextlib.suppress(OSError):
                    os.unlink(one, dir_fd=folder)
            raise


def read_left(path: str) -> bytes:
    """What a process of this user has left there. Raises OSError if there is nothing, or something of somebody else."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(file, "rb") as content:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a file of user {os.geteuid()}")
        return content.read()


def tell_of(error: OSError, path: str) -> None:
    """Warn, once, that the record of this process dies with it."""
    if not _told.is_set():
        _told.set()
        room = ". More room: --shm-size in Docker; an emptyDir with medium: Memory at /dev/shm in Kubernetes"
        log.warning(
            "no record of this process can be kept in %s (%s): if it is killed without a notice while others live, its "
            "random state and data position are lost with it%s",
            os.path.dirname(path),
            error.strerror or error,
            room if error.errno == errno.ENOSPC else "",
        )


@contextlib.contextmanager
def _own_folder(path: str) -> Iterator[int]:
    """The descriptor of a folder that belongs to this user alone; it is made if it is not there."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        if not is_private(found):
            raise PermissionError(
                f"{path} belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):o}; it must be of "
                f"user {os.geteuid()} alone"
            )
        yield folder
    finally:
        os.close(folder)


def _create(name: str, folder: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o600, dir_fd=folder)
