"""Folders of this user alone in places that every user can write to, such as ``/tmp``.

The name of such a folder is known, so that another process of this user finds it, and another user may have made
something of that name first. What counts is who owns it, and that nobody else may enter.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator

_MOST = 64


def is_private(found: os.stat_result) -> bool:
    """Whether this is a folder that this user has made and nobody else may enter."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def is_own_folder(path: str) -> bool:
    """Whether there is such a folder, and no link to one."""
    try:
        return is_private(os.lstat(path))
    except OSError:
        return False


def is_unshared(path: str) -> bool:
    """Whether this is a folder of this user that nobody else can write to, whoever may read it."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def runtime_folder() -> str:
    """Where files for other processes of this user lie: ``XDG_RUNTIME_DIR`` if that is the user's, else ``/tmp``."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    return given if os.path.isabs(given) and is_own_folder(given) else tempfile.gettempdir()


def runtime_folders() -> list[str]:
    """All that :func:`runtime_folder` can be in processes of this user, which may have other variables."""
    login = f"/run/user/{os.getuid()}"
    return list(dict.fromkeys([runtime_folder(), *([login] if is_own_folder(login) else []), tempfile.gettempdir()]))


def own_folder(path: str) -> str:
    """The folder of that name, made if it is not there; where somebody else was first, one with a number behind it.

    Every process of this user comes to the same one. Raises PermissionError where all of them are taken.
    """
    for name in _names(path):
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700)
        if is_own_folder(name):
            return name
    raise PermissionError(f"{path} and {_MOST - 1} more belong to other users or can be entered by them")


def own_folders(path: str) -> list[str]:
    """Those that :func:`own_folder` has made."""
    return [name for name in _names(path) if is_own_folder(name)]


def _names(path: str) -> Iterator[str]:
    yield path
    yield from (f"{path}.{number}" for number in range(1, _MOST))
