"""Which workers of Ray Train run on this machine under holdfast: each leaves word in a folder of the user.

For people, who know a run by its name and not by process numbers. Standard library only: the command line reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field

from holdfast.base.process import process_start


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


def _folder() -> str:
    return os.path.join(tempfile.gettempdir(), f"holdfast-{os.getuid()}-ray")


def leave_marker(marker: Marker) -> None:
    folder = _folder()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    temporary = os.path.join(folder, f".{marker.pid}")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(asdict(marker), file)
    os.replace(temporary, os.path.join(folder, f"{marker.pid}.json"))


def remove_marker() -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(_folder(), f"{os.getpid()}.json"))


def markers() -> list[Marker]:
    """The workers that are alive, by run and rank. What dead ones left is removed."""
    folder = _folder()
    if not os.path.isdir(folder) or os.stat(folder).st_uid != os.getuid():
        return []
    found = []
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        try:
            with open(path, encoding="utf-8") as file:
                marker = Marker(**json.load(file))
        except (OSError, ValueError, TypeError):
            continue
        if marker.is_alive():
            found.append(marker)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    return sorted(found, key=lambda marker: (marker.location, marker.rank))
