"""A Trainer's script as people start it: torchrun, ``holdfast run``, nothing prepared in advance."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers_drill as drill
from transformers_checks import assert_same, last_completed_when_noticed, without_holdfast

from checks import assert_whole

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
HOLDFAST = ["-m", "holdfast.cli", "run", "--no-progress"]


@pytest.fixture
def server() -> drill.Server:
    return drill.shared()


class Command:
    """A command line, with its output in a file; killed at the end whatever happens."""

    def __init__(self, spec: drill.Spec, *words: str) -> None:
        self.spec = spec
        self.out = Path(f"{spec.dir}.out")
        self.out.mkdir(exist_ok=True)
        ours = ("HOLDFAST_", "CHECKPOINT_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        env |= {"HOLDFAST_ENABLED": "1", "HOLDFAST_KILL_WAIT": "0", "OMP_NUM_THREADS": "1", **spec.env}
        target = ["--out", spec.dir, "--result", str(self.out / "result.json")]
        command = [sys.executable, *words, spec.script, *target, *spec.options, "--args", json.dumps(spec.args)]
        with (self.out / "log").open("a") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def log(self) -> str:
        return (self.out / "log").read_text(errors="replace")

    def wait_for_step(self, step: int) -> None:
        from holdfast.progress import read_progress

        until = time.monotonic() + 120
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log()
            try:
                if read_progress(f"{self.spec.dir}/training_progress.json")["step"] >= step:
                    return
            except (OSError, ValueError, KeyError):
                pass
            time.sleep(0.02)
        raise TimeoutError(self.log())

    def wait(self) -> int:
        try:
            return self.process.wait(150)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def outcome(self) -> drill.Outcome:
        code = self.wait()
        path = self.out / "result.json"
        return drill.Outcome([code], 0.0, self.log(), json.loads(path.read_text()) if path.exists() else None)


def long(tmp_path: Path, **more) -> drill.Spec:
    """A training that does not end before it is interrupted."""
    return drill.Spec(str(tmp_path / "run"), options=["--step-s", "0.05"], args={"num_train_epochs": 6}, **more)


@pytest.mark.slow
def test_sigterm_to_torchrun_itself(server, tmp_path):
    spec = long(tmp_path, world=2)
    first = Command(spec, *TORCHRUN)
    first.wait_for_step(3)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() != 0
    newest = assert_whole(spec.dir)
    assert newest.step >= last_completed_when_noticed(spec.dir), first.log()
    assert not newest.manifest.inexact
    assert "after train" not in first.log()
    resumed = Command(spec, *TORCHRUN).outcome()
    assert resumed.codes == [0], resumed.log
    assert_same(resumed, without_holdfast(server, spec))


@pytest.mark.slow
def test_holdfast_run_starts_the_script_again_where_it_was(server, tmp_path):
    spec = long(tmp_path, env={"HOLDFAST_ENABLED": ""})
    command = Command(spec, *HOLDFAST)
    command.wait_for_step(3)
    notice = [sys.executable, "-m", "holdfast.cli", "preempt", spec.dir]
    assert subprocess.run(notice, check=False, capture_output=True, timeout=120).returncode == 0
    done = command.outcome()
    assert done.codes == [0], done.log
    assert "JIT checkpoint completed" in done.log
    assert_same(done, without_holdfast(server, spec))
