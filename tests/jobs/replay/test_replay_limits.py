"""What a replay cannot know is said loudly and costs nothing; what it must not do it does not."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.jobs.replay import drill
from tests.jobs.replay.checks import check, go_on, uninterrupted
from tests.kit.checks import assert_whole


@pytest.fixture(scope="module")
def plain():
    """Runs plain PyTorch scripts; see drill.py."""
    server = drill.Server()
    yield server
    server.close()


def stopped(server: drill.Server, spec: drill.Spec) -> int:
    """Run up to its fault; returns the step that is saved."""
    outcome = server.run(spec)
    assert set(outcome.codes) == {143}, outcome.log
    return assert_whole(spec.dir).step


@pytest.mark.core
def test_early_stopping_by_a_value_that_nobody_saw_is_an_error_and_not_a_wrong_resume(plain, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), "plain_score", faults=[{"at": "epoch 3"}])
    step = stopped(plain, spec)
    outcome = plain.run(spec.plain())
    assert outcome.codes == [1]
    assert "the script does not go the way it went before: it reads numpy of a value at line 56" in outcome.log
    assert "become known to a replay with `value = holdfast.track(value)`" in outcome.log
    assert outcome.log.count("JIT checkpoint completed") == 1  # by the first attempt; the second saves nothing
    assert assert_whole(spec.dir).step == step
    assert not assert_whole(spec.dir).manifest.complete


@pytest.mark.core
def test_with_one_line_it_is_exact(plain, tmp_path):
    check(plain, drill.Spec(str(tmp_path / "run"), "plain_score", faults=[{"at": "epoch 3"}], options=["--track"]))


def test_other_arguments_or_other_data_are_an_error_and_the_checkpoint_stays(plain, tmp_path):
    # A job with a name goes on though an argument differs.
    job = {"HOLDFAST_RUN_ID": "job"}
    spec = drill.Spec(str(tmp_path / "run"), "plain_score", 1, [{"at": "epoch 3"}], job, ["--track"])
    step = stopped(plain, spec)
    fewer = plain.run(spec.plain(options=["--track", "--epochs", "2", "--quiet"]))
    assert fewer.codes == [1]
    assert f"it ends after 12 optimizer steps, before step {step}" in fewer.log
    other = plain.run(spec.plain(options=["--track", "--rows", "80"]))
    assert other.codes == [1]
    assert "pass 1 over a loader has 8 batches, and had 6" in other.log
    go_on(plain, spec)


def test_files_of_weights_are_not_written_by_a_replay(plain, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), "plain_tricks", faults=[{"at": "step 20"}])
    stopped(plain, spec)
    written = {path: (path.stat().st_mtime_ns, _digest(path)) for path in Path(f"{spec.dir}.out").glob("tricks-*.pt")}
    assert len(written) == 2
    go_on(plain, spec)
    for path, before in written.items():
        assert (path.stat().st_mtime_ns, _digest(path)) == before
    assert len(list(Path(f"{spec.dir}.out").glob("tricks-*.pt"))) == 4


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_notice_during_the_replay_leaves_the_checkpoint_as_it_is(plain, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), "plain_gan", faults=[{"at": "step 15"}])
    step = stopped(plain, spec)
    assert stopped(plain, spec.plain(faults=[{"at": "step 4"}])) == step
    go_on(plain, spec)


def test_an_error_of_the_script_saves_the_last_step(plain, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), "plain_mnist", faults=[{"at": "epoch 2 batch 8", "action": "RAISE"}])
    outcome = plain.run(spec)
    assert outcome.codes == [1]
    assert "injected at epoch 2 batch 8" in outcome.log
    assert assert_whole(spec.dir).step == 22
    go_on(plain, spec)


def test_an_error_inside_a_step_leaves_the_generators_of_the_script_where_the_step_began(plain, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), "plain_drawn", faults=[{"at": "backward 14", "action": "RAISE"}])
    assert plain.run(spec).codes == [1]
    newest = assert_whole(spec.dir)
    assert (newest.step, newest.manifest.inexact) == (13, ())
    go_on(plain, spec)


def test_a_script_with_checkpoints_of_its_own_does_not_see_those_of_the_first_attempt(plain, tmp_path):
    spec = drill.Spec(
        str(tmp_path / "run"), "plain_strange", faults=[{"at": "epoch 2 step 1"}], options=["own_checkpoints"]
    )
    stopped(plain, spec)
    go_on(plain, spec)


def test_a_script_that_finds_a_checkpoint_of_somebody_else_is_told_to_choose(plain, tmp_path):
    spec = drill.Spec(
        str(tmp_path / "run"), "plain_strange", faults=[{"at": "epoch 0 step 1"}], options=["own_checkpoints"]
    )
    expected = uninterrupted(plain, spec)
    step = stopped(plain, spec)
    elsewhere = drill.Spec(
        str(tmp_path / "elsewhere"), "plain_strange", faults=[{"at": "epoch 1 step 1"}], options=["own_checkpoints"]
    )
    stopped(plain, elsewhere)
    shutil.copy(f"{elsewhere.dir}.out/own.pt", f"{spec.dir}.out/own.pt")
    outcome = plain.run(spec.plain())
    assert outcome.codes == [1], outcome.log
    assert "the script has loaded own.pt before its loop, which it had not when the run began" in outcome.log
    assert assert_whole(spec.dir).step == step
    anew = plain.run(spec.plain(options=["own_checkpoints", "--anew"]))
    assert anew.codes == [0], anew.log
    assert anew.printed == expected


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("secretive", "this loop goes on unprotected, since its state cannot be saved"),
        ("background", "unprotected, since its batches are fetched by another thread than the one that trains"),
        ("elsewhere", "unprotected, since its optimizer steps in another thread than the one that fetches its batches"),
    ],
)
def test_what_cannot_be_followed_runs_on_and_says_so(plain, tmp_path, kind, message):
    spec = drill.Spec(str(tmp_path / "run"), "plain_strange", options=[kind])
    outcome = plain.run(spec)
    assert outcome.codes == [0], outcome.log
    assert outcome.printed == uninterrupted(plain, spec)
    assert message in outcome.log
    assert not list(Path(spec.dir).glob("checkpoint-*"))


def test_a_loop_with_run_is_left_to_it(plain, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), "plain_strange", faults=[{"at": "epoch 1 step 7"}], options=["with_run"])
    stopped(plain, spec)
    outcome = plain.run(spec.plain())
    assert outcome.codes == [0], outcome.log
    assert "replaying" not in outcome.log
    assert outcome.printed[0][-1] == uninterrupted(plain, spec)[0][-1]


def test_a_checkpoint_of_another_kind_is_not_taken(plain, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), "plain_strange", faults=[{"at": "epoch 1 step 7"}], options=["with_run"])
    stopped(plain, spec)
    outcome = plain.run(drill.Spec(spec.dir, "plain_gan"))
    assert outcome.codes == [1]
    assert "was not saved by a loop that holdfast followed by itself" in outcome.log


def test_track_returns_what_it_is_given_where_nothing_is_followed():
    state = {"best": 1.0}
    assert holdfast.track(state) is state
    assert holdfast.track(0.5) == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, False),
        ({"TAIL": "3"}, False),  # it stays behind a step for a while, and has added to a tensor there: waited for
        ({"TAIL": "60", "HOLDFAST_GRACE_PERIOD": "4"}, True),  # as long as there is time
    ],
    ids=["in a step", "behind a step", "behind a step for too long"],
)
def test_a_script_that_python_runs_exits_with_143_and_goes_on(plain, tmp_path, more, told):
    script = drill.SCRIPTS / "plain_mnist.py"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    environment = {**kept, "HOLDFAST_ENABLED": "1", "HOLDFAST_KILL_WAIT": "0", "PYTHONUNBUFFERED": "1"}
    environment["OMP_NUM_THREADS"] = "1"
    # The rest lasts 10 s: the signal is sent before the end, however late.
    slow = {**environment, "PAUSE": "2", **more}
    with subprocess.Popen(
        [sys.executable, script], cwd=tmp_path, stdout=subprocess.PIPE, env=slow, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch 2 batch 4"):
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 143
    saved = assert_whole(tmp_path / "holdfast-runs/plain_mnist")
    assert ["tensors of the script may have changed" in words for words in saved.manifest.inexact] == [True] * told
    again = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        env=environment,
        text=True,
        timeout=240,
        check=True,
    )
    expected = uninterrupted(plain, drill.Spec(str(tmp_path / "run"), "plain_mnist"))
    assert "resuming from" in again.stderr
    if told:
        assert again.stdout.splitlines()[-1] == expected[0][-1]  # the parameters
    else:
        assert again.stdout.splitlines() == expected[0]


TRANSFORMERS = """
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
    def forward(self, x, labels):
        return {"loss": (self.line(x) - labels).square().mean()}

class Look(TrainerCallback):
    def on_step_end(self, *_, **__):
        print("CALLED", torch.nn.Module.__call__.__module__)

rows = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 4
args = TrainingArguments("out", use_cpu=True, report_to=[], save_strategy="no", num_train_epochs=1, disable_tqdm=True)
Trainer(Model(), args, train_dataset=rows, callbacks=[Look()]).train()
"""
LIGHTNING = """
import lightning.pytorch as pl, torch

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
    def training_step(self, batch, index):
        print("CALLED", torch.nn.Module.__call__.__module__)
        return self.line(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

loader = torch.utils.data.DataLoader(torch.ones(4, 1), 2)
pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False).fit(Model(), loader)
"""


@pytest.mark.parametrize("script", [TRANSFORMERS, LIGHTNING], ids=["transformers", "lightning"])
def test_where_a_framework_trains_nothing_is_added_to_the_call_of_a_module(tmp_path, script):
    (tmp_path / "script.py").write_text(script)
    env = {**os.environ, "HOLDFAST_ENABLED": "1", "HOLDFAST_DIR": str(tmp_path / "run")}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    called = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("CALLED")]
    assert set(called) == {"torch.nn.modules.module"}, done.stdout


@pytest.mark.parametrize("switch", ["1", "require"])
def test_a_working_folder_that_cannot_be_written_to(tmp_path, switch):
    (tmp_path / "holdfast-runs").touch()  # no folder can be made here, whoever asks
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    done = subprocess.run(
        [sys.executable, drill.SCRIPTS / "plain_gan.py"],
        cwd=tmp_path,
        capture_output=True,
        env={**kept, "HOLDFAST_ENABLED": switch, "OMP_NUM_THREADS": "1"},
        text=True,
        timeout=240,
        check=False,
    )
    if switch == "require":
        assert done.returncode != 0
        assert "UnprotectedError" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
    assert "goes on unprotected, since nothing can be written to holdfast-runs" in done.stderr


def test_functions_of_files_are_pickled_by_name_as_without_holdfast(tmp_path):
    script = (
        "import torch, functools, io, os, pickle, sys\n"
        "for one in (open, io.open, os.open, os.remove, os.rename, os.mkdir, functools.partial(open, mode='r')):\n"
        "    assert type(pickle.loads(pickle.dumps(one))) is type(one)\n"
        "sys.stdout.write(repr(pickle.dumps([open, os.remove])))\n"
    )

    def run(switch: str) -> str:
        environment = {**os.environ, "HOLDFAST_ENABLED": switch, "HOLDFAST_DIR": str(tmp_path)}
        command = [sys.executable, "-c", script]
        return subprocess.run(command, capture_output=True, env=environment, text=True, timeout=240, check=True).stdout

    names = run("1")
    assert "holdfast" not in names
    assert "remove" in names


@pytest.mark.parametrize("last", ["3", "9"])
def test_weights_that_died_with_a_temporary_folder_are_missed_and_not_made_up(plain, tmp_path, last):
    spec = drill.Spec(str(tmp_path / "run"), "plain_temporary", faults=[{"at": "step 5"}], env={"LAST": last})
    stopped(plain, spec)
    again = plain.run(spec.plain())
    if last == "9":  # saved once more after the resume
        assert again.printed == uninterrupted(plain, spec), again.log
    else:
        assert again.codes == [1]
        assert "best.pt is in a temporary folder, and the weights that the run had saved there" in again.log
