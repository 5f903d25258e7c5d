"""Processes of this machine, from ``/proc``: who descends from whom, how large and how busy they are.

A process number is used again after its process is gone. Here a process is its number together with
the moment of its start, and a signal is sent through a descriptor that was checked against both: it
reaches that process or none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from dataclasses import dataclass

from holdfast.base.process import Owner, process_start

_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Process:
    """What ``/proc`` says of one process."""

    pid: int
    parent: int
    session: int
    started: str
    """As :func:`holdfast.store.base.process_start` tells it."""
    cpu_s: float
    rss: int
    """Bytes of memory."""


def look(pid: int) -> Process | None:
    """One process; None if it is gone, or only waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        if fields[0] in ("Z", "X"):
            return None
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
        return Process(pid, int(fields[1]), int(fields[3]), fields[19], cpu_s, int(fields[21]) * _PAGE)
    except (OSError, IndexError, ValueError):
        return None


def table() -> dict[int, Process]:
    """All processes that can be seen."""
    found = (look(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def descendants(pid: int) -> list[Process]:
    """Children, their children, and so on; parents first."""
    by_parent: dict[int, list[Process]] = {}
    for process in table().values():
        by_parent.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    generation = [pid]
    while generation:
        children = [child for parent in generation for child in by_parent.get(parent, ())]
        found += children
        generation = [child.pid for child in children]
    return found


def command_of(pid: int) -> list[str]:
    """Its command line; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return [part.decode(errors="replace") for part in file.read().split(b"\0")[:-1]]
    except OSError:
        return []


def has_variable(pid: int, name: str) -> bool:
    """Whether it was started with this environment variable; False where that cannot be seen."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(entry.startswith(name.encode() + b"=") for entry in file.read().split(b"\0"))
    except OSError:
        return False


def is_here(owner: Owner) -> bool:
    """Whether the owner's process number means something to this process: same boot, same process numbers."""
    here = Owner(owner.run)
    return bool(owner.boot) and (owner.boot, owner.pid_namespace) == (here.boot, here.pid_namespace)


def is_alive(owner: Owner) -> bool:
    """True if this machine can tell that the process is there."""
    return is_here(owner) and bool(owner.started) and process_start(owner.pid) == owner.started


def where(owner: Owner) -> str:
    """For people: why a process cannot be reached from here."""
    return f"on {owner.host}" if owner.host != socket.gethostname() else "in another container, or before a reboot"


def send(pid: int, started: str, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; False if it is gone."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor holds on to the process that has the number now: looked at after it was opened, the start
        # tells whether that is the one that is meant.
        if process_start(pid) != started:
            return False
        signal.pidfd_send_signal(fd, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)


def become_subreaper() -> bool:
    """Let processes that lose their parent become children of this one, so that none gets out of sight."""
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def reap_adopted(but: int) -> None:
    """Let go of adopted children that have ended; ``but`` is the child that someone else waits for."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == but:
            return
        try:
            os.waitpid(ended.si_pid, os.WNOHANG)
        except ChildProcessError:
            return
