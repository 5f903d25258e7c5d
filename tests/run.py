"""Runs the tests: the part that a developer runs, the rest, or all of them.

``python tests/run.py [--part core|rest|all] [OPTIONS OF PYTEST]``. ``core`` covers every promise and every adapter
once; ``rest`` is everything else, with the tests on a Kubernetes cluster beside the others, since they mostly wait.
Where tests are named, it is pytest alone.

A test that fails is run once more, alone, when all is over. If it passes then, the run passes and closes with a list of
such tests under FLAKY. More failures than :data:`MOST_AGAIN` are no accident: they are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

NO_TESTS = 5
MOST_AGAIN = 8
ROOT = Path(__file__).resolve().parents[1]
HERE = Path(os.path.relpath(__file__)).parent
BESIDE_JOBS = tuple(str(HERE / name) for name in ("contracts", "unit"))
AFTER_CLUSTER = tuple(str(HERE / name) for name in ("compat", "contracts"))
"""The second of two processes runs these, so that both take about as long."""


class Runner:
    """Runs pytest, in one process or two, and remembers what failed."""

    def __init__(self, options: list[str], folder: Path, clone: Path) -> None:
        """``folder``: for scratch files. ``clone``: where pods see this clone."""
        self._options = options
        self._folder = folder
        self.clone = clone
        copied = clone / os.path.relpath(sys.executable, ROOT)
        self.python = str(copied) if copied.exists() else sys.executable
        self._failures = folder / "failures"
        self._failures.touch()
        self.codes: list[int] = []

    def command(self, *words: str, for_pods: bool = False) -> list[str]:
        python = self.python if for_pods else sys.executable
        return [python, "-m", "pytest", *self._options, f"--failures-file={self._failures}", *words]

    def one(self, *words: str) -> None:
        """One process."""
        self.codes.append(subprocess.run(self.command(*words), check=False).returncode)

    def two(self, main: list[str], beside: list[Command]) -> None:
        """One process in the foreground, and others in turn beside it, whose output follows at the end."""
        path = self._folder / f"output-{len(self.codes)}"
        with path.open("wb") as output:
            other = Beside(beside, str(self._folder), output)
            other.start()
            try:
                self.one(*main)
                other.join()
            except BaseException:
                other.interrupt()
                raise
            finally:
                print("\nBeside it:\n", flush=True)
                sys.stdout.buffer.write(path.read_bytes())
                sys.stdout.flush()
        self.codes += other.codes

    def close(self) -> int:
        """Run what has failed once more; returns the exit code of the whole run."""
        bad = [code for code in self.codes if code not in (0, NO_TESTS)]
        failed = list(dict.fromkeys(self._failures.read_text().splitlines()))
        if not bad:
            return 0
        if set(bad) != {1} or not failed or len(failed) > MOST_AGAIN:
            return bad[0]
        print(f"\n{len(failed)} failed; each runs once more, alone:\n", flush=True)
        again = []
        for test in failed:
            done = subprocess.run([self.python, "-m", "pytest", *self._options, test], cwd=self.clone, check=False)
            again.append((test, done.returncode == 0))
        broken = [test for test, passed in again if not passed]
        flaky = [test for test, passed in again if passed]
        for title, tests in (("FAILED TWICE", broken), ("FLAKY: failed in the whole run, passed alone", flaky)):
            if tests:
                print(f"\n{title}", *tests, sep="\n    ", flush=True)
        return 1 if broken else 0


class Command:
    """A command, and the folder that it runs in."""

    def __init__(self, words: list[str], folder: Path | None = None) -> None:
        self.words, self.folder = words, folder


class Beside(threading.Thread):
    """Runs commands one after the other."""

    def __init__(self, commands: list[Command], folder: str, output: IO[bytes]) -> None:
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
                    command.words,
                    cwd=command.folder,
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


@contextlib.contextmanager
def visible_to_pods() -> Iterator[Path]:
    """This clone, or a copy of it where a pod can see it: pods have a /tmp of their own."""
    if Path("/tmp") not in ROOT.parents:
        yield ROOT
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-clone-", dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        copy = Path(folder, ROOT.name)
        # Links instead of copies where that is possible: the environment has gigabytes.
        words = ["cp", "-a", "--link", str(ROOT), str(copy)]
        if subprocess.run(words, capture_output=True, check=False).returncode:
            shutil.rmtree(copy, ignore_errors=True)
            subprocess.run(["cp", "-a", str(ROOT), str(copy)], check=True)
        environment = Path(sys.prefix)
        if environment.is_relative_to(ROOT):
            _relocate(copy / environment.relative_to(ROOT), str(ROOT), str(copy))
        beside = ROOT.parent / "shared"  # programs that tests start on this machine
        if beside.is_dir():
            copy.with_name(beside.name).symlink_to(beside.resolve())
        yield copy


def _relocate(environment: Path, old: str, new: str) -> None:
    """Let an environment's programs and path files name the place where it lies now."""
    texts = [*environment.glob("bin/*"), *environment.glob("lib/python*/site-packages/*.pth")]
    texts += [*environment.glob("lib/python*/site-packages/__editable__*.py"), environment / "pyvenv.cfg"]
    for path in texts:
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if old.encode() in content and b"\0" not in content:
            mode = path.stat().st_mode
            path.unlink()  # a link to the file of the original
            path.write_bytes(content.replace(old.encode(), new.encode()))
            path.chmod(mode)


def core(runner: Runner) -> None:
    ignored = [f"--ignore={name}" for name in BESIDE_JOBS]
    runner.two(["--part=core", *ignored], [Command(runner.command("--part=core", *BESIDE_JOBS))])


def rest(runner: Runner) -> None:
    if not (os.environ.get("HOLDFAST_TEST_KUBECONFIG") or os.environ.get("HOLDFAST_TEST_CLUSTER")):
        runner.one("--part=rest")
        return
    cluster = Command(runner.command("--part=rest", "--cluster=only", for_pods=True), runner.clone)
    ignored = [f"--ignore={name}" for name in AFTER_CLUSTER]
    small = Command(runner.command("--part=rest", "--cluster=without", *AFTER_CLUSTER))
    runner.two(["--part=rest", "--cluster=without", *ignored], [cluster, small])


PARTS = {"core": [core], "rest": [rest], "all": [core, rest]}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--part", choices=PARTS, default="core")
    chosen, options = parser.parse_known_args(arguments)
    if any(not option.startswith("-") and os.path.exists(option.partition("::")[0]) for option in options):
        return subprocess.run([sys.executable, "-m", "pytest", *options], check=False).returncode
    began = time.monotonic()
    place = contextlib.nullcontext(ROOT) if chosen.part == "core" else visible_to_pods()
    # Sockets want short paths.
    with place as clone, tempfile.TemporaryDirectory(prefix="", ignore_cleanup_errors=True) as folder:
        runner = Runner(options, Path(folder), clone)
        for part in PARTS[chosen.part]:
            part(runner)
        code = runner.close()
    print(f"\n{chosen.part}: {time.monotonic() - began:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
