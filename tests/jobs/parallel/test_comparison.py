"""The whole comparison in a small setting, for real: a baseline, two workers on Ray, one of which goes twice.

One run of the driver serves all tests here: a cluster and seventeen starts of TensorFlow are what takes the time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("tf_keras")
pytest.importorskip("matplotlib")

from tests.jobs.parallel.example import EXAMPLE, result, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

EPOCHS, IMAGES, BATCH = 2, 3072, 32
STEPS = EPOCHS * (IMAGES - IMAGES // 8) // BATCH
KILL_AT = 45
TERM_AT = 2 * KILL_AT
"""In the first epoch and early in the second: a signal is under way for a second or two."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("comparison")


@pytest.fixture(scope="module")
def done(folder: Path) -> subprocess.CompletedProcess[str]:
    """Data is not named, and there is none: the driver has to say so, and to go on with a stand-in."""
    done = make_benchmark(
        f"EPOCHS={EPOCHS}",
        f"IMAGES={IMAGES}",
        f"BATCH_SIZE={BATCH}",
        f"PREEMPT_AT={KILL_AT}",
        f"RESULTS={folder / 'results'}",
        "BENCHMARK_ARGS=--test-images 512 --filters 16 --preempt-how kill,term",
        KERAS_HOME=str(folder / "no-keras"),
        HOLDFAST_KILL_WAIT="0",
    )
    assert done.returncode == 0, done.stdout
    return done


def make_benchmark(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """As a person types it, but with the environment that the tests run in, and nothing is installed."""
    ours = ("HOLDFAST_", "RAY_", "MAKE", "MFLAGS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        ["make", "benchmark", f"RUN={sys.executable}", "--old-file=.venv/.ready", *words],
        cwd=EXAMPLE.parents[1],
        env={**kept, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1400,
        check=False,
    )


@pytest.fixture(scope="module")
def results(folder: Path, done: subprocess.CompletedProcess[str]) -> Path:
    return folder / "results"


def test_both_learn_and_are_within_two_points_on_the_same_data(results: Path) -> None:
    baseline, ray = result(results, "baseline_results.json"), result(results, "ray_results_2workers.json")
    assert baseline["data"]["sha256"] == ray["data"]["sha256"]
    assert baseline["test_accuracy"] > 0.9
    assert abs(baseline["test_accuracy"] - ray["test_accuracy"]) <= 0.02
    assert baseline["parameters"] == ray["parameters"]
    assert baseline["weights_sha256"] != ray["weights_sha256"]  # each worker draws its own dropout: not one run twice


def test_results_have_their_fields(results: Path) -> None:
    for name, kind, workers in (
        ("baseline_results.json", "baseline", 1),
        ("ray_results_2workers.json", "ray_distributed", 2),
    ):
        found = result(results, name)
        assert (found["training_type"], found["num_workers"], found["epochs_completed"]) == (kind, workers, EPOCHS)
        assert (found["steps"], found["attempts"], found["interruption_seconds"]) == (STEPS, 1, 0)
        assert all(len(curve) == EPOCHS for curve in found["history"].values())
        assert {"loss", "accuracy", "val_loss", "val_accuracy", "lr"} <= found["history"].keys()
        assert len(found["cores"]) == 1
    ray = result(results, "ray_results_2workers.json")
    assert (ray["ray_cluster_cpus"], ray["ray_cluster_nodes"]) == (2, 3)
    assert ray["ray_cluster_memory_bytes"] > 0
    assert ray["exchange_seconds_per_step"] > 0


def test_the_parts_of_the_time_are_apart_and_fit_into_the_whole(results: Path) -> None:
    for name in ("baseline_results.json", "ray_results_2workers.json"):
        found = result(results, name)
        parts = [found[f"{part}_seconds"] for part in ("startup", "warmup", "evaluation")]
        assert all(part > 0 for part in parts)
        assert found["training_time_seconds"] == pytest.approx(sum(found["epoch_seconds"]))
        assert sum(parts) + found["training_time_seconds"] < found["total_seconds"]
        assert found["training_time_seconds"] >= 0.5 * STEPS * found["step_seconds"]


def test_the_table_is_printed_with_the_ceiling_of_the_machine(
    results: Path, done: subprocess.CompletedProcess[str]
) -> None:
    comparison, ceiling = result(results, "comparison.json"), result(results, "ceiling_2workers.json")
    baseline, ray = result(results, "baseline_results.json"), result(results, "ray_results_2workers.json")
    speedup = baseline["training_time_seconds"] / ray["training_time_seconds"]
    assert comparison["speedup"] == pytest.approx(speedup)
    assert comparison["efficiency"] == pytest.approx(speedup / 2)
    difference = 100 * (ray["test_accuracy"] - baseline["test_accuracy"])
    assert comparison["accuracy_difference_points"] == pytest.approx(difference)
    together, alone = ceiling["step_seconds_part_together"], ceiling["step_seconds_part_alone"]
    assert comparison["ceiling"] == pytest.approx(2 * alone / together)
    printed = {
        line.rsplit(maxsplit=2)[0].strip(): line.split()[-1] for line in done.stdout.splitlines() if "  " in line
    }
    assert printed["speedup"] == f"{speedup:.2f}"
    assert printed["ceiling of this machine"] == f"{ceiling['ceiling']:.2f}"
    parts = comparison["runs"][0]["explanation"]
    named = ("ideal", "smaller_batch", "shared_machine", "exchange_and_waiting")
    assert sum(parts[name] for name in named) == pytest.approx(parts["step_seconds"])
    for picture in ("training_curves.png", "speedup.png", "epoch_time.png"):
        assert (results / picture).read_bytes().startswith(b"\x89PNG")


def test_every_epoch_is_reported_to_ray_and_the_cluster_is_described(
    results: Path, done: subprocess.CompletedProcess[str]
) -> None:
    log = (results / "logs/ray-2.log").read_text()
    for epoch in range(1, EPOCHS + 1):
        assert f"metrics={{'epoch': {epoch}," in log
    assert "2 worker nodes and a head" in done.stdout
    assert "cluster: 2 CPUs on 3 nodes with the head, " in done.stdout


def test_a_worker_that_is_killed_and_then_preempted_changes_neither_the_end_nor_the_accuracy(results: Path) -> None:
    calm = result(results, "ray_results_2workers.json")
    killed = result(results, "interrupted/ray_results_2workers.json")
    cuts = killed["interruptions"]
    assert [(cut["what"], cut["steps_lost"]) for cut in cuts] == [("rescued", 0), ("preempted", 0)]
    for cut, step in zip(cuts, (KILL_AT, TERM_AT), strict=True):
        assert cut["step"] >= step
        assert cut["resume_s"] > 0
    assert (killed["attempts"], killed["steps"]) == (3, STEPS)  # no step was done twice, and none left out
    assert killed["interruption_seconds"] > 0
    assert killed["weights_sha256"] == calm["weights_sha256"]
    assert killed["test_accuracy"] == calm["test_accuracy"]
    assert killed["history"] == calm["history"]


def test_a_preempted_baseline_ends_as_if_nothing_had_been(
    results: Path, done: subprocess.CompletedProcess[str]
) -> None:
    calm, preempted = result(results, "baseline_results.json"), result(results, "interrupted/baseline_results.json")
    assert [(cut["what"], cut["steps_lost"]) for cut in preempted["interruptions"]] == [("preempted", 0)]
    assert (preempted["attempts"], preempted["steps"]) == (2, STEPS)
    assert preempted["startup_seconds"] > 0  # of the first attempt
    assert preempted["weights_sha256"] == calm["weights_sha256"]
    assert preempted["history"] == calm["history"]
    assert done.stdout.count("steps lost: 0") == 3
    assert "OTHER WEIGHTS" not in done.stdout


def test_the_stand_in_is_said_loudly(results: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert "GENERATED IMAGES: a stand-in, NOT CIFAR-10" in done.stdout
    assert "A GENERATED STAND-IN, NOT CIFAR-10: the accuracy means nothing" in done.stdout
    for name in ("baseline_results.json", "ray_results_2workers.json", "comparison.json"):
        data: Any = result(results, name)["data"]
        assert data["stand_in"] is True
        assert (data["name"], "CIFAR-10 cannot be had" in data["source"]) == ("generated", True)


def test_the_training_scripts_do_not_know_of_holdfast() -> None:
    for script in ("baseline_training.py", "ray_training.py", "training.py", "model.py", "data.py", "sources.py"):
        assert "import holdfast" not in (text := (EXAMPLE / script).read_text())
        assert "from holdfast" not in text


@pytest.mark.share(0)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["term", "node"])
def test_real_images_and_other_numbers_of_workers(tmp_path: Path, how: str) -> None:
    """Fashion-MNIST, where Debian's package is; a worker, or all of its node, is told to leave."""
    if not Path("/usr/share/datasets/fashion-mnist").exists():
        pytest.skip("apt-get install dataset-fashion-mnist")
    done = run(
        "benchmark.py",
        *("--data", "fashion-mnist", "--images", "8000", "--test-images", "4000", "--epochs", "6", "--filters", "16"),
        *("--batch-size", "64", "--workers", "1,2", "--preempt-at", "200", "--preempt-how", how),
        *("--save-path", str(tmp_path)),
        timeout_s=3500,
    )
    assert done.returncode == 0, done.stdout
    comparison = result(tmp_path, "comparison.json")
    assert [run["num_workers"] for run in comparison["runs"]] == [1, 2]
    assert comparison["data"]["stand_in"] is False
    assert comparison["baseline"]["test_accuracy"] > 0.75
    for one in comparison["runs"]:
        assert abs(one["accuracy_difference_points"]) <= 2
