"""Bad input is refused before anything is trained, with the option, its value and what is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("matplotlib")

import compare
import training
from tests.jobs.parallel.example import run

SMALL = ("--data", "generated", "--images", "64", "--test-images", "16", "--batch-size", "8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--epochs", "0"), "argument --epochs: '0' is not accepted; it must be a whole number of at least 1"),
        (("--batch-size", "many"), "argument --batch-size: 'many' is not accepted"),
        (
            ("--batch-size", "57"),
            "--batch-size=57 is not accepted with 56 images for training; it must be at most that",
        ),
        (
            ("--learning-rate", "2"),
            "argument --learning-rate: '2' is not accepted; it must be a number above 0 and up to 1",
        ),
        (("--data", "imagenet"), "--data='imagenet' is not accepted; it must be one of auto, cifar10, fashion-mnist"),
        (
            ("--seed", "4294967296"),
            "argument --seed: '4294967296' is not accepted; it must be a whole number from 0 to 4294967295",
        ),
        (("--images", "3"), "--images=3 is not accepted; it must be at least 16"),
        (("--test-images", "3"), "--test-images=3 is not accepted; it must be at least 16"),
        (("--data-sha256", "00"), "--data-sha256='00' goes with --data cifar10, not with generated"),
        (("--data", "auto", "--data-path", "a", "--data-url", "b"), "exclude each other; give one"),
        (("--data", "auto", "--data-path", "/nothing/here"), "/nothing/here cannot be read: No such file"),
        (
            ("--data", "auto", "--data-url", "ftp://x"),
            "--data-url='ftp://x' is not accepted; it must begin with https://",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_the_trainings(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    done = run("baseline_training.py", *SMALL, "--save-path", str(tmp_path), *options, KERAS_HOME=str(tmp_path))
    assert (done.returncode, said in " ".join(done.stdout.split())) == (2, True), done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--workers", "2,x"), "argument --workers: 'x' is not accepted; it must be a whole number of at least 1"),
        (("--workers", "3"), "--batch-size=8 is not accepted with --num-workers=3; it must be a multiple of it"),
        (
            ("--epochs", "2", "--preempt-at", "14"),
            "--preempt-at=14 is not accepted; it must be below 14, the last step",
        ),
        (
            ("--preempt-how", "kill,hope"),
            "argument --preempt-how: 'hope' is not accepted; it must be one of term, kill, node, or several with",
        ),
        (
            ("--epochs", "2", "--preempt-at", "7", "--preempt-how", "kill,term"),
            "--preempt-at=7, 2 times, is not accepted; it must be below 14, the last step",
        ),
        (
            ("--workers", "1", "--preempt-at", "3", "--preempt-how", "kill"),
            "--preempt-how=kill is not accepted with --workers=1: who is killed cannot save, and nobody else has",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_the_driver(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    done = run("benchmark.py", *SMALL, "--save-path", str(tmp_path / "results"), *options)
    assert (done.returncode, said in " ".join(done.stdout.split())) == (2, True), done.stdout
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("place", "why"),
    [("a-file", "it is a file"), ("a-file/results", "Not a directory"), ("/proc/self", "No such file or directory")],
)
@pytest.mark.parametrize("script", ["baseline_training.py", "benchmark.py"])
def test_a_folder_that_cannot_be_written_is_refused_before_it_is_trained_for(
    tmp_path: Path, script: str, place: str, why: str
) -> None:
    (tmp_path / "a-file").write_text("mine")
    folder = str(tmp_path / place)
    done = run(script, *SMALL, "--save-path", folder)
    said = f"--save-path={folder!r} is not accepted: {why}; it must be a folder that can be written to, or the name of"
    assert (done.returncode, said in " ".join(done.stdout.split())) == (2, True), done.stdout
    assert (tmp_path / "a-file").read_text() == "mine"


def test_a_folder_that_is_refused_has_no_traces_and_others_are_made(tmp_path: Path) -> None:
    training.prepare(str(tmp_path / "a/b"))
    training.prepare(str(tmp_path / "a/b"))
    assert list((tmp_path / "a/b").iterdir()) == []


@pytest.mark.slow
def test_gpus_that_are_not_there_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("tf_keras")
    done = run("baseline_training.py", *SMALL, "--gpus", "1", "--save-path", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    said = "--gpus=1 is not accepted: TensorFlow finds 0 GPUs for this process; take --gpus 0, or"
    assert (done.returncode, said in " ".join(done.stdout.split())) == (2, True), done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("name", ["runs", "logs", "interrupted"])
def test_a_folder_of_somebody_else_is_not_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "events.out.tfevents").write_text("months of work")
    done = run("benchmark.py", *SMALL, "--save-path", str(tmp_path))
    said = f"--save-path='{tmp_path}' is not accepted: a benchmark removes {name} there, and what is in it now is not"
    assert (done.returncode, said in " ".join(done.stdout.split())) == (2, True), done.stdout
    assert [path.name for path in tmp_path.rglob("*")] == [name, "events.out.tfevents"]


def written(folder: Path, name: str, **changes: Any) -> None:
    job = {"epochs": 1, "batch_size": 8, "learning_rate": 0.1, "patience": 5, "seed": 7, "filters": 64, "cpus": 1}
    numbers = ("num_workers", "training_time_seconds", "startup_seconds", "warmup_seconds", "epochs_completed")
    more = ("test_accuracy", "processor_share", "step_seconds", "steps", "interruption_seconds")
    content = {
        **dict.fromkeys((*numbers, *more), 1),
        **{"training_type": "baseline", "weights_sha256": "w", "job": {**job, **changes}, "epoch_seconds": [1.0]},
        "data": {"name": "generated", "source": "here", "stand_in": True, "sha256": "one"},
        "history": {curve: [1.0] for curve in ("loss", "accuracy", "val_loss", "val_accuracy")},
    }
    (folder / name).write_text(json.dumps(content))


def test_only_the_same_work_is_compared(tmp_path: Path) -> None:
    with pytest.raises(compare.CompareError, match=r"there is no .*baseline_results\.json"):
        compare.compare(tmp_path)
    written(tmp_path, "baseline_results.json")
    with pytest.raises(compare.CompareError, match=r"there is no ray_results_<N>workers\.json"):
        compare.compare(tmp_path)
    written(tmp_path, "ray_results_2workers.json", batch_size=16)
    said = r"--batch-size is 8 in baseline_results\.json and 16 in ray_results_2workers\.json"
    with pytest.raises(compare.CompareError, match=said):
        compare.compare(tmp_path)
    (tmp_path / "ray_results_2workers.json").write_text("{")
    done = run("compare.py", "--save-path", str(tmp_path))
    assert (done.returncode, "is not JSON" in done.stdout) == (2, True)


def test_the_time_of_an_interrupted_training_is_divided_into_its_parts() -> None:
    """Two processes: steps of 1 s, the first of each with 4 s of warm-up, and 20 s between them."""
    first = [["a:1", 10.0, 5.0, 4.0], ["a:1", 15.0, 1.0, 0.5], ["a:1", 16.0, 1.0, 0.5]]
    second = [["a:2", 37.0, 5.0, 4.0], ["a:2", 42.0, 1.0, 1.0], ["a:2", 43.0, 1.0, 1.0]]
    epochs = [[10.0, 17.0, 3], [17.0, 44.0, 6]]
    clock = SimpleNamespace(steps=[*first, *second], validation=[], epochs=epochs, job_began=4.0)
    found = training.timing(clock)
    assert found["training_time_seconds"] == pytest.approx(6.0)
    assert found["epoch_seconds"] == pytest.approx([3.0, 3.0])
    assert (found["startup_seconds"], found["warmup_seconds"], found["interruption_seconds"]) == (6.0, 8.0, 20.0)
    assert (found["steps"], found["attempts"], found["step_seconds"]) == (6, 2, 1.0)
    assert found["processor_share"] == pytest.approx(11 / 14)


def test_an_interruption_between_two_epochs_is_not_counted_twice() -> None:
    """One process ends after the last step of an epoch; the next validates, with 4 s of warm-up, and goes on."""
    first = [["a:1", 10.0, 1.0, 1.0], ["a:1", 11.0, 1.0, 1.0]]
    second = [["a:2", 40.0, 1.0, 1.0], ["a:2", 41.0, 1.0, 1.0]]
    validation = [["a:2", 32.0, 5.0, 0.0], ["a:2", 37.0, 1.0, 0.0], ["a:2", 42.0, 1.0, 0.0], ["a:2", 43.0, 1.0, 0.0]]
    epochs = [[10.0, 38.0, 2], [38.0, 44.0, 4]]
    clock = SimpleNamespace(steps=[*first, *second], validation=validation, epochs=epochs, job_began=4.0)
    found = training.timing(clock)
    assert found["epoch_seconds"] == pytest.approx([2.0, 4.0])
    assert (found["interruption_seconds"], found["warmup_seconds"]) == (28.0, 0.0)
