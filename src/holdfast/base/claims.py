"""Names that one of several processes gets, on file systems with and without hard links.

With hard links a name and its content are there at once. File systems that show a bucket as a folder have none, nor
has FAT: there the first to make an empty file beside the name may give it. A process that dies between the two leaves a
name that nobody gets; who waits for it must have an end to that.
"""

from __future__ import annotations

import errno
import os

CLAIM = ".claim"
"""Ends the name of the empty file."""

_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
"""How file systems refuse a link that they could never make."""


def name_first(temporary: str, path: str) -> bool:
    """Give a finished file its name, and return True, unless another process has been first.

    The name is never seen without the whole content. ``temporary`` may be gone afterwards.
    """
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    try:
        os.close(os.open(path + CLAIM, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except FileExistsError:
        return False
    os.rename(temporary, path)
    return True
