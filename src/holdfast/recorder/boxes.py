"""Black boxes, as far as anyone must know who does not write them: where they lie and how far a rank came.

A black box is a small file in shared memory in which a rank leaves its position, for whoever finds it
dead: a mark, then slots, each of which begins with a sequence number, a kind and a step.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import time

from holdfast.base.private_folders import is_own_folder, runtime_folder
from holdfast.recorder.shared import read_left

MAGIC = b"holdfast-box-1\n\0"
HEADER, SLOT, SLOTS = 4096, 16384, 6
_FORGOTTEN_S = 7 * 86400.0
BOUNDARY, IN_FLIGHT = 0, 2
"""Kinds of record: at a step boundary; inside the step, after its forward pass."""


def _prefix() -> str:
    shared = "/dev/shm"
    if not os.access(shared, os.W_OK | os.X_OK):
        with contextlib.suppress(FileNotFoundError):  # there is no temporary folder either
            shared = runtime_folder()
    return os.path.join(shared, f"holdfast-{os.getuid()}-")


def folder(job: str) -> str:
    """Where the boxes of a job's ranks on this machine lie: memory that outlives a process, not the machine."""
    return _prefix() + job


def forget_old() -> None:
    """Remove the boxes of this user's jobs that were killed long ago and never went on."""
    parent, prefix = os.path.split(_prefix())
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            job = os.path.join(parent, name)
            if name.startswith(prefix) and is_own_folder(job) and _is_forgotten(job):
                shutil.rmtree(job, ignore_errors=True)


def _is_forgotten(job: str) -> bool:
    try:
        for name in os.listdir(job):
            path = os.path.join(job, name)
            if time.time() - os.lstat(path).st_mtime < _FORGOTTEN_S:
                return False
            head = read_left(path)[:80]
            if head.startswith(MAGIC) and os.path.exists(f"/proc/{int.from_bytes(head[72:80], 'little')}"):
                return False  # memory that is written through a mapping shows no time
        return time.time() - os.stat(job).st_mtime > _FORGOTTEN_S
    except OSError:
        return False


def last_step(path: str) -> int | None:
    """The last step that the rank has completed, to the step, alive or dead; None if the box does not tell."""
    found: int | None = None
    try:
        content = read_left(path)
        if not content.startswith(MAGIC):
            return None
        for slot in range(SLOTS):
            sequence, kind, step = struct.unpack_from("@QQQ", content, HEADER + slot * SLOT)
            if sequence and kind == BOUNDARY:
                found = max(found or 0, step)
    except (OSError, struct.error):
        return None
    return found
