"""A Trainer's script as people start it: torchrun, ``holdfast run``, nothing prepared in advance."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.jobs.transformers import drill
from tests.jobs.transformers.checks import assert_same, last_completed_when_noticed, without_holdfast
from tests.kit import ROOT
from tests.kit.checks import assert_whole

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


@pytest.mark.slow
def test_sigterm_to_torchrun_itself(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), world=2, args={"num_train_epochs": 6})
    first = Command(spec.plain(options=["--step-s", "0.5"]), *TORCHRUN)  # does not end before it is interrupted
    first.wait_for_step(3)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 143, first.log()
    newest = assert_whole(spec.dir)
    assert newest.step >= last_completed_when_noticed(spec.dir), first.log()
    assert not newest.manifest.inexact
    assert "after train" not in first.log()
    resumed = Command(spec, *TORCHRUN).outcome()
    assert resumed.codes == [0], resumed.log
    assert_same(resumed, without_holdfast(server, spec))


@pytest.mark.slow
def test_the_script_of_the_page_is_preempted_and_ends_the_same(tmp_path):
    page = (ROOT / "docs/transformers.md").read_text(encoding="utf-8")
    (tmp_path / "train_gpt2.py").write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "CHECKPOINT_"))}
    environ = {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def start(*words: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**environ, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def parameters(process: subprocess.Popen[str]) -> str:
        output, _ = process.communicate(timeout=200)
        (line,) = [line for line in output.splitlines() if line.startswith("parameters:")]
        return line

    run = start(*HOLDFAST, "--kill-wait", "0", "train_gpt2.py")
    preempted = start("-m", "holdfast.cli", "preempt", "counting", "--delay", "0.5", "--json")
    told, _ = preempted.communicate(timeout=200)
    (outcome,) = json.loads(told)["preemptions"]
    assert (outcome["saved"], outcome["steps_lost"], outcome["reason"]) == (True, 0, "jit"), told
    interrupted = parameters(run)
    assert run.returncode == 0
    shutil.rmtree(tmp_path / "counting")
    assert interrupted == parameters(start("train_gpt2.py", HOLDFAST_ENABLED="0"))
