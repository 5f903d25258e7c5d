"""A Ray cluster of this machine for tests: a head without processors, and nodes of one processor each.

Every node is a ``ray start --block`` of its own, as in a pod: it can be drained, and gets SIGTERM as a pod would.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kit.fork_server import kill
from tests.kit.ports import free_port

SCRIPTS = Path(__file__).parent / "scripts"
_RAY = str(Path(sys.executable).with_name("ray"))
_MEMORY = "80000000"


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.05)


class Cluster:
    """Started empty; nodes are added."""

    def __init__(self, **variables: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="hfr-")  # short: it becomes part of the names of sockets
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "RAY_"))},
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "12",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
            "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
            **variables,
        }
        self.address = f"127.0.0.1:{free_port()}"
        self.jobs: list[Job] = []
        self.nodes: list[subprocess.Popen[bytes]] = []
        options = ["--head", f"--port={self.address.split(':')[1]}", "--num-cpus=0", "--include-dashboard=false"]
        self._start(*options, f"--temp-dir={self.folder}")

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        log = os.path.join(self.folder, f"start-{len(self.nodes)}.log")
        command = [_RAY, "start", "--block", f"--object-store-memory={_MEMORY}", "--disable-usage-stats", *options]
        with open(log, "wb") as output:
            node = subprocess.Popen(
                command, env=self.environ, stdout=output, stderr=output, start_new_session=True, cwd=self.folder
            )
        self.nodes.append(node)
        said = lambda: b"Ray runtime started" in Path(log).read_bytes()  # noqa: E731
        wait_for(lambda: said() or node.poll() is not None, 120.0, "a node starts")
        assert said(), Path(log).read_text()
        return node

    def add(self, count: int = 1) -> None:
        """Nodes of one processor each."""
        for _ in range(count):
            self._start(f"--address={self.address}", "--num-cpus=1", "--include-log-monitor=false")

    def at_least(self, count: int) -> None:
        """So many nodes beside the head."""
        alive = sum(node.poll() is None for node in self.nodes[1:])
        self.add(max(0, count - alive))

    def node_of(self, pid: int) -> subprocess.Popen[bytes]:
        """The ``ray start --block`` that a worker descends from."""
        parents = set()
        while pid > 1:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rsplit(")", 1)[1].split()[1])
            parents.add(pid)
        return next(node for node in self.nodes if node.pid in parents)

    def drain(self, node: str, deadline_s: int) -> None:
        """What ``ray drain-node`` does, without the seconds that it takes to start."""
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        deadline_ms = int((time.time() + deadline_s) * 1000)
        accepted, why = GcsClient(self.address).drain_node(node, reason, "test", deadline_ms)
        assert accepted, why

    def run(self, script: str, out: Path, *options: str, **variables: str) -> Job:
        out.mkdir(exist_ok=True)
        number = len([path for path in out.iterdir() if path.name.startswith("driver-")])
        command = [sys.executable, str(SCRIPTS / script), "--address", self.address, "--out", str(out), *options]
        log = out / f"driver-{number}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env={**self.environ, **variables}, stdout=output, stderr=output, start_new_session=True
            )
        job = Job(process, out, log)
        self.jobs.append(job)
        return job

    def close(self) -> None:
        for job in self.jobs:
            job.kill()
        for node in reversed(self.nodes):
            for process in _family(node.pid):
                kill(process)
            node.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class Job:
    """A driver, and what its workers say of themselves in ``steps-<rank>``."""

    process: subprocess.Popen[bytes]
    out: Path
    log: Path

    def said(self) -> str:
        """Its log, without what Ray says once a second where there is no dashboard."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if "State API may be temporarily unavailable" not in line)

    def at(self, rank: int = 0) -> tuple[int, int, str]:
        """Step, process and node of the last word of a worker."""
        try:
            lines = (self.out / f"steps-{rank}").read_text().splitlines()
            step, pid, node = lines[-1].split()
            return int(step), int(pid), node
        except (FileNotFoundError, IndexError, ValueError):
            return 0, 0, ""

    def reach(self, step: int, after: Sequence[int] = (), timeout_s: float = 300.0) -> list[int]:
        """Wait until both workers, others than ``after``, have done a step; their processes."""

        def there() -> bool:
            assert self.process.poll() is None, f"the job ended before step {step}:\n{self.said()}"
            words = [self.at(rank) for rank in (0, 1)]
            return all(done >= step and pid not in after for done, pid, _ in words)

        wait_for(there, timeout_s, f"step {step}")
        return [self.at(rank)[1] for rank in (0, 1)]

    def open(self, *gates: object) -> None:
        """Let the training go on where it waits."""
        for gate in gates:
            (self.out / f"gate-{gate}").touch()

    def wait(self, timeout_s: float = 240.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end:\n{self.said()}") from None

    def result(self) -> dict[int, dict[str, object]]:
        """What the workers wrote at the end of the training."""
        assert self.wait() == 0, self.said()
        return {rank: json.loads((self.out / f"result-{rank}.json").read_text()) for rank in (0, 1)}

    def kill(self) -> None:
        if self.process.poll() is None:
            kill(self.process.pid)
            self.process.wait()


def _family(pid: int) -> list[int]:
    """A process and its descendants, children first."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(path.parent.name))

    def below(member: int) -> list[int]:
        return [*(one for child in children.get(member, ()) for one in below(child)), member]

    return below(pid)
