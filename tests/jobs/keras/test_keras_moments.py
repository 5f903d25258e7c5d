"""A notice at any moment of a ``fit``: nothing is lost, nothing waits that need not, the resumed run is the same."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.jobs import journal

pytest.importorskip("keras")
pytest.importorskip("tensorflow")

from tests.jobs.keras.checks import Case, moments
from tests.jobs.keras.drill import SCRIPTS, Server
from tests.kit.checks import assert_whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHAPE = ["--validate", "--callbacks", "--epochs", "3"]
"""Twelve steps an epoch, and two batches of validation."""


@pytest.fixture(scope="module")
def keras() -> Iterator[Server]:
    server = Server("tensorflow", "keras", "tf_keras")
    yield server
    server.close()


def newest(folder: Path) -> int:
    return assert_whole(str(folder / "run")).step


@pytest.mark.parametrize(
    ("moment", "step"),
    [
        ("batch_begin:1", 1),
        ("batch_end:12", 12),
        ("test_batch:1", 12),
        ("epoch_end:1", 12),
        ("batch_begin:13", 13),
        ("batch_end:36", 36),
        ("test_batch:6", 36),
        ("train_end:1", 36),
    ],
)
@pytest.mark.parametrize("module", ["keras", "tf_keras"])
@pytest.mark.share(5)
def test_a_notice_at(keras: Server, tmp_path: Path, module: str, moment: str, step: int) -> None:
    case = Case(keras, tmp_path, "keras_train.py", *SHAPE, KERAS_KIND=module)
    first = case.run(*moments(moment))
    assert first.code == 143, first.log
    assert newest(tmp_path) >= step
    if moment.startswith("test_batch"):
        assert newest(tmp_path) == step  # inside the validation, not after it
    case.check()


@pytest.mark.parametrize("module", ["tf_keras", "keras"])
@pytest.mark.share(2)
def test_a_notice_between_two_epochs_of_endless_data(keras: Server, tmp_path: Path, module: str) -> None:
    endless = ["--data", "repeat", "--steps-per-epoch", "10"]
    case = Case(keras, tmp_path, "keras_train.py", *endless, KERAS_KIND=module)
    case.check(moments("epoch_end:1"), moments("epoch_end:1"))


def test_a_notice_before_the_first_step_saves_nothing(keras: Server, tmp_path: Path) -> None:
    case = Case(keras, tmp_path, "keras_train.py", *SHAPE)
    assert case.run(*moments("train_begin:1")).code == 143
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    case.check()


def test_a_second_notice_while_it_saves_changes_nothing(keras: Server, tmp_path: Path) -> None:
    Case(keras, tmp_path, "keras_train.py", *SHAPE).check(moments("batch_end:5", "batch_end:6"))


@pytest.mark.parametrize("every", ["1 step", "1 epoch", "0.1s"])
@pytest.mark.share(3)
def test_periodic_saves_and_a_notice_between_them(keras: Server, tmp_path: Path, every: str) -> None:
    case = Case(keras, tmp_path, "keras_train.py", *SHAPE, HOLDFAST_SAVE_EVERY=every)
    case.check(moments("batch_end:17"))
    reasons = [event["reason"] for event in journal(str(tmp_path / "run")) if event["event"] == "commit"]
    assert "periodic" in reasons


def test_what_is_written_loads_with_keras_alone(keras: Server, tmp_path: Path) -> None:
    case = Case(keras, tmp_path, "keras_train.py")
    case.run(*moments("batch_end:17"))
    folder = tmp_path / "run" / f"checkpoint-{newest(tmp_path)}"
    code = f"""
import keras, numpy, safetensors.numpy
layers = [keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(2)])
model.compile("adam", "mse")
model.load_weights({str(folder / "model.weights.h5")!r})
assert abs(numpy.array(model.layers[0].get_weights()[0])).sum() > 0
assert safetensors.numpy.load_file({str(folder / "rank-00000.safetensors")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "HOLDFAST_ENABLED": "0"}, timeout=120)


def test_a_damaged_checkpoint_is_passed_over(keras: Server, tmp_path: Path) -> None:
    case = Case(keras, tmp_path, "keras_train.py", HOLDFAST_SAVE_EVERY="5 steps")
    case.run(*moments("batch_end:17"))
    step = newest(tmp_path)
    file = tmp_path / "run" / f"checkpoint-{step}" / "model.weights.h5"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    last = case.check()
    assert f"checkpoint-{step} in" in last.log
    assert f"resuming from {tmp_path}/run/checkpoint-15" in last.log


def test_on_object_storage(keras: Server, tmp_path: Path, s3_uri: str, s3_variables: dict[str, str]) -> None:
    case = Case(keras, tmp_path, "keras_phases.py", HOLDFAST_DIR=s3_uri, **s3_variables)
    last = case.check(["--interrupt", "batch:5"], ["--interrupt", "batch:16"])
    assert f"resuming from {s3_uri}/checkpoint-" in last.log


def test_several_trainings_in_one_script(keras: Server, tmp_path: Path) -> None:
    """Two of one model, with another optimizer, and one of another model that learns from the first."""
    for number, attempts in enumerate(
        [
            (["batch:16"], ["batch:9"], ["batch:3"]),  # the last step of the first, in the second, in the third
            (["between"], ["batch:16"], []),  # after the first, at the end of the second
            (["batch:5", "batch:6"], ["batch:38"]),
        ]
    ):
        case = Case(keras, tmp_path / str(number), "keras_phases.py")
        case.check(*[["--interrupt", moment] for attempt in attempts for moment in attempt][: len(attempts)])


def test_a_finished_run_is_not_trained_again_but_goes_on_with_more_epochs(keras: Server, tmp_path: Path) -> None:
    case = Case(keras, tmp_path, "keras_phases.py")
    case.check()
    again = case.check()
    assert "fit 3 was complete at step 48 and is not trained again; HOLDFAST_RESUME=never" in again.log
    longer = Case(keras, tmp_path, "keras_phases.py", "--more-epochs", "1")
    longer.check()
    assert newest(tmp_path) == 56
    anew = case.run(HOLDFAST_RESUME="never")
    assert anew.result == case.uninterrupted().result


@pytest.mark.core
@pytest.mark.parametrize(("data", "fail"), [("generator", "data:17"), ("dataset", "batch_end:17")])
def test_a_crash_loses_at_most_the_step_in_flight(keras: Server, tmp_path: Path, data: str, fail: str) -> None:
    steps = ["--steps-per-epoch", "10"] if data == "generator" else []
    case = Case(keras, tmp_path, "keras_train.py", "--data", data, *steps)
    crashed = case.run("--fail", fail)
    assert crashed.code == 1
    assert "as told" in crashed.log
    assert newest(tmp_path) >= 15  # the pipeline had read ahead when its data came to an end
    last = case.run()
    assert last.code == 0, last.log
    assert last.result is not None
    assert last.result["digest"] == case.uninterrupted().result["digest"]


@pytest.mark.parametrize("module", ["keras", "tf_keras"])
@pytest.mark.parametrize("kind", ["average", "rate"])
@pytest.mark.share(3)
def test_callbacks_that_change_the_weights_while_something_is_evaluated(
    keras: Server, tmp_path: Path, module: str, kind: str
) -> None:
    """A stop in a validation saves what the last batch left. Callbacks are waited for, and write each line once."""
    Case(keras, tmp_path, "keras_evaluated.py", kind, KERAS_KIND=module).check(moments("test:6"))


@pytest.mark.core
def test_one_callback_is_enough(keras: Server, tmp_path: Path) -> None:
    told = {"TEST_JOURNAL": str(tmp_path / "kept/.holdfast/journal.jsonl")}
    case = Case(keras, tmp_path, "keras_callback.py", HOLDFAST_DIR="", HOLDFAST_ENABLED="", **told)
    case.check(["--interrupt", "5"])
    assert (tmp_path / "kept").is_dir()
    assert not (tmp_path / "holdfast-runs").exists()


def test_the_switch_wins_over_the_callback(keras: Server, tmp_path: Path) -> None:
    case = Case(keras, tmp_path, "keras_callback.py", HOLDFAST_DIR="", HOLDFAST_ENABLED="0")
    assert case.run("--interrupt", "5").code == -signal.SIGTERM
    assert not (tmp_path / "kept").exists()


LOOP = "holdfast does not protect this loop: of Keras it protects fit"


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (["tape"], LOOP),
        (["fit", "--backend", "jax"], "holdfast does not protect fit of Keras on jax: set KERAS_BACKEND to tensorflow"),
        (["train_on_batch"], LOOP),
    ],
    ids=["tape", "jax", "train_on_batch"],
)
@pytest.mark.parametrize("module", ["keras", "tf_keras"])
@pytest.mark.share(2)
def test_what_is_not_protected_is_said_once(
    keras: Server, tmp_path: Path, module: str, kind: list[str], said: str
) -> None:
    if "--backend" in kind and module == "tf_keras":
        pytest.skip("tf-keras has one backend")
    case = Case(keras, tmp_path, "keras_loops.py", *kind, KERAS_KIND=module)
    trained = case.run()
    assert trained.code == 0, trained.log
    assert trained.log.count(said) == 1
    assert trained.log.count("\n") == 1, trained.log
    assert trained.result == case.uninterrupted().result
    refused = case.run(HOLDFAST_ENABLED="require")
    assert refused.code == 1, refused.log
    assert f"{said}" in refused.log
    assert "HOLDFAST_ENABLED=require refuses to train unprotected" in refused.log


def test_a_step_of_its_own_inside_fit_is_protected(keras: Server, tmp_path: Path) -> None:
    trained = Case(keras, tmp_path, "keras_own_step.py", "gan").run(HOLDFAST_ENABLED="require")
    assert trained.code == 0, trained.log
    assert "holdfast" not in trained.log


def test_progress_is_told_across_attempts(keras: Server, tmp_path: Path) -> None:
    case = Case(keras, tmp_path, "keras_train.py", *SHAPE)
    case.run(*moments("batch_end:17"))
    step = newest(tmp_path)
    told = json.loads((tmp_path / "run/training_progress.json").read_text())
    assert (told["step"], told["totalSteps"], told["epoch"], told["totalEpochs"]) == (step, 36, 2, 3)
    assert {"loss", "accuracy", "validationLoss", "validationAccuracy", "learningRate"} <= told.keys()
    case.check()
    told = json.loads((tmp_path / "run/training_progress.json").read_text())
    assert told["percentComplete"] == "100.0"
    assert told["resumedFrom"] == f"checkpoint-{step}"


def test_a_plain_process_that_has_no_torch(tmp_path: Path) -> None:
    """Switched on by the environment alone; importing torch would fail."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not installed here')\n")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    variables |= {"HOLDFAST_ENABLED": "1", "HOLDFAST_KILL_WAIT": "0", "PYTHONPATH": str(tmp_path)}
    variables |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    variables["TEST_JOURNAL"] = str(tmp_path / "holdfast-runs/keras_train/.holdfast/journal.jsonl")
    command = [sys.executable, str(SCRIPTS / "keras_train.py"), "--out", str(tmp_path / "out.json")]
    options = {"cwd": tmp_path, "env": variables, "capture_output": True, "timeout": 240}
    first = subprocess.run([*command, "--interrupt", "batch_end:17"], check=False, **options)
    assert first.returncode == 143, first.stderr
    assert b"SIGTERM received, initiating JIT checkpoint in 0.0s" in first.stderr
    assert re.search(rb"JIT checkpoint completed in \d+\.\ds", first.stderr)
    second = subprocess.run(command, check=False, **options)
    assert second.returncode == 0, second.stderr
    assert b"resuming from" in second.stderr
    assert (tmp_path / "holdfast-runs/keras_train").is_dir()
