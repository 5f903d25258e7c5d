"""Where a run keeps what is no checkpoint: journal, lock, who is running. A folder of this machine.

Beside the checkpoints where they lie on a file system; for object storage, under the user's state folder.
"""

from __future__ import annotations

import hashlib
import os
import sys

import _holdfast_startup
from holdfast.locations import without_secrets

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
    """The home folder of a run that saves to ``location``."""
    scheme, separator, rest = location.partition("://")
    if not separator or scheme == "file":
        return os.path.join(os.path.abspath(os.path.expanduser(rest if separator else location)), ".holdfast")
    location = without_secrets(location)
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    name = location.rstrip("/").rpartition("/")[2] or "run"
    return os.path.join(state, "holdfast", f"{name}-{hashlib.sha256(location.encode()).hexdigest()[:12]}")
