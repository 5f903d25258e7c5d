"""A real job, seen from the test: send it signals, wait for its end, read what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from holdfast.progress import read_journal
from tests.kit.fork_server import ForkServer, kill

if TYPE_CHECKING:
    import torch.distributed

Ended = TypeVar("Ended", bound="Outcome")


@dataclass
class Outcome:
    """How a job ended."""

    codes: list[int]
    """Exit codes by rank; negative: the signal that ended the process."""
    seconds: float
    """From its start to the end of its last process."""
    log: str


class Job(Generic[Ended]):
    """The ranks of a job that a :class:`ForkServer` has forked. Drills say what its :meth:`outcome` is."""

    limit_s = 120.0
    hang_signals: tuple[int, ...] = (signal.SIGKILL,)
    """What a job gets that does not end, a second apart."""

    def __init__(self, server: ForkServer, number: int, *, log: Path, folder: str = "") -> None:
        self.began = time.monotonic()
        self.pids = server.pids(number)
        self._server, self._number, self._log, self._folder = server, number, log, folder

    def outcome(self, codes: list[int], seconds: float) -> Ended:
        """What is known of it once all ranks have ended."""
        raise NotImplementedError

    def send(self, number: int, *ranks: int) -> None:
        """Send a signal to these ranks, or to all; one that has ended does not mind."""
        for rank in ranks or range(len(self.pids)):
            kill(self.pids[rank], number)

    def alive(self) -> bool:
        """Whether some rank has not ended."""
        return self.poll() is None

    def poll(self) -> list[int] | None:
        """The exit codes; None while some rank has not ended."""
        return self._server.codes(self._number)

    def log(self) -> str:
        """What the ranks have written so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def wait_for(self, event: str, timeout_s: float = 60.0, **fields: Any) -> dict[str, Any]:
        """The first such event in the journal."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            for found in journal(self._folder):
                if found["event"] == event and all(found.get(key) == value for key, value in fields.items()):
                    return found
            time.sleep(0.01)
        raise TimeoutError(f"no {event} {fields} in {timeout_s} s\n{self.log()}")

    def wait(self, limit_s: float | None = None) -> Ended:
        """The outcome; a job that takes longer than ``limit_s`` is killed, and that is a failure."""
        limit_s = limit_s or self.limit_s
        codes = self._server.codes(self._number, limit_s)
        if codes is None:
            self.abandon()
            raise AssertionError(f"the job hung for {limit_s} s:\n{self.log()}\n{last_events(self._folder)}")
        return self.outcome(codes, time.monotonic() - self.began)

    def abandon(self) -> None:
        """Kill it unless it has ended, and hear of its end."""
        for number in self.hang_signals:
            if self.alive():
                self.send(number)
                self._server.codes(self._number, 1.0)
        assert self._server.codes(self._number, 20.0) is not None, "killed processes do not end"


def rank_variables(rank: int, world: int, port: int) -> dict[str, str]:
    """What every launcher of PyTorch says to a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def agent_store() -> torch.distributed.TCPStore:
    """A key-value store that lives as long as the test refers to it, as torchrun's agent has one."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def other_variables() -> dict[str, str]:
    """The environment without what configures holdfast."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "CHECKPOINT_"))}


def journal(folder: str) -> list[dict[str, Any]]:
    """The events of a run, oldest first; none where there is no journal yet."""
    try:
        return list(read_journal(Path(folder, ".holdfast", "journal.jsonl")))
    except OSError:
        return []


def last_events(folder: str) -> str:
    """For the message of a test that found a job hanging."""
    events = [event for event in journal(folder) if event["event"] != "skipped"]
    return "\n".join(json.dumps(event) for event in events[-20:])
