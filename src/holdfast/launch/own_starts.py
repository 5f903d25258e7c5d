"""How this user has started runs from this machine: what ``holdfast resume`` may run without asking.

The folder of a run can come from anywhere: an archive, a colleague, a volume that others write to. A command that lies
in it is not this user's word. So each launcher also writes down its start in the user's own state folder, under the
place of the run, and only that record is run unasked. It is opened once, without following links, and what was checked
is what is run: its owner is looked up in the descriptor, and nobody else may be able to write it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import asdict

from holdfast.base.run_directory import LAUNCH, state_folder
from holdfast.base.small_files import json_object, read_small
from holdfast.launch.records import LaunchSpec, write_json


def _path(home: str) -> str:
    name = hashlib.sha256(os.fsencode(os.path.realpath(home))).hexdigest()[:32]
    return os.path.join(state_folder(), "starts", f"{name}.json")


def remember(home: str, spec: LaunchSpec) -> None:
    """Write down that this user starts the run of this home folder so. Without a state folder it is asked again."""
    path = _path(home)
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        write_json(path, {"home": os.path.realpath(home), "spec": asdict(spec)})


def recall(home: str) -> LaunchSpec | None:
    """How this user has started the run of this home folder; None if this machine knows of no start."""
    try:
        record = json_object(read_small(_path(home), own=True))
        return LaunchSpec.from_dict(record["spec"]) if record["home"] == os.path.realpath(home) else None
    except (OSError, KeyError, ValueError, TypeError, AttributeError):
        return None


def of_elsewhere(home: str) -> LaunchSpec:
    """The start that lies in the home folder itself, for a person to look at.

    Raises :class:`~holdfast.base.small_files.RefusedFileError` if it belongs to another user, who could not only have
    packed it but also changes it, and ValueError if it is none.
    """
    record = json_object(read_small(os.path.join(home, LAUNCH), own=True))
    try:
        return LaunchSpec.from_dict(record["spec"])
    except (KeyError, TypeError, AttributeError):
        raise ValueError("not the record of a start") from None
