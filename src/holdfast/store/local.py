"""Checkpoints in a folder of a file system: a local disk, a PVC, NFS.

The order of a save, so that a power cut at any moment leaves either the whole checkpoint or one that
says that it is not whole::

    mkdir under another name
    write the sentinel            fsync the folder
    rename it to checkpoint-N     fsync its parent
    write the files               fsync each
    write holdfast.json beside    fsync, rename, fsync checkpoint-N
    remove the sentinel           fsync checkpoint-N            <- the commit

Removing goes the other way round: the sentinel is there, durably, before the first byte goes.

A writer that was stopped or cut off while a restart of its run took the location over does no harm when it wakes up:

- The run that holds the location has a folder there, its *grant*, whose name is a number of its own. To take the
  location over is to remove the grants of all others. The commit is one rename of the sentinel into the grant, and a
  checkpoint is unmade by one rename of a sentinel out of it: both fail in the kernel, or at the file server, once the
  grant is gone, however long ago the writer last looked.
- What a writer puts into a folder that it has begun goes into that very folder, by its descriptor. If the restart has
  removed it and made another of that name, the writer gets an error and the other folder nothing.

Files are written past the page cache where the file system allows it: the bytes are not needed again
in this process, and the cache's write-back would otherwise compete with the deadline.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.base.claims import CLAIM, name_first
from holdfast.base.process import Owner
from holdfast.base.small_files import RefusedFileError, open_below, read_small
from holdfast.errors import CheckpointCorruptError, CheckpointExistsError, LocationBusyError, StoreError
from holdfast.locations import expanded
from holdfast.store.base import MANIFEST, PARTS, SENTINEL, Backend, Sink
from holdfast.store.manifest import step_of

ALIGNMENT = 4096
"""What direct I/O asks of addresses, lengths and offsets."""

HOME = ".holdfast"
"""Subfolder of a location for what is no checkpoint: the lock, the journal, rank records."""
LOCK = "writer.lock"

_HELD: dict[str, int] = {}
"""Locations that this process holds, with its number: record locks do not keep out their own process, and a
forked child inherits this table but not the locks."""

_LARGEST = 64 << 20
"""Bytes of a manifest, or of what a rank tells the one that commits."""

_FULL = (errno.ENOSPC, errno.EDQUOT)

_FRESH = ".begin-"
"""Begins the name of a folder that is about to become a checkpoint's."""

_GRANT = "writer-"
"""Begins the name of a grant, in the home folder."""

_GRANT_NAME = re.compile(r"[0-9a-f]{16}")

_GONE = (errno.ENOENT, errno.ESTALE)
"""A folder was removed by somebody else while it was held open; a file server says the latter."""

_TRIES = 100

_MOST_BEGUN = 8
"""Folders that are held open at a time: those of saves under way, and of the last ones that other ranks committed."""

_SENTINEL_TEXT = b"This checkpoint is not whole: it is being written, or its writer was killed. Do not load it.\n"


def fsync_dir(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some network file systems sync no folders
            raise
    finally:
        os.close(fd)


def make_folders(path: str) -> None:
    """Like ``os.makedirs(path, exist_ok=True)``, and a power cut does not take away what was made."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folders(parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    fsync_dir(parent)


def _temporary(path: str) -> str:
    # The process number does not tell writers apart: in containers on two nodes it is often the same.
    return f"{path}.{secrets.token_hex(6)}.tmp"


def write_durable(path: str, data: bytes) -> None:
    """Replace a small file so that after a crash it holds either the old bytes or the new ones."""
    temporary = _temporary(path)
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

    at_once = True

    def __init__(self, path: str, size: int, shown: str | None = None) -> None:
        self._path = shown or path
        self._fd = -1
        self._end = 0
        self._lock = threading.Lock()
        self._direct = True
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with _as_store_error(f"cannot write {self._path}"):
            # What a writer that died left here may be a hard link to a file of a whole checkpoint: the name goes,
            # and the bytes stay where they are needed.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            try:
                self._fd = os.open(path, flags | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
                self._direct = False
                self._fd = os.open(path, flags, 0o666)
            try:
                self._reserve(size)
            except OSError:
                self.abort()
                raise

    def _reserve(self, size: int) -> None:
        """A disk that is too full is known now, before minutes of writing; and the blocks lie together."""
        if self._direct and size:
            try:
                os.posix_fallocate(self._fd, 0, size)
                return
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        # Without direct I/O the C library would imitate the call by touching every block, for minutes on NFS.
        room = os.fstatvfs(self._fd)
        if room.f_blocks and size > room.f_bavail * room.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _leave_direct(self) -> bool:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._direct = False
        return False

    def write(self, chunk: memoryview) -> None:
        self.write_at(self._end, chunk)

    def write_at(self, offset: int, chunk: memoryview) -> None:
        with _as_store_error(f"cannot write {self._path}"):
            while chunk:
                aligned = len(chunk) - len(chunk) % ALIGNMENT
                direct = self._direct  # another thread may just be leaving it
                if direct and (not aligned or offset % ALIGNMENT):
                    direct = self._leave_direct()
                try:
                    count = os.pwrite(self._fd, chunk[:aligned] if direct else chunk, offset)
                except OSError as error:
                    if direct and error.errno == errno.EINVAL:  # the address is not aligned
                        self._leave_direct()
                        continue
                    raise
                offset += count
                chunk = chunk[count:]
        with self._lock:
            self._end = max(self._end, offset)

    def finish(self) -> None:
        with _as_store_error(f"cannot make {self._path} durable"):
            try:
                os.ftruncate(self._fd, self._end)
                os.fsync(self._fd)
            finally:
                self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._close()


def _open_lock(path: str, flags: int) -> int:
    """A descriptor of the lock's file. Its holder writes into it: it must not be another file, by way of a link."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return fd


def is_in_use(root: str) -> bool:
    """True if a process, on this machine or another, writes into the location."""
    root = os.path.realpath(root)
    if _HELD.get(root) == os.getpid():
        return True
    try:
        fd = _open_lock(os.path.join(root, HOME, LOCK), os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def is_grant(name: str) -> bool:
    """Whether this is the name of a grant in a home folder."""
    return name.startswith(_GRANT) and _GRANT_NAME.fullmatch(name.removeprefix(_GRANT)) is not None


def _revoke(grant: str) -> None:
    """Remove a grant. Its run may be putting a sentinel there at this moment."""
    for _ in range(_TRIES):
        try:
            shutil.rmtree(grant)
            return
        except FileNotFoundError:
            if not os.path.lexists(grant):
                return
        except NotADirectoryError:
            os.unlink(grant)  # somebody else's file or link by such a name
            return
        except OSError as error:
            if os.path.islink(grant):
                os.unlink(grant)
                return
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    raise StoreError(f"cannot take {grant} from the run that had the location: it fills up again and again")


class LocalBackend(Backend):
    """A folder that holds ``checkpoint-<step>/`` folders."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(expanded(root.removeprefix("file://")))
        self.uri = self.root
        self._lock_fd: int | None = None
        self._lock_pid = 0
        self._grant = ""
        self._begun: dict[str, int] = {}
        self._begun_lock = threading.Lock()

    def _folder(self, name: str) -> str:
        return os.path.join(self.root, name)

    def _file(self, name: str, path: str) -> str:
        return os.path.join(self.root, name, path)

    def names(self) -> list[str]:
        with _as_store_error(f"cannot list {self.root}"):
            try:
                with os.scandir(self.root) as entries:
                    return [entry.name for entry in entries if step_of(entry.name) is not None and entry.is_dir()]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def read_manifest(self, name: str) -> bytes | None:
        with _as_store_error(f"cannot read {self._file(name, MANIFEST)}"):
            if self._is_marked(name):
                return None
            try:
                return read_small(self._file(name, MANIFEST), _LARGEST)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except RefusedFileError as error:
                raise CheckpointCorruptError(f"{name}: {error}") from error

    def _is_marked(self, name: str) -> bool:
        return self._has_sentinel(self._folder(name))

    @staticmethod
    def _has_sentinel(folder: str) -> bool:
        """Whether the sentinel is there. An error is no answer: it must not make a checkpoint look whole."""
        try:
            os.lstat(os.path.join(folder, SENTINEL))
            return True
        except (FileNotFoundError, NotADirectoryError):
            return False

    def sizes(self, name: str) -> dict[str, int]:
        folder = self._folder(name)
        found: dict[str, int] = {}
        for parent, folders, files in os.walk(folder):
            if PARTS in folders:
                folders.remove(PARTS)
            for file in files:
                path = os.path.join(parent, file)
                with contextlib.suppress(FileNotFoundError):
                    seen = os.lstat(path)
                    if stat.S_ISREG(seen.st_mode):  # a link is not its file, and a pipe is no file
                        found[os.path.relpath(path, folder)] = seen.st_size
        return found

    def read_into(self, name: str, path: str, offset: int, buffer: memoryview) -> int:
        with _as_store_error(f"cannot read {self._file(name, path)}"):
            try:
                fd = open_below(self._folder(name), path)
            except RefusedFileError as error:
                raise CheckpointCorruptError(f"{name}: {error}") from error
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
        with self._doing(f"cannot create {folder}"):
            self.assure()
            make_folders(self.root)
            if not os.path.isdir(folder):
                self._make_marked(name)
            elif not self._is_marked(name):
                # The manifest is there before the sentinel goes: without either it is a leftover, with the former it
                # was committed by another rank since we looked, and to mark it now would undo that.
                if os.path.lexists(self._file(name, MANIFEST)):
                    raise CheckpointExistsError(f"{folder} is a whole checkpoint already; it is not written again")
                self._unmake(folder)
            else:
                fsync_dir(folder)  # its maker may have been killed before its sentinel was durable
            fsync_dir(self.root)
            self._hold(name)
            # Once more: a folder that a restart has begun since the first look was there when it was opened.
            self.assure()

    def _make_marked(self, name: str) -> None:
        """Make the folder together with its sentinel: no other rank can see the one without the other."""
        fresh = os.path.join(self.root, f"{_FRESH}{secrets.token_hex(6)}")
        os.mkdir(fresh)
        self._mark_incomplete(fresh)
        folder = self._folder(name)
        try:
            os.rename(fresh, folder)
        except OSError as error:
            shutil.rmtree(fresh, ignore_errors=True)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return  # another rank was first
            # Not every file system that shows a bucket renames folders. A rank that sees this one before its sentinel
            # takes it for a leftover, and marks it.
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
            self._unmake(folder)

    def _hold(self, name: str) -> None:
        """Keep the folder of that name, and no later one, for what is written into it."""
        self._let_go(name)
        fd = os.open(self._folder(name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with self._begun_lock:
            self._begun[name] = fd
            oldest = next(iter(self._begun)) if len(self._begun) > _MOST_BEGUN else None
        if oldest is not None:
            self._let_go(oldest)

    def _let_go(self, name: str) -> None:
        with self._begun_lock:
            fd = self._begun.pop(name, None)
            if fd is not None:
                os.close(fd)

    @contextlib.contextmanager
    def _inside(self, name: str) -> Iterator[str]:
        """A path to the folder that was begun here, even if another has its name now."""
        with self._begun_lock:
            held = self._begun.get(name)
            fd = None if held is None else os.dup(held)
        if fd is None:
            yield self._folder(name)
            return
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """As :func:`_as_store_error`; what fails because another run has the location now says that."""
        with _as_store_error(what):
            try:
                yield
            except OSError as error:
                if error.errno in (*_GONE, errno.ENOTEMPTY, errno.EEXIST):  # gone, or there again
                    self.assure()
                raise

    def _mark_incomplete(self, folder: str) -> None:
        sentinel = os.path.join(folder, SENTINEL)
        # One that is there already may be of a process that was killed before it was durable: fsync in either case.
        with contextlib.suppress(FileExistsError):
            fd = os.open(sentinel, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                # No fsync of it, and a full disk does not matter: its name is what counts.
                os.write(fd, _SENTINEL_TEXT)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
            finally:
                os.close(fd)
        fsync_dir(folder)

    def _unmake(self, folder: str) -> None:
        """Mark a checkpoint as not whole, unless another run has the location now."""
        if not self._grant:
            self._mark_incomplete(folder)
            return
        try:
            sentinel = self._own_sentinel()
        except OSError as error:
            if error.errno not in _FULL:  # where there is no room for a file, room is made by removing what is there
                raise
            self.assure()
            self._mark_incomplete(folder)
            return
        try:
            os.rename(sentinel, os.path.join(folder, SENTINEL))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(sentinel)
            raise
        fsync_dir(folder)

    def _own_sentinel(self) -> str:
        """A sentinel in the grant."""
        path = os.path.join(self._grant, secrets.token_hex(8))
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        return path

    def create(self, name: str, path: str, size: int) -> Sink:
        full = self._file(name, path)
        with self._inside(name) as folder:
            within = os.path.join(folder, path)
            if "/" in path:
                with self._doing(f"cannot create {os.path.dirname(full)}"):
                    os.makedirs(os.path.dirname(within), exist_ok=True)
            with self._doing(f"cannot write {full}"):
                return LocalSink(within, size, full)

    def adopt(self, name: str, path: str, source: str, source_path: str) -> dict[str, Any] | None:
        # A hard link: the file lies in both folders and its bytes once; removing either folder is safe.
        with self._inside(name) as folder:
            target = os.path.join(folder, path)
            try:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(target)
                os.link(self._file(source, source_path), target, follow_symlinks=False)
                if stat.S_ISREG(os.lstat(target).st_mode):
                    return {}
                os.unlink(target)
            except OSError:
                pass
            return None

    @contextlib.contextmanager
    def _new_part(self, name: str, part: str, data: bytes) -> Iterator[tuple[str, str]]:
        """A file with the data under a name of its own, and the name that it is to get."""
        with self._inside(name) as begun, self._doing(f"cannot write into {self._folder(name)}"):
            folder = os.path.join(begun, PARTS)
            target = os.path.join(folder, part)
            temporary = _temporary(target)
            os.makedirs(folder, exist_ok=True)
            try:
                with open(temporary, "wb") as file:
                    file.write(data)
                yield temporary, target
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)

    def put_part(self, name: str, part: str, data: bytes) -> None:
        with self._new_part(name, part, data) as (temporary, target):
            os.rename(temporary, target)

    def claim_part(self, name: str, part: str, data: bytes) -> bool:
        with self._new_part(name, part, data) as (temporary, target):
            return name_first(temporary, target)

    def read_parts(self, name: str) -> dict[str, bytes]:
        folder = self._file(name, PARTS)
        parts: dict[str, bytes] = {}
        with _as_store_error(f"cannot read {folder}"), contextlib.suppress(FileNotFoundError):
            for part in os.listdir(folder):
                if not part.endswith((".tmp", CLAIM)):
                    with contextlib.suppress(FileNotFoundError):
                        parts[part] = read_small(os.path.join(folder, part), _LARGEST)
        return parts

    def commit(self, name: str, manifest: bytes) -> None:
        folder = self._folder(name)
        with self._doing(f"cannot commit {folder}"), self._inside(name) as begun:
            self.assure()
            if not self._has_sentinel(begun):
                if os.path.lexists(self._file(name, MANIFEST)):
                    raise CheckpointExistsError(f"{folder} is a whole checkpoint already; it is not committed again")
                raise StoreError(f"cannot commit {folder}: it was not begun, or has been removed since")
            for parent, _, _ in os.walk(begun):
                if parent != begun:
                    fsync_dir(parent)
            write_durable(os.path.join(begun, MANIFEST), manifest)
            self._remove_sentinel(os.path.join(begun, SENTINEL))
            fsync_dir(begun)
            # Last: a rank that claims the folder because it finds no claim must also find that it is whole.
            shutil.rmtree(os.path.join(begun, PARTS), ignore_errors=True)
        self._let_go(name)

    def _remove_sentinel(self, sentinel: str) -> None:
        """The commit: one rename, which cannot be done by who has lost the grant."""
        if not self._grant:
            os.unlink(sentinel)
            return
        aside = os.path.join(self._grant, secrets.token_hex(8))
        os.rename(sentinel, aside)
        with contextlib.suppress(OSError):
            os.unlink(aside)

    def amend(self, name: str, manifest: bytes) -> None:
        with self._doing(f"cannot write into {self._folder(name)}"):
            self.assure()
            if not self._grant:
                write_durable(self._file(name, MANIFEST), manifest)
                return
            changed = os.path.join(self._grant, secrets.token_hex(8))
            write_durable(changed, manifest)
            os.rename(changed, self._file(name, MANIFEST))
            fsync_dir(self._folder(name))

    def discard(self, name: str, keep: Callable[[str], bool] | None = None) -> None:
        # `keep` is for backends whose folders refer to each other; hard links need no such care.
        folder = self._folder(name)
        with self._doing(f"cannot remove {folder}"):
            self._let_go(name)
            if os.path.islink(folder):
                self.assure()
                os.unlink(folder)
                fsync_dir(self.root)
                return
            try:
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                return
            try:
                # By its descriptor, so that a folder that another run makes of the same name meanwhile loses nothing.
                self._empty(f"/proc/self/fd/{fd}")
            finally:
                os.close(fd)
            os.rmdir(folder)
            fsync_dir(self.root)

    def _empty(self, folder: str) -> None:
        self._unmake(folder)
        for _ in range(2):  # what another rank has put there meanwhile goes too
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name != SENTINEL:
                        if entry.is_dir(follow_symlinks=False):
                            shutil.rmtree(entry.path)
                        else:
                            os.unlink(entry.path)
        # The manifest's removal is durable before the sentinel's: else a power cut could undo only the former.
        fsync_dir(folder)
        os.unlink(os.path.join(folder, SENTINEL))

    def set_aside(self, name: str) -> None:
        with self._doing(f"cannot mark {self._folder(name)}"):
            try:
                self._unmake(self._folder(name))
            except FileNotFoundError:
                self.assure()  # else the folder is not there

    def acquire(self, owner: Owner, *, wait_s: float = 0.0, takeover: bool = False) -> None:
        if self._holds():
            return
        self._lock_fd = None
        place = os.path.realpath(self.root)
        if _HELD.get(place) == os.getpid() and not takeover:
            busy = LocationBusyError(f"{self.root} is being written by another run of this very process")
            busy.beside = True
            raise busy
        with _as_store_error(f"cannot write into {self.root}"):
            if takeover:
                make_folders(os.path.dirname(self._lock_file))
                # The other one keeps its lock, on a file that is no longer the location's: its commits say so.
                write_durable(self._lock_file, b"")
            fd = self._lock(time.monotonic() + wait_s)
            with contextlib.suppress(OSError):  # the lock counts, and the disk may be full
                text = json.dumps(owner.as_dict()).encode()
                os.pwrite(fd, text, 0)
                os.ftruncate(fd, len(text))
            try:
                self._grant = self._new_grant()
            except OSError:
                os.close(fd)
                raise
        self._lock_fd = fd
        self._lock_pid = os.getpid()
        _HELD[place] = os.getpid()
        with contextlib.suppress(OSError):
            for entry in os.listdir(self.root):
                if entry.startswith(_FRESH):  # of a process that was killed between two system calls
                    shutil.rmtree(os.path.join(self.root, entry), ignore_errors=True)

    def _new_grant(self) -> str:
        """Take their grants from all others, and make one."""
        home = os.path.join(self.root, HOME)
        for name in os.listdir(home):
            if is_grant(name):
                _revoke(os.path.join(home, name))
        grant = os.path.join(home, _GRANT + secrets.token_hex(8))
        try:
            os.mkdir(grant)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return ""  # the lock alone then says whose the location is
        fsync_dir(home)
        return grant

    def grant(self) -> str:
        return os.path.basename(self._grant).removeprefix(_GRANT)

    def join(self, grant: str) -> None:
        if _GRANT_NAME.fullmatch(grant):
            self._grant = os.path.join(self.root, HOME, _GRANT + grant)

    def assure(self) -> None:
        with _as_store_error(f"cannot read {self.root}"):
            displaced = self._lock_fd is not None and self._holds() and not self._is_the_lock(self._lock_fd)
            if self._grant and not displaced:
                try:
                    os.stat(self._grant)
                except OSError as error:
                    if error.errno not in _GONE:
                        raise
                    displaced = True
        if displaced:
            raise LocationBusyError(
                f"{self.root} has been taken over by another run, or by a restart of this one; nothing is committed or "
                f"removed there"
            )

    @property
    def _lock_file(self) -> str:
        return os.path.join(self.root, HOME, LOCK)

    def _lock(self, until: float) -> int:
        while True:
            make_folders(os.path.dirname(self._lock_file))  # who held it may have taken them away
            fd = _open_lock(self._lock_file, os.O_RDWR | os.O_CREAT)
            try:
                # The kernel lets go of it when the process dies, however it dies. A record lock and no flock:
                # forked loader workers do not inherit it, so one that outlives its rank blocks no restart.
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_the_lock(fd):
                    return fd
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    os.close(fd)
                    raise
                if time.monotonic() >= until:
                    holder = os.pread(fd, 4096, 0)
                    os.close(fd)
                    busy = LocationBusyError(
                        f"{self.root} is being written by another run ({_describe(holder)}). Two runs in one place "
                        f"would destroy each other's checkpoints: give this one another folder, or stop the other "
                        f"one first"
                    )
                    with contextlib.suppress(ValueError):
                        busy.holder = Owner.from_dict(json.loads(holder))
                        busy.beside = busy.holder.is_beside()
                    raise busy from None
                time.sleep(0.05)
            os.close(fd)

    def _is_the_lock(self, fd: int) -> bool:
        """Whether an open file is still the one that the location's lock is taken on."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._lock_file))
        except FileNotFoundError:
            return False

    def _holds(self) -> bool:
        return self._lock_fd is not None and self._lock_pid == os.getpid()

    def release(self) -> None:
        # The grant stays, for ranks that are still at a save: the next run takes it away.
        for name in list(self._begun):
            self._let_go(name)
        if self._lock_fd is not None:
            if self._holds():
                if self._is_the_lock(self._lock_fd) or not os.path.exists(self._lock_file):
                    _HELD.pop(os.path.realpath(self.root), None)
                os.close(self._lock_fd)
            self._lock_fd = None

    def free_bytes(self) -> int | None:
        path = self.root
        while not os.path.isdir(path):
            path = os.path.dirname(path)
        room = os.statvfs(path)
        return room.f_bavail * room.f_frsize


def _describe(holder: bytes) -> str:
    try:
        return str(Owner.from_dict(json.loads(holder)))
    except ValueError:
        return "unknown process"
