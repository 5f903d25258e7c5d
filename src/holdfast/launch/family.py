"""The processes of one start: the script or torchrun, the ranks, and whatever else descends from them.

The process that uses this is a subreaper: processes that lose their parent become its children and stay
in sight. It has no other children than these.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

from holdfast.base.clock import Deadline
from holdfast.launch import procs
from holdfast.launch.leash import leashed

_STRAY_S = 3.0
"""For processes that are no ranks, such as a helper that the script left running."""
_LOOK_S = 0.05


class Family:
    """A started command with all its descendants. ``wait`` sleeps for so many seconds, or until something happens."""

    def __init__(self, wait: Callable[[float], None]) -> None:
        self._wait = wait
        self._child: subprocess.Popen[bytes] | None = None
        self._torchrun = False
        self._told: set[tuple[int, str]] = set()

    @property
    def pid(self) -> int:
        return self._child.pid if self._child is not None else 0

    def start(
        self,
        command: list[str],
        *,
        torchrun: bool,
        environ: dict[str, str],
        cwd: str,
        stdio: tuple[int | None, int | None],
    ) -> None:
        self._torchrun = torchrun
        self._told.clear()
        # A session of its own: Ctrl-C in a terminal goes to all processes of the foreground, and a script that gets
        # it raises instead of saving.
        self._child = subprocess.Popen(
            leashed(os.getpid(), command),
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdio[0],
            stderr=stdio[1],
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """Exit code of the command; negative: killed by that signal. None: it runs."""
        assert self._child is not None
        return self._child.poll()

    def tell_ranks(self) -> None:
        """Send SIGTERM to each rank once, and to nobody else. To be called again: ranks may still be starting."""
        every = procs.table()
        child = every.get(self.pid)
        if child is None:
            return
        ranks = [child]
        if self._torchrun:
            ranks = [one for one in every.values() if one.parent == child.pid and one.session == one.pid]
        if not ranks and not self._told:
            ranks = [child]  # torchrun has not started them yet
        self._tell(ranks)

    def _tell(self, processes: list[procs.Process]) -> None:
        for process in processes:
            if (process.pid, process.started) not in self._told:
                self._told.add((process.pid, process.started))
                procs.send(process.pid, process.started, signal.SIGTERM)

    def clear_up(self, ranks: set[int], out_of_time: Callable[[], bool]) -> None:
        """The command is gone: see to it that all that it started goes too. Ranks may save until ``out_of_time``."""
        left = procs.descendants(os.getpid())
        if any(process.pid in ranks for process in left):
            self._tell([process for process in left if process.pid in ranks])
            while not out_of_time() and any(one.pid in ranks for one in procs.descendants(os.getpid())):
                self._wait(_LOOK_S)
        elif left:
            self._wait_for_end(_LOOK_S * 10)
        self._tell(procs.descendants(os.getpid()))
        self._wait_for_end(_STRAY_S)
        self.kill()

    def _wait_for_end(self, seconds: float) -> None:
        limit = Deadline.after(seconds)
        while procs.descendants(os.getpid()) and not limit.passed():
            self._wait(_LOOK_S)

    def kill(self) -> None:
        """All of them, now."""
        limit = Deadline.after(_STRAY_S)
        while (left := procs.descendants(os.getpid())) and not limit.passed():
            for process in left:
                procs.send(process.pid, process.started, signal.SIGKILL)
            self._wait(_LOOK_S)
