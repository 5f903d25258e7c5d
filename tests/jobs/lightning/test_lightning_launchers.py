"""The same script as people start it: by Lightning's own launcher, by torchrun, by ``holdfast run``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.docs.pages import blocks_of
from tests.jobs.lightning.drill import SCRIPT
from tests.kit import ROOT
from tests.kit.checks import assert_whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BIN = Path(sys.executable).parent
ALONE = [sys.executable]
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
TWO = ["--devices", "2"]
SLOW = [*TWO, "--step-s", "0.5"]
"""For what is interrupted: what is left of its 18 steps outlasts a test that wakes up late."""
LIMIT_S = 240.0


class Started:
    """A run with its output in a file."""

    def __init__(self, launcher: list[str], out: Path, args: list[str], **env: str) -> None:
        ours = ("HOLDFAST_", "CHECKPOINT_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        environ |= {"HOLDFAST_KILL_WAIT": "0", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", **env}
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        for path in (*out.glob("step-*"), *out.glob("result-*")):
            path.unlink()
        with open(out / "log", "a") as log:
            command = [*launcher, str(SCRIPT), str(out), *args]
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)

    def log(self) -> str:
        return (self.out / "log").read_text()

    def await_step(self, step: int) -> None:
        until = time.monotonic() + LIMIT_S
        path = self.out / "step-0"
        while time.monotonic() < until and self.process.poll() is None:
            text = path.read_text() if path.exists() else ""
            if text and int(text) >= step:
                return
            time.sleep(0.01)
        pytest.fail(f"step {step} was not reached:\n{self.log()}")

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that train."""
        root = psutil.Process(self.process.pid)
        found = {}
        for process in (root, *root.children(recursive=True)):
            line = process.cmdline()
            if str(SCRIPT) in line and "--standalone" not in line and "holdfast" not in Path(line[1]).name:
                found.setdefault(int(process.environ().get("LOCAL_RANK", "0")), process)
        return found

    def wait(self) -> int:
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            pytest.fail(f"it hangs:\n{self.log()}")

    def digests(self) -> list:
        return [json.loads(path.read_text())["digests"] for path in sorted(self.out.glob("result-*.json"))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list:
    """What two ranks end with if nobody stops them, and without holdfast."""
    run = Started(ALONE, tmp_path_factory.mktemp("undisturbed"), TWO)
    assert run.wait() == 0, run.log()
    return run.digests()


def test_lightnings_own_launcher(tmp_path, undisturbed) -> None:
    """Its second rank is told to stop, then killed: the first must not be killed with it."""
    on = {"HOLDFAST_ENABLED": "1"}
    run = Started(ALONE, tmp_path / "run", SLOW, **on)
    run.await_step(4)
    ranks = run.ranks()
    ranks[1].send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.log()
    assert psutil.wait_procs([ranks[1]], 60)[1] == []
    folder = str(tmp_path / "run/root/holdfast")
    stopped_at = assert_whole(folder).step
    assert stopped_at >= 4

    run = Started(ALONE, tmp_path / "run", SLOW, **on)
    run.await_step(stopped_at + 4)
    run.ranks()[1].send_signal(signal.SIGKILL)
    assert run.wait() != 0
    newest = assert_whole(folder)
    assert newest.step >= stopped_at + 4
    assert newest.manifest.reason == "rescue"

    run = Started(ALONE, tmp_path / "run", TWO, **on)
    assert run.wait() == 0, run.log()
    assert run.digests() == undisturbed


@pytest.mark.share(0)
def test_torchrun(tmp_path, undisturbed) -> None:
    run = Started(TORCHRUN, tmp_path / "run", SLOW, HOLDFAST_ENABLED="1")
    run.await_step(7)
    ranks = run.ranks()
    ranks[1].send_signal(signal.SIGTERM)
    assert run.wait() != 0
    assert psutil.wait_procs(ranks.values(), 60)[1] == []
    assert run.log().count("JIT checkpoint completed") == 2
    assert assert_whole(str(tmp_path / "run/root/holdfast")).step >= 7
    run = Started(TORCHRUN, tmp_path / "run", TWO, HOLDFAST_ENABLED="1")
    assert run.wait() == 0, run.log()
    assert run.digests() == undisturbed


class Program:
    """A command in a folder, with its output in a file there."""

    def __init__(self, folder: Path, *command: str) -> None:
        folder.mkdir(exist_ok=True)
        self.log = folder / "log"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "CHECKPOINT_"))}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**kept, "HOLDFAST_KILL_WAIT": "0"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ends_well(self) -> str:
        """What it said."""
        try:
            assert self.process.wait(LIMIT_S) == 0, self.log.read_text()
            return self.log.read_text()
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.mark.share(0)
def test_the_script_of_the_page_under_holdfast_run(tmp_path) -> None:
    page = ROOT / "docs/lightning.md"
    script = tmp_path / "train_lightning.py"
    script.write_text(next(block.code for block in blocks_of(page) if block.language == "python"))
    plain = Program(tmp_path / "undisturbed", sys.executable, str(script))
    launcher = Program(tmp_path / "run", str(BIN / "holdfast"), "run", "--no-progress", str(script))
    journal = tmp_path / "run/holdfast-runs/train_lightning/.holdfast/journal.jsonl"
    until = time.monotonic() + LIMIT_S
    while not (journal.exists() and '"training"' in journal.read_text()):
        assert launcher.process.poll() is None, launcher.log.read_text()
        assert time.monotonic() < until
        time.sleep(0.05)
    command, place = [str(BIN / "holdfast"), "preempt"], tmp_path / "run"
    preempted = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert preempted.returncode == 0, preempted.stdout + preempted.stderr
    told = launcher.ends_well()
    (line,) = [line for line in told.splitlines() if line.startswith("sum of all parameters")]
    assert line in plain.ends_well()
    assert "JIT checkpoint completed" in told
    assert "resuming from" in told
