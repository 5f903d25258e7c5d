"""A Ray cluster of this machine: a head without processors, and nodes that train, as on Kubernetes.

Every node is a ``ray start --block`` of its own, which is what runs in a pod too: it can be stopped as a pod would be.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

START_S = 120.0
STORE_BYTES = 400_000_000
"""Of shared memory for each node: the images are there once per node."""
_DRAIN_S = "20"


class ClusterError(Exception):
    """A node does not start. The message holds what it said."""


def _free_port() -> int:
    """Between those that Ray gives to its workers and those that the kernel gives to connections: one of those could be
    taken in the seconds that a node needs to come up."""
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Cluster:
    """``nodes`` beside the head, with ``cpus`` processors each. Use it in a ``with`` statement."""

    def __init__(self, nodes: int, cpus: int, environ: Mapping[str, str]) -> None:
        self.folder = tempfile.mkdtemp(prefix="ray-")  # short: it becomes part of the names of sockets
        self.address = f"127.0.0.1:{_free_port()}"
        self.environ = {
            **environ,
            "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": _DRAIN_S,
            "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
        }
        self._cpus = cpus
        self._wanted = nodes
        self._nodes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            port = self.address.partition(":")[2]
            self._start(
                "--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={self.folder}"
            )
            for _ in range(self._wanted):
                self.add()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self) -> None:
        self._start(f"--address={self.address}", f"--num-cpus={self._cpus}", "--include-log-monitor=false")

    def stop_node_of(self, pid: int) -> None:
        """SIGTERM to the node that a process runs on, as when a pod is deleted."""
        parents = set()
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            parents.add(pid)
        next(node for node in self._nodes if node.pid in parents).send_signal(signal.SIGTERM)

    def _start(self, *options: str) -> None:
        log = Path(self.folder, f"start-{len(self._nodes)}.log")
        ray = str(Path(sys.executable).with_name("ray"))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (self._wanted + 1)  # shared by all nodes
        sizes = [f"--memory={memory - STORE_BYTES}", f"--object-store-memory={STORE_BYTES}"]
        command = [ray, "start", "--block", *sizes, "--disable-usage-stats", *options]
        environ = {name: value for name, value in self.environ.items() if name != "RAY_ADDRESS"}
        with log.open("wb") as output:
            node = subprocess.Popen(
                command, env=environ, stdout=output, stderr=output, start_new_session=True, cwd=self.folder
            )
        self._nodes.append(node)
        until = time.monotonic() + START_S
        while b"Ray runtime started" not in log.read_bytes():
            if node.poll() is not None or time.monotonic() > until:
                said = log.read_text(errors="replace")[-2000:]
                raise ClusterError(f"a node of the Ray cluster does not start within {START_S:.0f} s. It said:\n{said}")
            time.sleep(0.05)

    def close(self) -> None:
        """Ends all that the nodes have started, too. Can be called twice."""
        for node in reversed(self._nodes):
            for pid in _family(node.pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            node.wait()
        self._nodes = []
        shutil.rmtree(self.folder, ignore_errors=True)


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
