"""All tests: those on a Kubernetes cluster beside all others, since they mostly wait.

``python tests/run.py [OPTIONS OF PYTEST]``. Where tests are named, or no cluster can be had, it is pytest alone. The
cluster is the one that ``HOLDFAST_TEST_KUBECONFIG`` names, or one made by the script ``HOLDFAST_TEST_CLUSTER``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO

NO_TESTS = 5
HERE = Path(os.path.relpath(__file__)).parent
AFTERWARDS = [
    str(HERE / name)
    for name in (
        "jobs/torch/test_data_position.py",
        *("unit/adapters", "unit/agree", "unit/engine", "unit/progress", "unit/recorder", "unit/store", "unit/testing"),
        "unit/torch",
    )
]
"""After those on a cluster, so that both sides take about as long."""


class Beside(threading.Thread):
    """Runs commands one after the other."""

    def __init__(self, commands: list[list[str]], folder: str, output: IO[bytes]) -> None:
        super().__init__()
        self._commands, self._folder, self._output = commands, folder, output
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._interrupted = False
        self.codes: list[int] = []

    def run(self) -> None:
        for command in self._commands:
            with self._lock:
                if self._interrupted:
                    return
                self._process = subprocess.Popen(
                    command,
                    # Temporary files of its own: launchers of others are none of its business.
                    env={**os.environ, "TMPDIR": self._folder, "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                )
            self.codes.append(self._process.wait())

    def interrupt(self) -> None:
        with self._lock:
            self._interrupted = True
            if self._process is not None:
                self._process.send_signal(signal.SIGINT)  # it brings its cluster down before it leaves
        self.join(120)


def main(options: list[str]) -> int:
    pytest = [sys.executable, "-m", "pytest", *options]
    has_cluster = os.environ.get("HOLDFAST_TEST_KUBECONFIG") or os.environ.get("HOLDFAST_TEST_CLUSTER")
    named = any(not option.startswith("-") and os.path.exists(option.partition("::")[0]) for option in options)
    if named or not has_cluster:
        return subprocess.run(pytest, check=False).returncode
    # Sockets want short paths.
    with tempfile.TemporaryDirectory(prefix="", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "output")
        with path.open("wb") as output:
            beside = Beside([[*pytest, "--cluster=only"], [*pytest, "--cluster=without", *AFTERWARDS]], folder, output)
            beside.start()
            try:
                ignored = [f"--ignore={name}" for name in AFTERWARDS]
                code = subprocess.run([*pytest, "--cluster=without", *ignored], check=False).returncode
                beside.join()
            except BaseException:
                beside.interrupt()
                raise
            finally:
                print(f"\nOn a cluster, and then {', '.join(AFTERWARDS)}:\n", flush=True)
                sys.stdout.buffer.write(path.read_bytes())
                sys.stdout.flush()
    return next((code for code in (code, *beside.codes) if code not in (0, NO_TESTS)), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
