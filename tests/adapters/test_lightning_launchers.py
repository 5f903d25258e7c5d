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

sys.path.insert(0, str(Path(__file__).parent))

from lightning_drill import SCRIPT

from checks import assert_whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BIN = Path(sys.executable).parent
ALONE = [sys.executable]
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
HOLDFAST = [str(BIN / "holdfast"), "run", "--quiet"]
TWO = ["--devices", "2", "--step-s", "0.05"]
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
    run = Started(ALONE, tmp_path / "run", TWO, **on)
    run.await_step(4)
    ranks = run.ranks()
    ranks[1].send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.log()
    assert psutil.wait_procs([ranks[1]], 60)[1] == []
    folder = str(tmp_path / "run/root/holdfast")
    stopped_at = assert_whole(folder).step
    assert stopped_at >= 4

    run = Started(ALONE, tmp_path / "run", TWO, **on)
    run.await_step(stopped_at + 4)
    run.ranks()[1].send_signal(signal.SIGKILL)
    assert run.wait() != 0
    newest = assert_whole(folder)
    assert newest.step >= stopped_at + 4
    assert newest.manifest.reason == "rescue"

    run = Started(ALONE, tmp_path / "run", TWO, **on)
    assert run.wait() == 0, run.log()
    assert run.digests() == undisturbed


def test_torchrun(tmp_path, undisturbed) -> None:
    run = Started(TORCHRUN, tmp_path / "run", TWO, HOLDFAST_ENABLED="1")
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


def test_holdfast_run_switches_it_on_and_starts_the_script_again(tmp_path) -> None:
    args = ["--step-s", "0.05"]
    plain = Started(ALONE, tmp_path / "plain", args)
    assert plain.wait() == 0, plain.log()
    run = Started(HOLDFAST, tmp_path / "run", args)
    run.await_step(7)
    run.ranks()[0].send_signal(signal.SIGTERM)
    assert run.wait() == 0, run.log()
    assert "resuming from" in run.log()
    assert run.digests() == plain.digests()
