"""Where a run keeps what is no checkpoint: journal, lock, who is running. A folder of this machine.

Beside the checkpoints where they lie on a file system; for object storage, under the user's state folder. A user
without a home, as in many pods, has that in the first of these that can be written: the runtime folder, the temporary
folder, shared memory. All processes of a user on a machine come to the same one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import tempfile

import _holdfast_startup
from holdfast.locations import expanded, without_secrets

JOURNAL = "journal.jsonl"
ATTEMPT = "attempt.json"
"""Who runs, or ran last: token, ranks with their processes."""
LAUNCH = "launch.json"
"""How the run was started, for ``holdfast resume``."""
CONTROL = "control.json"
"""What a person asked of the launcher: pause or resume."""


def start_folder() -> str:
    """The working folder that this process was started in. A script may leave it, as hydra does, for a dated one."""
    child = sys.modules.get("multiprocessing.process")
    if child is not None and child.parent_process() is not None:
        return str(child.ORIGINAL_DIR)  # that of the process at the top
    return str(_holdfast_startup.FOLDER or os.getcwd())


def default_location() -> str:
    """``holdfast-runs/<script name>`` in the folder that the script was started in."""
    script = os.path.splitext(os.path.basename(sys.argv[0] or ""))[0] or "python"
    location = os.path.join("holdfast-runs", script.lstrip("-") or "python")
    try:
        moved = os.getcwd() != start_folder()
    except OSError:  # the working folder has been removed
        moved = True
    return os.path.join(start_folder(), location) if moved else location


def home_of(location: str) -> str:
    """The home folder of a run that saves to ``location``. It need not be there, nor can it always be made."""
    scheme, separator, rest = location.partition("://")
    if not separator or scheme == "file":
        return os.path.join(os.path.abspath(expanded(rest if separator else location)), ".holdfast")
    location = without_secrets(location)
    name = location.rstrip("/").rpartition("/")[2] or "run"
    return os.path.join(state_folder(), f"{name}-{hashlib.sha256(location.encode()).hexdigest()[:12]}")


def state_folder() -> str:
    """Where this user's processes keep what outlives them: ``holdfast`` in ``XDG_STATE_HOME``, else ``~/.local/state``.

    Where that cannot be written, see the module.
    """
    return lasting_state_folder() or _passing_state_folder()


def lasting_state_folder() -> str | None:
    """The state folder, if it is in a place that is meant to last; None where none such can be written."""
    named = os.environ.get("XDG_STATE_HOME", "")
    for folder in (named, os.path.join(os.path.expanduser("~"), ".local", "state")):
        if os.path.isabs(folder) and _can_be_made(path := os.path.join(folder, "holdfast")):
            return path
    return None


def _passing_state_folder() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and _can_be_made(path := os.path.join(runtime, "holdfast")):
        return path
    shared = "/dev/shm"
    with contextlib.suppress(FileNotFoundError):  # there is no temporary folder either
        shared = tempfile.gettempdir()
    path = ""
    for folder in dict.fromkeys((shared, "/dev/shm")):
        # Others can write there: it must be ours alone, and the name differs from those of records, which come and go.
        path = os.path.join(folder, f"holdfast-state-{os.geteuid()}")
        with contextlib.suppress(OSError):
            os.mkdir(path, 0o700)
        with contextlib.suppress(OSError):
            found = os.lstat(path)
            private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
            if private and os.access(path, os.W_OK | os.X_OK, effective_ids=True):
                return path
    return path


def _can_be_made(path: str) -> bool:
    """Whether this user can write into a folder, which need not be there yet."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK, effective_ids=True)
