"""Checkpoints in a folder of a file system: a local disk, a PVC, NFS.

The order of a save, so that a power cut at any moment leaves either the whole checkpoint or one that
says that it is not whole::

    mkdir checkpoint-N            fsync parent
    write the sentinel            fsync it, fsync checkpoint-N
    write the files               fsync each
    write holdfast.json beside    fsync, rename, fsync checkpoint-N
    remove the sentinel           fsync checkpoint-N            <- the commit

Removing goes the other way round: the sentinel is there, durably, before the first byte goes.

Files are written past the page cache where the file system allows it: the bytes are not needed again
in this process, and the cache's write-back would otherwise compete with the deadline.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.errors import CheckpointExistsError, LocationBusyError, StoreError
from holdfast.store.base import MANIFEST, PARTS, SENTINEL, Backend, Owner, Sink
from holdfast.store.manifest import step_of

ALIGNMENT = 4096
"""What direct I/O asks of addresses, lengths and offsets."""

HOME = ".holdfast"
"""Subfolder of a location for what is no checkpoint: the lock, the journal, rank records."""

_HELD: set[str] = set()
"""Locations that this process holds: record locks do not keep out their own process."""

_SENTINEL_TEXT = b"This checkpoint is not whole: it is being written, or its writer was killed. Do not load it.\n"


def fsync_dir(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durable(path: str, data: bytes) -> None:
    """Replace a small file so that after a crash it holds either the old bytes or the new ones."""
    temporary = f"{path}.{os.getpid()}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)
    os.rename(temporary, path)
    fsync_dir(os.path.dirname(path))


@contextlib.contextmanager
def _as_store_error(what: str) -> Iterator[None]:
    """Say which operation failed, and keep the errno for those who decide by it."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        hint = {
            errno.ENOSPC: "; the disk is full: free room, lower `keep`, or set HOLDFAST_FALLBACK_DIR",
            errno.EDQUOT: "; the quota is used up",
            errno.EROFS: "; the file system is read-only",
            errno.EACCES: "; check the folder's owner and mode",
        }.get(error.errno or 0, "")
        failure = StoreError(f"{what}: {error.strerror or error}{hint}")
        failure.errno = error.errno
        raise failure from error


class LocalSink(Sink):
    """Writes with direct I/O where possible, else through the page cache; fsyncs at the end."""

    def __init__(self, path: str, size: int) -> None:
        self._path = path
        self._written = 0
        self._direct = True
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with _as_store_error(f"cannot write {path}"):
            try:
                self._fd = os.open(path, flags | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
                self._direct = False
                self._fd = os.open(path, flags, 0o666)
            if size:
                # A disk that is too full is known now, before minutes of writing; and the blocks lie together.
                try:
                    os.posix_fallocate(self._fd, 0, size)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                        self.abort()
                        raise

    def _leave_direct(self) -> None:
        self._direct = False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def write(self, chunk: memoryview) -> None:
        with _as_store_error(f"cannot write {self._path}"):
            while chunk:
                aligned = len(chunk) - len(chunk) % ALIGNMENT
                if self._direct and (not aligned or self._written % ALIGNMENT):
                    self._leave_direct()
                part = chunk[:aligned] if self._direct else chunk
                try:
                    count = os.write(self._fd, part)
                except OSError as error:
                    if self._direct and error.errno == errno.EINVAL:  # the address is not aligned
                        self._leave_direct()
                        continue
                    raise
                self._written += count
                chunk = chunk[count:]

    def finish(self) -> None:
        with _as_store_error(f"cannot make {self._path} durable"):
            try:
                os.ftruncate(self._fd, self._written)
                os.fsync(self._fd)
            finally:
                os.close(self._fd)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)


class LocalBackend(Backend):
    """A folder that holds ``checkpoint-<step>/`` folders."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(os.path.expanduser(root.removeprefix("file://")))
        self.uri = self.root
        self._lock_fd: int | None = None

    def _folder(self, name: str) -> str:
        return os.path.join(self.root, name)

    def _file(self, name: str, path: str) -> str:
        return os.path.join(self.root, name, path)

    def names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self.root) if step_of(name) is not None]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read_manifest(self, name: str) -> bytes | None:
        if os.path.lexists(self._file(name, SENTINEL)):
            return None
        try:
            with open(self._file(name, MANIFEST), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sizes(self, name: str) -> dict[str, int]:
        folder = self._folder(name)
        found: dict[str, int] = {}
        for parent, folders, files in os.walk(folder):
            if PARTS in folders:
                folders.remove(PARTS)
            for file in files:
                path = os.path.join(parent, file)
                with contextlib.suppress(FileNotFoundError):
                    found[os.path.relpath(path, folder)] = os.stat(path).st_size
        return found

    def read_into(self, name: str, path: str, offset: int, buffer: memoryview) -> int:
        with _as_store_error(f"cannot read {self._file(name, path)}"):
            fd = os.open(self._file(name, path), os.O_RDONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < len(buffer):
                    count = os.preadv(fd, [buffer[done:]], offset + done)
                    if not count:
                        break
                    done += count
                return done
            finally:
                os.close(fd)

    def begin(self, name: str) -> None:
        folder = self._folder(name)
        if self.read_manifest(name) is not None:
            raise CheckpointExistsError(f"{folder} is a whole checkpoint already; it is not written again")
        with _as_store_error(f"cannot create {folder}"):
            os.makedirs(folder, exist_ok=True)
            self._mark_incomplete(name)
            fsync_dir(self.root)

    def _mark_incomplete(self, name: str) -> None:
        sentinel = self._file(name, SENTINEL)
        try:
            fd = os.open(sentinel, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return
        try:
            os.write(fd, _SENTINEL_TEXT)
            os.fsync(fd)
        finally:
            os.close(fd)
        fsync_dir(self._folder(name))

    def create(self, name: str, path: str, size: int) -> Sink:
        full = self._file(name, path)
        if "/" in path:
            with _as_store_error(f"cannot create {os.path.dirname(full)}"):
                os.makedirs(os.path.dirname(full), exist_ok=True)
        return LocalSink(full, size)

    def adopt(self, name: str, path: str, source: str, source_path: str) -> dict[str, Any] | None:
        # A hard link: the file lies in both folders and its bytes once; removing either folder is safe.
        target = self._file(name, path)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.link(self._file(source, source_path), target)
        except OSError:
            return None
        return {}

    def _part(self, name: str, part: str) -> str:
        folder = self._file(name, PARTS)
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, part)

    def put_part(self, name: str, part: str, data: bytes) -> None:
        with _as_store_error(f"cannot write into {self._folder(name)}"):
            target = self._part(name, part)
            temporary = f"{target}.{os.getpid()}.tmp"
            with open(temporary, "wb") as file:
                file.write(data)
            os.rename(temporary, target)

    def claim_part(self, name: str, part: str, data: bytes) -> bool:
        with _as_store_error(f"cannot write into {self._folder(name)}"):
            target = self._part(name, part)
            temporary = f"{target}.{os.getpid()}.tmp"
            with open(temporary, "wb") as file:
                file.write(data)
            try:
                os.link(temporary, target)
                return True
            except FileExistsError:
                return False
            finally:
                os.unlink(temporary)

    def read_parts(self, name: str) -> dict[str, bytes]:
        folder = self._file(name, PARTS)
        parts: dict[str, bytes] = {}
        with contextlib.suppress(FileNotFoundError):
            for part in os.listdir(folder):
                if not part.endswith(".tmp"):
                    with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, part), "rb") as file:
                        parts[part] = file.read()
        return parts

    def commit(self, name: str, manifest: bytes) -> None:
        folder = self._folder(name)
        with _as_store_error(f"cannot commit {folder}"):
            shutil.rmtree(self._file(name, PARTS), ignore_errors=True)
            for parent, _, _ in os.walk(folder):
                if parent != folder:
                    fsync_dir(parent)
            write_durable(self._file(name, MANIFEST), manifest)
            os.unlink(self._file(name, SENTINEL))
            fsync_dir(folder)

    def discard(self, name: str, keep: Callable[[str], bool] | None = None) -> None:
        # `keep` is for backends whose folders refer to each other; hard links need no such care.
        folder = self._folder(name)
        with _as_store_error(f"cannot remove {folder}"):
            try:
                self._mark_incomplete(name)
            except FileNotFoundError:
                return
            for entry in os.scandir(folder):
                if entry.name != SENTINEL:
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path)
                    else:
                        os.unlink(entry.path)
            shutil.rmtree(folder)
            fsync_dir(self.root)

    def set_aside(self, name: str) -> None:
        with _as_store_error(f"cannot mark {self._folder(name)}"):
            self._mark_incomplete(name)

    def acquire(self, owner: Owner, *, wait_s: float = 0.0, takeover: bool = False) -> None:
        if self._lock_fd is not None:
            return
        if self.root in _HELD:
            raise LocationBusyError(f"{self.root} is being written by another run of this very process")
        home = os.path.join(self.root, HOME)
        with _as_store_error(f"cannot write into {self.root}"):
            os.makedirs(home, exist_ok=True)
            fd = os.open(os.path.join(home, "writer.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        until = time.monotonic() + wait_s
        while True:
            try:
                # The kernel lets go of it when the process dies, however it dies. A record lock and no flock:
                # forked loader workers do not inherit it, so one that outlives its rank blocks no restart.
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    os.close(fd)
                    raise StoreError(f"cannot lock {self.root}: {error.strerror}") from error
            if time.monotonic() >= until:
                holder = os.pread(fd, 4096, 0).decode("utf-8", "replace")
                os.close(fd)
                raise LocationBusyError(
                    f"{self.root} is being written by another run ({_describe(holder)}). Two runs in one place would "
                    f"destroy each other's checkpoints: give this one another folder, or stop the other one first"
                )
            time.sleep(0.05)
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(owner.as_dict()).encode(), 0)
        self._lock_fd = fd
        _HELD.add(self.root)

    def release(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
            _HELD.discard(self.root)

    def free_bytes(self) -> int | None:
        path = self.root
        while not os.path.isdir(path):
            path = os.path.dirname(path)
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize


def _describe(holder: str) -> str:
    try:
        return str(Owner(**json.loads(holder)))
    except (ValueError, TypeError):
        return "unknown process"
