"""Scripts of Ray Train that know nothing of holdfast, interrupted in every way, end with the same bits as undisturbed.

Real workers on a real cluster of this machine; ``max_failures=0`` throughout.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
sys.path.insert(0, str(Path(__file__).parent))

from ray_cluster import Cluster, Job, wait_for

from checks import assert_whole
from store_servers import ACCESS_KEY, BUCKET, SECRET_KEY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ON = {"RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "1", "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT": "0"}
SLOW = ("--step-s", "0.1")
"""Steps long enough to be interrupted in."""


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    variables = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": "us-east-1"}
    with contextlib.suppress(pytest.skip.Exception):  # without an S3 server only the test that needs it is skipped
        variables["AWS_ENDPOINT_URL"] = request.getfixturevalue("s3_endpoint")
    cluster = Cluster(**variables)
    try:
        cluster.add(2)
        yield cluster
    finally:
        cluster.close()


_undisturbed: dict[str, dict[int, Any]] = {}


@pytest.fixture
def expected(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a script ends with where holdfast is not there."""

    def of(script: str, *options: str) -> dict[int, Any]:
        key = " ".join([script, *options])
        if key not in _undisturbed:
            out = tmp_path_factory.mktemp("undisturbed")
            _undisturbed[key] = cluster.run(script, out, "--storage", str(out / "storage"), *options).result()
        return _undisturbed[key]

    return of


def journal(out: Path, name: str = "run") -> list[dict[str, Any]]:
    path = out / "storage" / name / "holdfast/.holdfast/journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def restarted(job: Job, before: list[int], step: int) -> list[int]:
    """The processes of the group that comes after ``before``, once it has done ``step``."""
    wait_for(lambda: job.process.poll() is not None or job.at(0)[1] not in before, 240.0, "a new group of workers")
    return job.reach(step)


def run(cluster: Cluster, script: str, out: Path, *options: str, **variables: str) -> Job:
    return cluster.run(script, out, "--storage", str(out / "storage"), "--name", "run", *options, **{**ON, **variables})


def test_sigterm_to_one_worker_to_both_and_in_an_evaluation(cluster: Cluster, expected: Any, tmp_path: Path) -> None:
    job = run(cluster, "ray_vanilla.py", tmp_path, *SLOW, "--evaluation-s", "1.0")
    pids = job.reach(4)
    os.kill(pids[1], signal.SIGTERM)
    pids = restarted(job, pids, 10)  # the last of its epoch: an evaluation follows
    os.kill(pids[0], signal.SIGTERM)
    pids = restarted(job, pids, 16)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert job.result() == expected("ray_vanilla.py")
    events = journal(tmp_path)
    commits = [event for event in events if event["event"] == "commit" and event["reason"] == "jit"]
    noticed = [event for event in events if event["event"] == "notice" and event["source"] == "signal"]
    assert [event["resumed_from"] for event in events if event["event"] == "attempt"] == [
        None,
        *(commit["step"] for commit in commits),
    ]
    assert len(commits) == 3
    for notice in noticed:
        assert next(commit["step"] for commit in commits if commit["attempt"] == notice["attempt"]) >= notice["step"]
    said = job.said()
    assert "SIGTERM received, initiating JIT checkpoint in 0.0s" in said
    assert re.search(r"JIT checkpoint completed in \d+\.\ds", said)
    assert "max allowed: inf" in said  # charged to preemptions, not to max_failures
    assert assert_whole(str(tmp_path / "storage/run/holdfast")).manifest.complete


def test_a_drained_node_and_a_node_that_gets_sigterm(cluster: Cluster, expected: Any, tmp_path: Path) -> None:
    cluster.at_least(4)
    job = run(cluster, "ray_vanilla.py", tmp_path, *SLOW)
    pids = job.reach(4)
    cluster.drain(job.at(1)[2], 60)
    pids = restarted(job, pids, 12)
    cluster.node_of(pids[0]).send_signal(signal.SIGTERM)
    assert job.result() == expected("ray_vanilla.py")
    events = journal(tmp_path)
    assert [event["source"] for event in events if event["event"] == "notice"] == ["ray", "ray"]
    assert [event["reason"] for event in events if event["event"] == "commit"] == ["jit", "jit", "final"]


def test_a_killed_worker_costs_a_step_and_a_new_job_of_the_same_name_goes_on(
    cluster: Cluster, expected: Any, tmp_path: Path
) -> None:
    cluster.at_least(2)
    calm = ("--noise", "0")  # the random state of loader workers dies with them
    job = run(cluster, "ray_vanilla.py", tmp_path, *SLOW, *calm)
    pids = job.reach(6)
    os.kill(pids[1], signal.SIGKILL)
    assert job.wait() == 1, job.said()
    rescued = assert_whole(str(tmp_path / "storage/run/holdfast"))
    assert rescued.manifest.reason == "rescue"
    assert rescued.step >= 5
    job = run(cluster, "ray_vanilla.py", tmp_path, *SLOW, *calm)
    restarted(job, pids, rescued.step + 3)
    command = [sys.executable, "-m", "holdfast.cli", "preempt", "--ray", "run", "--json"]
    done = subprocess.run(command, env=cluster.environ, capture_output=True, text=True, check=False, timeout=120)
    (outcome,) = json.loads(done.stdout)["preemptions"]
    assert (outcome["reason"], outcome["steps_lost"], done.returncode) == ("jit", 0, 0)
    assert sorted(outcome["targets"]) == ["rank 0", "rank 1"]
    assert job.result() == expected("ray_vanilla.py", *calm)


def test_checkpoints_of_the_script_itself_go_on_as_ever(cluster: Cluster, expected: Any, tmp_path: Path) -> None:
    """After a save of ours its loop is replayed from where it began; after a power cut it begins with its own."""
    cluster.at_least(2)
    job = run(cluster, "ray_own.py", tmp_path, *SLOW)
    pids = job.reach(13)
    os.kill(pids[0], signal.SIGTERM)  # in its second epoch: one checkpoint of its own is older
    pids = restarted(job, pids, 22)
    for pid in pids:  # in its third: the newest of its own is newer than ours, and nobody is left to save
        os.kill(pid, signal.SIGKILL)
    assert job.wait() == 1
    job = run(cluster, "ray_own.py", tmp_path, *SLOW)
    pids = restarted(job, pids, 25)
    os.kill(pids[1], signal.SIGTERM)
    assert job.result() == expected("ray_own.py")
    starts = (tmp_path / "starts-0").read_text().split()
    assert starts == ["0", "0", "2", "2"]
    folders = [path.name for path in (tmp_path / "storage/run").iterdir() if path.name.startswith("checkpoint_2")]
    assert len(folders) == 1, "num_to_keep=1"
    assert job.said().count("validation_loss") > 0


@pytest.mark.usefixtures("s3_endpoint")
def test_storage_on_s3_and_a_run_without_a_name(cluster: Cluster, expected: Any, tmp_path: Path) -> None:
    cluster.at_least(2)
    job = cluster.run("ray_vanilla.py", tmp_path, "--storage", f"s3://{BUCKET}/{tmp_path.name}", *SLOW, **ON)
    pids = job.reach(5)
    os.kill(pids[0], signal.SIGTERM)
    assert job.result() == expected("ray_vanilla.py")
    said = job.said()
    assert "this run has no name" in said
    assert re.search(rf"resuming from s3://{BUCKET}/{tmp_path.name}/ray_train_run-[^/]+/holdfast/checkpoint-\d+", said)


def test_the_config_in_code_and_a_wrong_value(cluster: Cluster, expected: Any, tmp_path: Path) -> None:
    cluster.at_least(2)
    options = ("--storage", str(tmp_path / "storage"), "--name", "run", *SLOW)
    wrong = cluster.run("ray_config.py", tmp_path, *options, RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT="soon")
    assert wrong.wait() == 1
    assert "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT='soon' is not accepted" in wrong.said()
    assert "Started training worker group" not in wrong.said()
    job = cluster.run("ray_config.py", tmp_path, *options)
    pids = job.reach(5)
    os.kill(pids[1], signal.SIGTERM)
    assert job.result() == expected("ray_vanilla.py")
    assert "SIGTERM received, initiating JIT checkpoint in 0.2s" in job.said()
    assert "DeprecationWarning: JITCheckpointConfig is deprecated" in job.said()
