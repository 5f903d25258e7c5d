"""Identity of a process: enough to tell, on the same machine, that it is gone."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.base.words import LONGEST_TEXT, is_plain


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_start(pid: int) -> str:
    """Start time of a process, which tells it from a later one with the same number; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return ""
    # A zombie has let go of all it held: for a lock it is as dead as a process that is gone.
    return "" if fields[0] in ("Z", "X") else fields[19]


def is_stopped(pid: int) -> bool:
    """Whether a process stands still, by SIGSTOP or in a debugger, until somebody lets it go on."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that writes into a location."""

    run: str
    """The run's identity: restarts of the same job share it and may take over from each other at once."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    boot: str = field(default_factory=_boot_id)
    started: str = field(default_factory=lambda: process_start(os.getpid()))
    pid_namespace: str = field(default_factory=_pid_namespace)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Owner:
        """Decode what another process wrote; raises ValueError if it is no record of an owner."""
        try:
            known = {name: str(record.get(name, "")) for name in ("run", "host", "boot", "started", "pid_namespace")}
            pid = record["pid"]
            if not all(is_plain(text) and len(text) <= LONGEST_TEXT for text in known.values()):
                raise ValueError("not the record of an owner: it holds control characters")
            if isinstance(pid, bool) or not isinstance(pid, int) or not 0 < pid < 1 << 31:
                raise ValueError("not the record of an owner: its process has no number")
            return cls(pid=pid, **known)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the record of an owner: {error}") from error

    def is_beside(self) -> bool:
        """True where this machine can tell that the process is alive; False: gone, or cannot tell."""
        return self._can_be_told() and process_start(self.pid) == self.started

    def is_stopped(self) -> bool:
        """True where this machine can tell that the process is there and stands still."""
        return self.is_beside() and is_stopped(self.pid)

    def is_dead(self) -> bool:
        """True where this machine can tell that the process is gone; False: alive, or cannot tell."""
        return self._can_be_told() and process_start(self.pid) != self.started

    def _can_be_told(self) -> bool:
        # A host's name proves nothing: pods of two clusters share names, and pods on the host's network share the
        # node's. The same boot and the same process numbers do.
        if not self.started or not self.boot or self.boot != _boot_id():
            return False
        return bool(self.pid_namespace) and self.pid_namespace == _pid_namespace()

    def __str__(self) -> str:
        return f"run {self.run!r}, process {self.pid} on {self.host}"
