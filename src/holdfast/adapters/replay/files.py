"""The files that a followed script writes: noted while it trains, led to a layer while its loop is replayed.

In a first attempt the first change of each file is noted (:mod:`.file_history`). In a later one everything that the
script writes, renames and removes, from the import of torch to the end of the replay, goes to a layer that is discarded
on arrival (:mod:`.overlay`), so that the user's files stay those of the first time. If there turns out to be nothing to
replay, the layer becomes real.

What counts is the script's process, through Python: ``open``, the functions of ``os``, and all that is built on them.
Files that holdfast, a compiler or :mod:`tempfile` make for themselves are left alone. So is what other processes and
native code write, but for ``torch.save``, ``torch.jit.save`` and safetensors. A child that is forked in a loop while it
is replayed, to write a checkpoint in the background say, does again what was done: it stays on the layer for its life.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from types import FrameType
from typing import Any

import torch

from holdfast.adapters.replay.file_history import Before, FileHistory
from holdfast.adapters.replay.overlay import Kind, Overlay
from holdfast.adapters.replay.patches import FILES, SAFETENSORS, TORCH
from holdfast.base.patching import Applied
from holdfast.errors import StateError

log = logging.getLogger("holdfast")

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_THEIR_OWN = (
    _OURS,
    f"{_TORCH}_inductor{os.sep}",
    f"{_TORCH}_dynamo{os.sep}",
    f"{_TORCH}utils{os.sep}cpp_extension.py",
    f"{_TORCH}utils{os.sep}_cpp_extension",
    tempfile.__file__,
)
"""Code that makes files for itself, which it expects to find by other means than Python's."""
_TRITON = f"{os.sep}triton{os.sep}"
_LAYER = "replay-files-"
_MOST_NAMED = 5
_CACHES = (
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "TORCH_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "KERAS_HOME",
    "MPLCONFIGDIR",
)
"""Variables that name folders of libraries."""


_SETTINGS = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".gin")
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/")


def is_settings(path: str) -> bool:
    """Whether a file that the script reads before its loop may hold its settings."""
    return path.endswith(_SETTINGS) and not path.startswith(_SYSTEM)


class _Owner(Enum):
    """Whom the code of a source file acts for."""

    CALLER = "a library"
    SCRIPT = "the script"
    ITSELF = "it makes files of its own"


def _owner_of(name: str) -> _Owner:
    if name == __file__:
        return _Owner.CALLER
    if name.startswith(_THEIR_OWN) or (_TRITON in name and "-packages" in name):
        return _Owner.ITSELF
    if name.startswith((_STANDARD, _TORCH, "<frozen")) or any(
        f"{os.sep}{folder}{os.sep}" in name for folder in ("site-packages", "dist-packages")
    ):
        return _Owner.CALLER
    return _Owner.SCRIPT


def is_of_script(name: str) -> bool:
    """Whether a source file belongs to the script, and to no library."""
    return _owner_of(name) is _Owner.SCRIPT


class _Function:
    """A replacement that is equal to what it replaces, and no more bound to instances than a builtin is."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        self._original, self._call = original, call

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._call(*args, **options)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._original

    def __hash__(self) -> int:
        return hash(self._original)

    def __reduce__(self) -> str:
        """By name, as a builtin: what is pickled can be loaded where there is no holdfast."""
        module = str(self._original.__module__)
        self.__module__ = {"posix": "os", "nt": "os", "_io": "io"}.get(module, module)
        return str(self._original.__name__)


class Files:
    """Stands between the script and its files. Wrappers of the patch tables are among its methods."""

    def __init__(self) -> None:
        self._history = FileHistory("")
        self._overlay: Overlay | None = None
        self._applied: dict[str, Applied] = {}
        self._looking: Applied | None = None
        self._others: dict[str, Before] = {}
        """First changes by other ranks."""
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._local = threading.local()
        self._replacements: dict[int, Callable[..., Any]] = {}
        """By original: ``open`` and ``io.open`` stay one object."""
        self._owners: dict[str, _Owner] = {}
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        """Files of the layer that the script writes to."""
        self._temporary: set[str] = set()
        """Files and folders of :mod:`tempfile`."""
        self._in_loop = False
        self._lent = ""
        """A folder of the layer that children use, until the script ends."""
        self._mark = -1
        """Descriptor that says that the layer is in use."""
        self._untrained: set[str] = set()
        """Files in temporary folders with weights that the script has saved in a replay."""
        self._settings: set[str] = set()
        """Files that may hold settings, and that the script has read before its loop."""
        self._written: set[str] = set()
        """Files that it has written before its loop."""
        self._made: set[str] = set()
        """Files that this attempt has made before its loop, beside the layer: they were not there."""

    # ------------------------------------------------------------------ in and out

    def begin(self, path: str, *, again: bool) -> None:
        """The script begins. ``path``: of its history, in the home of the run; empty: it is not known yet. ``again``:
        there was an attempt before."""
        if os.getpid() != self._process:  # the layer is the parent's
            self._process, self._overlay, self._looking = os.getpid(), None, None
            self._lock = threading.RLock()
        self._history = FileHistory(path)
        if path:
            with self.real():
                _remove_stale_layers(os.path.dirname(path))
        for table in (FILES, TORCH, SAFETENSORS):
            if table.framework not in self._applied:
                self._applied[table.framework] = table.begin("files", self)
        if path and again:
            with self.real():
                self._history.recall()
                self._others = self._history.of_other_ranks()
                if self._history.saves:
                    self._lay_over()
                else:
                    self._history.changes.clear()

    def _lay_over(self) -> None:
        """Let the script write to a layer from here on."""
        history = self._history
        before = {} if history.over else {**self._others, **history.changes}
        try:
            folder = tempfile.mkdtemp(prefix=_LAYER, dir=os.path.dirname(history.path))
        except OSError:
            _remove_stale_layers(tempfile.gettempdir())
            folder = tempfile.mkdtemp(prefix=_LAYER)
        self._mark = _hold(folder)
        self._overlay = Overlay(folder, before, shared=self._others)
        self._looking = FILES.begin("look", self)

    def forked(self, *, child: bool) -> None:
        """The process has been forked, or this is its child."""
        if self._overlay is None or not self._in_loop or (not child and os.getpid() != self._process):
            return
        self._lent = self._overlay.folder
        if child:
            self._process, self._lock = os.getpid(), threading.RLock()
            with self.real():
                self._overlay.folder = tempfile.mkdtemp(prefix=_LAYER, dir=self._overlay.folder)

    def serve(self) -> None:
        """This is a child that serves its parent's loop, a loader's worker say: its files are the real ones."""
        self._overlay = self._looking = None

    def loop_begins(self, *, replays: bool) -> None:
        """The first training act: it is known now whether there is something to replay."""
        self._in_loop = True
        if not self._applied[SAFETENSORS.framework].originals:
            self._applied[SAFETENSORS.framework] = SAFETENSORS.begin("files", self)
        if replays:
            with self.real():
                if self._overlay is None:
                    self._history.changes.clear()  # those of this attempt: what it has made before its loop is there
                    self._lay_over()
                assert self._overlay is not None
                self._overlay.reveal(self._others)
        else:
            if self._overlay is not None:
                self._history.changes.clear()  # those of an earlier run
            self.commit()
        with self.real():
            self._history.begin(anew=not replays)

    def folders_linked(self, folders: Iterable[str]) -> None:
        """Folders of the script have become links to ``folders``, which an earlier attempt has made."""
        _folder_of.cache_clear()
        if self._overlay is not None:
            with self.real():
                self._overlay.reveal(os.path.realpath(folder) for folder in folders)
                self._overlay.fold()

    def arrive(self) -> None:
        """The replay is at its end: what the script does from here on is real."""
        if self._overlay is None:
            return
        self._flush()
        with self.real():
            missing = self._overlay.discard(self._made)
        self._remove_layer()
        if missing:
            log.warning(
                "files that the script had written are not here any more: %s%s",
                ", ".join(sorted(missing)[:_MOST_NAMED]),
                " and others" if len(missing) > _MOST_NAMED else "",
            )

    def commit(self) -> None:
        """Nothing is replayed: what the script has written so far becomes real."""
        if self._overlay is None or os.getpid() != self._process:
            return
        self._flush()
        with self.real():
            for path in self._overlay.commit():
                self._history.note_change(path)
        self._remove_layer()

    def note_save(self) -> None:
        """A checkpoint is on its way."""
        self._history.note_save()

    def note_end(self) -> None:
        """The run is complete."""
        self._history.note_end()

    def end(self) -> None:
        """Let go. What is in a layer is given up."""
        if os.getpid() != self._process:
            return
        self._remove_layer()
        with self.real():
            if self._lent:
                shutil.rmtree(self._lent, ignore_errors=True)
                self._let_go()
        for applied in self._applied.values():
            applied.undo()
        self._applied.clear()
        self._history.close()

    def _remove_layer(self) -> None:
        if self._looking is not None:
            self._looking.undo()
            self._looking = None
        overlay, self._overlay = self._overlay, None
        self._open.clear()
        if overlay is not None and overlay.folder != self._lent:
            with self.real():
                shutil.rmtree(overlay.folder, ignore_errors=True)
                self._let_go()

    def _let_go(self) -> None:
        if self._mark >= 0:
            os.close(self._mark)
            self._mark = -1

    def _flush(self) -> None:
        for file in list(self._open):
            with contextlib.suppress(OSError, ValueError):  # closed, or its disk is full
                file.flush()

    # ------------------------------------------------------------------ whose call, and which path

    @contextlib.contextmanager
    def real(self) -> Iterator[None]:
        """What this thread does inside is done to the real files."""
        before = getattr(self._local, "real", False)
        with self._lock:
            self._local.real = True
            try:
                yield
            finally:
                self._local.real = before

    def _is_real(self) -> bool:
        return getattr(self._local, "real", False) or os.getpid() != self._process

    def _seen(self, path: Any, dir_fd: Any = None, *, follow: bool = True) -> str | None:
        """The key of a path that the layer may know; None: take it as it is."""
        if self._overlay is None or self._is_real():
            return None
        return self._key(path, dir_fd, follow=follow)

    def _changed(self, path: Any, dir_fd: Any = None, *, follow: bool = False) -> str | None:
        """The key of a path that the script is about to change; None: it is not the script, or none of its files."""
        if self._is_real() or not self._applied:
            return None
        key = self._key(path, dir_fd, follow=follow)
        return key if key is not None and self._is_of_script(sys._getframe(1), key) else None

    def _key(self, path: Any, dir_fd: Any = None, *, follow: bool) -> str | None:
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        name = os.fsdecode(path)
        if not name:
            return None
        with self.real():
            overlay = self._overlay
            try:
                base = os.getcwd() if dir_fd is None or name.startswith(os.sep) else self._open_folder(dir_fd)
                folder, last = os.path.split(os.path.normpath(os.path.join(base, name)))
            except OSError:
                return None
            key = os.path.join(_folder_of(folder) if overlay is None else overlay.folder_of(folder), last)
            if follow and (overlay is None or overlay.view(key) is None) and os.path.islink(key):
                key = os.path.realpath(key) if overlay is None else overlay.folder_of(key)
            if key.startswith(_left_alone()) or (overlay is not None and key.startswith(overlay.folder)):
                return None
            if self._temporary and (key in self._temporary or self._is_temporary(key)):
                return None
        return key

    def _open_folder(self, descriptor: int) -> str:
        """The path of a folder that is open."""
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        return path if self._overlay is None else self._overlay.shown(path)

    def _is_temporary(self, key: str) -> bool:
        while len(key) > 1:
            key = os.path.dirname(key)
            if key in self._temporary:
                return True
        return False

    def _is_of_script(self, frame: FrameType | None, key: str) -> bool:
        while frame is not None:
            name = frame.f_code.co_filename
            owner = self._owners.get(name)
            if owner is None:
                owner = self._owners[name] = _owner_of(name)
            if owner is _Owner.ITSELF:
                if name == tempfile.__file__ and not os.path.isdir(key):  # it opens the folder to make a file in it
                    self._temporary.add(key)
                return False
            if owner is _Owner.SCRIPT:
                break
            frame = frame.f_back
        return True

    def _layered(self, key: str) -> bool:
        """Whether a change of this path is made in the layer; noted if it is not. What is not there before the loop
        cannot be harmed, and may be looked for by native code."""
        with self.real():
            if self._overlay is not None and (self._in_loop or self._overlay.holds(key) or os.path.lexists(key)):
                return True
            if self._overlay is not None:
                self._overlay.reveal([key])
                self._made.add(key)
        return False

    def _replacing(self, original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(original, types.FunctionType):
            return self._replacements.setdefault(id(original), call)
        return self._replacements.setdefault(id(original), _Function(original, call))

    def _on_layer(self, given: Any, act: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Act on the layer; errors name the path that was ``given``."""
        with self.real():
            try:
                return act(*args, **options)
            except OSError as error:
                error.filename = given
                raise

    # ------------------------------------------------------------------ opening

    def open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if isinstance(file, int) or not isinstance(mode, str):
                return original(file, mode, *args, **options)
            if not any(letter in mode for letter in "wax+"):
                self._note_settings(file)
                if self._overlay is None:
                    self._history.note_read(file)
                    return original(file, mode, *args, **options)
                path = self.readable(file)
                found = original(path, mode, *args, **options)
                if path is not file:
                    _rename(found, file)
                return found
            key = self._changed(file, follow=True)
            if key is None or self._is_special(key):
                return original(file, mode, *args, **options)
            if not self._in_loop:
                self._written.add(key)
            appends = "a" in mode
            if not self._layered(key):
                self._note(key, append=appends)
                return original(file, mode, *args, **options)
            assert self._overlay is not None
            backing = self._on_layer(
                file,
                self._overlay.writable,
                key,
                create="r" not in mode,
                exclusive="x" in mode,
                keep="w" not in mode,
                append=appends,
                text="b" not in mode,
            )
            found = original(backing, mode.replace("x", "w"), *args, **options)
            _rename(found, file)
            self._open.add(found)
            return found

        return self._replacing(original, opened)

    def _note_settings(self, file: Any) -> None:
        if self._in_loop or not isinstance(file, str | os.PathLike) or self._is_real():
            return
        path = os.fspath(file)
        if isinstance(path, str) and is_settings(path := os.path.abspath(path)):
            self._settings.add(path)

    def settings(self) -> set[str]:
        """Files that may hold settings, that the script has read before its loop and not written itself."""
        return {path for path in self._settings if os.path.realpath(path) not in self._written}

    def os_open(self, original: Callable[..., int]) -> Callable[..., int]:
        def os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None) -> int:
            if not flags & _WRITES:
                key = self._seen(path, dir_fd)
                found: Any = path if key is None else self._read(path, key)
                return original(found, flags, mode, dir_fd=dir_fd)
            key = self._changed(path, dir_fd, follow=True)
            if key is None or self._is_special(key) or flags & getattr(os, "O_TMPFILE", 0) & ~os.O_DIRECTORY:
                return original(path, flags, mode, dir_fd=dir_fd)
            appends = bool(flags & os.O_APPEND)
            if not self._layered(key):
                self._note(key, append=appends)
                return original(path, flags, mode, dir_fd=dir_fd)
            assert self._overlay is not None
            backing = self._on_layer(
                path,
                self._overlay.writable,
                key,
                create=bool(flags & os.O_CREAT),
                exclusive=bool(flags & os.O_EXCL),
                keep=not flags & os.O_TRUNC,
                append=appends,
                text=False,
            )
            return original(backing, flags & ~os.O_EXCL, mode)

        return self._replacing(original, os_open)

    def _note(self, key: str, *, append: bool = False) -> None:
        with self.real():
            self._history.note_change(key, append=append)

    def _is_special(self, key: str) -> bool:
        """Whether it is a pipe, a device or a socket."""
        with self.real():
            if self._overlay is not None and self._overlay.view(key) is not None:
                return False
            try:
                mode = os.stat(key).st_mode
            except OSError:
                return False
        return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)

    def readable(self, path: Any) -> Any:
        """Where the content of ``path`` is; ``path`` itself where the layer does not know it."""
        key = self._seen(path)
        return path if key is None else self._read(path, key)

    def _read(self, path: Any, key: str) -> Any:
        assert self._overlay is not None
        if self._on_layer(path, self._overlay.view, key) is not None:
            return _like(path, self._on_layer(path, self._overlay.readable, key))
        return _like(path, key) if self._overlay.has_links else path

    # ------------------------------------------------------------------ changing

    def unlink(self, original: Callable[..., None]) -> Callable[..., None]:
        return self._removing(original, lambda overlay, key: overlay.remove(key))

    def rmdir(self, original: Callable[..., None]) -> Callable[..., None]:
        return self._removing(original, lambda overlay, key: overlay.remove_folder(key))

    def _removing(self, original: Callable[..., None], remove: Callable[[Overlay, str], None]) -> Callable[..., None]:
        def removed(path: Any, *, dir_fd: Any = None) -> None:
            key = self._changed(path, dir_fd)
            if key is None:
                original(path, dir_fd=dir_fd)
            elif self._layered(key):
                self._on_layer(path, remove, self._overlay, key)
            else:
                if os.path.lexists(key):
                    self._note(key)
                original(path, dir_fd=dir_fd)

        return self._replacing(original, removed)

    def mkdir(self, original: Callable[..., None]) -> Callable[..., None]:
        def mkdir(path: Any, mode: int = 0o777, *, dir_fd: Any = None) -> None:
            key = self._changed(path, dir_fd)
            if key is None:
                original(path, mode, dir_fd=dir_fd)
            elif self._layered(key):
                assert self._overlay is not None
                self._on_layer(path, self._overlay.make_folder, key)
            else:
                if not os.path.lexists(key):
                    self._note(key)
                original(path, mode, dir_fd=dir_fd)

        return self._replacing(original, mkdir)

    def rename(self, original: Callable[..., None]) -> Callable[..., None]:
        def rename(src: Any, dst: Any, *, src_dir_fd: Any = None, dst_dir_fd: Any = None) -> None:
            source, target = self._changed(src, src_dir_fd), self._changed(dst, dst_dir_fd)
            if target is None:
                original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            elif self._overlay is not None and (source is None or source in self._made) and self._layered(target):
                self._on_layer(src, self._overlay.take, self._whole(src, src_dir_fd), target)
            elif source is not None and self._layered(source):
                assert self._overlay is not None
                self._on_layer(src, self._overlay.rename, source, target)
            else:
                for key in (source, target):
                    if key is not None:
                        self._note(key)
                if source is not None:
                    self._note_below(source, target)
                original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                _folder_of.cache_clear()

        return self._replacing(original, rename)

    def _whole(self, path: Any, dir_fd: Any) -> str:
        """The absolute path of a file that is none of the layer's."""
        base = os.getcwd() if dir_fd is None else self._open_folder(dir_fd)
        return os.path.normpath(os.path.join(base, os.fsdecode(path)))

    def _note_below(self, source: str, target: str) -> None:
        """A folder is about to be renamed: so are the files in it."""
        with self.real():
            for folder, folders, files in os.walk(source) if not os.path.islink(source) else ():
                there = os.path.normpath(os.path.join(target, os.path.relpath(folder, source)))
                for name in (*folders, *files):
                    self._note(os.path.join(folder, name))
                    self._note(os.path.join(there, name))

    def link(self, original: Callable[..., None]) -> Callable[..., None]:
        def link(src: Any, dst: Any, **options: Any) -> None:
            source = self._changed(src, options.get("src_dir_fd"))
            target = self._changed(dst, options.get("dst_dir_fd"))
            if source is None or target is None:
                original(src, dst, **options)
            elif self._layered(target) or self._layered(source):
                assert self._overlay is not None
                self._on_layer(src, self._overlay.link, source, target)
            else:
                self._note(target)
                original(src, dst, **options)

        return self._replacing(original, link)

    def symlink(self, original: Callable[..., None]) -> Callable[..., None]:
        def symlink(src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: Any = None) -> None:
            key = self._changed(dst, dir_fd)
            if key is None:
                original(src, dst, target_is_directory, dir_fd=dir_fd)
            elif self._layered(key):
                assert self._overlay is not None
                self._on_layer(dst, self._overlay.symlink, os.fsdecode(src), key)
            else:
                self._note(key)
                original(src, dst, target_is_directory, dir_fd=dir_fd)
                _folder_of.cache_clear()

        return self._replacing(original, symlink)

    def truncate(self, original: Callable[..., None]) -> Callable[..., None]:
        def truncate(path: Any, length: int) -> None:
            key = self._changed(path, follow=True)
            if key is None:
                original(path, length)
            elif self._layered(key):
                assert self._overlay is not None
                flags = {"create": False, "exclusive": False, "keep": True, "append": False, "text": False}
                original(self._on_layer(path, self._overlay.writable, key, **flags), length)
            else:
                self._note(key)
                original(path, length)

        return self._replacing(original, truncate)

    def change_attributes(self, original: Callable[..., None]) -> Callable[..., None]:
        """``chmod``, ``utime`` and the like: what the layer does not hold has its attributes already."""

        def change(path: Any, *args: Any, **options: Any) -> None:
            key = self._seen(path, options.get("dir_fd"), follow=options.get("follow_symlinks", True))
            if key is None:
                original(path, *args, **options)
                return
            backing = os.fsdecode(self._read(path, key))
            if os.path.dirname(backing) == self._overlay_folder():
                original(backing, *args, **options)

        return self._replacing(original, change)

    def _overlay_folder(self) -> str:
        return self._overlay.folder if self._overlay is not None else ""

    # ------------------------------------------------------------------ looking

    def stat(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def looked_at(path: Any, *, dir_fd: Any = None, follow_symlinks: bool = True) -> Any:
            key = self._seen(path, dir_fd, follow=follow_symlinks)
            if key is None:
                return original(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
            if follow_symlinks:
                return original(self._read(path, key), dir_fd=dir_fd)
            return original(self._itself(path, key), dir_fd=dir_fd, follow_symlinks=False)

        return self._replacing(original, looked_at)

    def lstat(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._about_itself(original)

    def readlink(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._about_itself(original)

    def _about_itself(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def about(path: Any, *, dir_fd: Any = None) -> Any:
            key = self._seen(path, dir_fd, follow=False)
            return original(path if key is None else self._itself(path, key), dir_fd=dir_fd)

        return self._replacing(original, about)

    def _itself(self, path: Any, key: str) -> Any:
        """As :meth:`readable`, but of a symbolic link and not of what it leads to."""
        assert self._overlay is not None
        entry = self._on_layer(path, self._overlay.view, key)
        if entry is not None and entry.kind is Kind.LINK:
            return _like(path, entry.backing)
        return self._read(path, key)

    def access(self, original: Callable[..., bool]) -> Callable[..., bool]:
        def access(path: Any, mode: int, *, dir_fd: Any = None, **options: Any) -> bool:
            key = self._seen(path, dir_fd)
            if key is None:
                return original(path, mode, dir_fd=dir_fd, **options)
            try:
                return original(self._read(path, key), mode, dir_fd=dir_fd, **options)
            except FileNotFoundError:
                return False

        return self._replacing(original, access)

    def attributes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Extended attributes, which ``shutil.copy2`` reads."""

        def attributes(path: Any = None, *args: Any, follow_symlinks: bool = True) -> Any:
            key = self._seen("." if path is None else path, follow=follow_symlinks)
            if key is None:
                return original(path, *args, follow_symlinks=follow_symlinks)
            found = self._read(path, key) if follow_symlinks else self._itself(path, key)
            return original(found, *args, follow_symlinks=follow_symlinks)

        return self._replacing(original, attributes)

    def listdir(self, original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def listdir(path: Any = None) -> list[Any]:
            key = self._seen_folder(path)
            if key is None:
                return original(path)
            return self._names(path, key, original(self._folder(path, key)))

        return self._replacing(original, listdir)

    def _seen_folder(self, path: Any) -> str | None:
        if isinstance(path, int):
            return self._seen(".", path)
        return self._seen("." if path is None else path)

    def _names(self, path: Any, key: str, real: list[Any]) -> list[Any]:
        assert self._overlay is not None
        names = self._on_layer(path, self._overlay.names, key, map(os.fsdecode, real))
        return [_like(path, name) for name in names]

    def _folder(self, path: Any, key: str) -> Any:
        """A real folder for one of the layer. Raises FileNotFoundError if it is hidden."""
        return path if isinstance(path, int) else self._read("." if path is None else path, key)

    def scandir(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scandir(path: Any = None) -> Any:
            key, overlay = self._seen_folder(path), self._overlay
            if key is None or overlay is None or not (overlay.differs_in(key) or overlay.has_links):
                return original(path)
            folder = self._folder(path, key)
            with original(folder) as scan:
                real = {entry.name: entry for entry in scan}
            shown = "" if isinstance(path, int) else "." if path is None else os.fspath(path)
            changed = overlay.changes_in(key) if folder is path else {os.fsdecode(name) for name in real}
            return _Scan(
                real[name]
                if name in real and os.fsdecode(name) not in changed
                else _Entry(name, os.path.join(shown, name), os.path.join(key, os.fsdecode(name)))
                for name in self._names(path, key, list(real))
            )

        return self._replacing(original, scandir)

    @staticmethod
    def by_path(original: bool) -> bool:
        """``shutil.rmtree`` names what it removes by its path, and not in an open folder."""
        return False

    # ------------------------------------------------------------------ weights

    def save(self, original: Callable[..., None]) -> Callable[..., None]:
        """``torch.save``, which opens files by itself."""

        def save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
            if not isinstance(f, str | os.PathLike):
                if self._overlay is None or not _has_descriptor(f) or self._is_in_layer(f):
                    original(obj, f, *args, **options)
                return  # somebody else's file: the weights of a replay are not the trained ones
            target = self._weights_at(f)
            if target is f:
                self._note_weights(os.path.realpath(f))
            with torch.serialization.skip_data() if target is not f else contextlib.nullcontext():
                original(obj, target, *args, **options)

        return self._replacing(original, save)

    def _note_weights(self, path: Any) -> None:
        if self._overlay is not None and self._in_loop:
            self._untrained.add(path)
        else:
            self._untrained.discard(path)

    def check_weights(self, file: Any) -> None:
        """Raise StateError for a file that holds weights of a replay, which were not those that the run had saved."""
        if self._overlay is not None or not self._untrained or not isinstance(file, str | os.PathLike):
            return
        if os.path.realpath(file) in self._untrained:
            raise StateError(
                f"{os.fspath(file)} is in a temporary folder, and the weights that the run had saved there before it "
                "was interrupted are gone with it: save them in a folder that stays"
            )

    def save_module(self, original: Callable[..., None]) -> Callable[..., None]:
        """``save`` of a scripted module."""

        def save(module: Any, f: Any, *args: Any, **options: Any) -> None:
            original(module, str(self._weights_at(f)), *args, **options)

        return save

    def serialize_file(self, original: Callable[..., None]) -> Callable[..., None]:
        def serialize_file(tensors: Any, filename: Any, *args: Any, **options: Any) -> None:
            original(tensors, self._weights_at(filename), *args, **options)

        return self._replacing(original, serialize_file)

    def safe_open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def safe_open(filename: Any, *args: Any, **options: Any) -> Any:
            return original(self.readable(filename), *args, **options)

        return self._replacing(original, safe_open)

    def _weights_at(self, path: Any) -> Any:
        """Where weights go that the script saves to ``path``."""
        key = self._changed(path, follow=True)
        if key is None or self._is_special(key):
            return path
        if not self._layered(key):
            self._note(key)
            return path
        assert self._overlay is not None
        flags = {"create": True, "exclusive": False, "keep": False, "append": False, "text": False}
        backing = self._on_layer(path, self._overlay.writable, key, **flags)
        self._overlay.holds_weights(backing)
        return backing

    def _is_in_layer(self, file: Any) -> bool:
        """Whether an open file is one of the layer, which from now on holds weights."""
        try:
            backing = os.readlink(f"/proc/self/fd/{file.fileno()}")
        except (OSError, AttributeError, ValueError):
            return False
        return self._overlay is not None and self._overlay.holds_weights(backing)


class _Entry:
    """One name in a folder of the layer, as ``os.scandir`` gives it."""

    def __init__(self, name: str | bytes, path: str | bytes, whole: str) -> None:
        """``whole``: the absolute path."""
        self.name, self.path, self._whole = name, path, whole

    def __fspath__(self) -> str | bytes:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._whole, follow_symlinks=follow_symlinks)

    def _is(self, kind: Callable[[int], bool], follow: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False


class _Scan:
    """The iterator of ``os.scandir``."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


_MARK = "in-use"


def _hold(folder: str) -> int:
    """Mark a layer as used by this process and by those that it forks, for as long as one of them lives."""
    path = os.path.join(folder, f"{_MARK}.new")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(path, os.path.join(folder, _MARK))  # not before it is locked
    return descriptor


def _remove_stale_layers(parent: str) -> None:
    """Remove the layers of processes that were killed in their replay."""
    try:
        names = [name for name in os.listdir(parent) if name.startswith(_LAYER)]
    except OSError:
        return
    for name in names:
        folder = os.path.join(parent, name)
        try:
            descriptor = os.open(os.path.join(folder, _MARK), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # it is in use
        finally:
            os.close(descriptor)


@functools.cache
def _left_alone() -> tuple[str, ...]:
    """Folders that belong to the machine, the interpreter or a cache, and not to the script."""
    caches = [os.environ.get(name) for name in _CACHES]
    named = [os.path.join(os.path.realpath(cache), "") for cache in caches if cache]
    system = [f"/dev/{name}" for name in os.listdir("/dev") if name != "shm"] if os.path.isdir("/dev") else []
    prefixes = {os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix)}
    hidden = os.path.join(os.path.realpath(os.path.expanduser("~")), ".")
    return ("/proc/", "/sys/", *system, *prefixes, hidden, *named)


@functools.lru_cache(maxsize=4096)
def _folder_of(folder: str) -> str:
    return os.path.realpath(folder)


def _has_descriptor(file: Any) -> bool:
    """Whether it is an open file, and not memory or a wrapper around another."""
    try:
        file.fileno()
    except (OSError, AttributeError, ValueError):
        return False
    return True


def _like(given: Any, path: str) -> Any:
    """``path`` as bytes where those were given."""
    return os.fsencode(path) if isinstance(given, bytes) else path


def _rename(file: Any, name: Any) -> None:
    """Let a file that is open under another path say the one that the script has given."""
    raw = getattr(file, "buffer", file)
    raw = getattr(raw, "raw", raw)
    with contextlib.suppress(AttributeError, TypeError):
        raw.name = name
