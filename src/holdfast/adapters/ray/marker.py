"""Which workers of Ray Train run on this machine under holdfast: each leaves word in a folder of the user.

For people, who know a run by its name and not by process numbers. Standard library only: the command line reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field

from holdfast.base.private_folders import own_folder, own_folders, runtime_folder, runtime_folders
from holdfast.base.process import process_start
from holdfast.base.small_files import read_json
from holdfast.recorder.shared import leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """One worker."""

    name: str
    """Of the run, as in ``RunConfig(name=…)``."""
    location: str
    """Where it saves."""
    rank: int
    world: int
    pid: int = field(default_factory=os.getpid)
    started: str = field(default_factory=lambda: process_start(os.getpid()))

    def is_alive(self) -> bool:
        return process_start(self.pid) == self.started


_NAME = f"holdfast-{os.getuid()}-ray"


def leave_marker(marker: Marker) -> None:
    """Without a place for it the run goes on; people then have to look for its processes by themselves."""
    with contextlib.suppress(OSError):
        leave(
            os.path.join(own_folder(os.path.join(runtime_folder(), _NAME)), f"{marker.pid}.json"),
            json.dumps(asdict(marker)).encode(),
        )


def remove_marker() -> None:
    for folder in _folders():
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, f"{os.getpid()}.json"))


def _folders() -> list[str]:
    return [folder for parent in runtime_folders() for folder in own_folders(os.path.join(parent, _NAME))]


def markers() -> list[Marker]:
    """The workers that are alive, by run and rank. What dead ones left is removed."""
    found = []
    for folder in _folders():
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            try:
                marker = Marker(**read_json(path, own=True))
            except TypeError:
                continue
            if marker.is_alive():
                found.append(marker)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
    return sorted(found, key=lambda marker: (marker.location, marker.rank))
