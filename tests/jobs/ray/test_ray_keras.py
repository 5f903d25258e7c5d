"""Ray's TensorflowTrainer: tf-keras under MultiWorkerMirroredStrategy, in a script that knows nothing of holdfast.

Real workers on a real cluster of this machine.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("tf_keras")

from tests.jobs.ray.cluster import Cluster, Job, wait_for
from tests.kit.checks import assert_whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ON = {"RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "1", "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT": "0"}
SCRIPT = "keras_ray.py"
STEPS = 24


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(TF_USE_LEGACY_KERAS="1", TF_CPP_MIN_LOG_LEVEL="2")
    try:
        cluster.add(2)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    out = tmp_path_factory.mktemp("undisturbed")
    # The state of Dropout lies in a variable on both sides: without it nobody could compare them.
    return run(cluster, out).result()


def run(cluster: Cluster, out: Path, *options: str, gates: tuple[int, ...] = ()) -> Job:
    storage = ("--storage", str(out / "storage"), "--name", "run", *options, "--gates", *map(str, gates))
    return cluster.run(SCRIPT, out, *storage, **ON)


def journal(out: Path) -> list[dict[str, Any]]:
    path = out / "storage/run/holdfast/.holdfast/journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.share(0)
def test_a_run_that_nobody_disturbs_is_complete_and_hears_of_no_notice(
    cluster: Cluster, undisturbed: dict[int, Any], tmp_path: Path
) -> None:
    """Ray kills its workers with SIGTERM when all is done."""
    job = run(cluster, tmp_path)
    assert job.result() == undisturbed
    assert assert_whole(str(tmp_path / "storage/run/holdfast")).manifest.complete
    events = journal(tmp_path)
    assert [event["outcome"] for event in events if event["event"] == "end"] == ["complete", "complete"]
    assert not [event for event in events if event["event"] == "notice"], events
    assert "SIGTERM received" not in job.said()


@pytest.mark.share(0)
def test_sigterm_to_one_worker(cluster: Cluster, undisturbed: dict[int, Any], tmp_path: Path) -> None:
    job = run(cluster, tmp_path, gates=(7,))
    pids = job.reach(7)
    os.kill(pids[1], signal.SIGTERM)
    agreed = lambda: sum(event["event"] == "agreement" for event in journal(tmp_path)) == 2  # noqa: E731
    wait_for(agreed, 60.0, "the workers agree")
    job.open(7)
    assert job.result() == undisturbed
    commits = [(event["reason"], event["step"]) for event in journal(tmp_path) if event["event"] == "commit"]
    assert commits[0] == ("jit", 7), commits
    assert commits[-1][1] == STEPS, commits


@pytest.mark.share(0)  # tests/jobs/parallel does the same with its own script
def test_a_killed_worker_costs_no_step_that_was_complete(
    cluster: Cluster, undisturbed: dict[int, Any], tmp_path: Path
) -> None:
    job = run(cluster, tmp_path, "--max-failures", "1", gates=(9,))
    pids = job.reach(9)
    os.kill(pids[1], signal.SIGKILL)
    job.open(9)
    assert job.result() == undisturbed
    commits = [(event["reason"], event["step"]) for event in journal(tmp_path) if event["event"] == "commit"]
    assert commits[0] == ("rescue", 9), commits
