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
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import ROOT

pytest.importorskip("ray")

from holdfast.adapters.ray.marker import markers
from tests.jobs.ray.cluster import Cluster, Job, wait_for
from tests.kit.checks import assert_whole
from tests.kit.s3 import ACCESS_KEY, BUCKET, SECRET_KEY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ON = {"RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "1", "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT": "0"}


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


def journal(out: Path) -> list[dict[str, Any]]:
    path = out / "storage/run/holdfast/.holdfast/journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def commits(out: Path) -> list[tuple[str, int]]:
    return [(event["reason"], event["step"]) for event in journal(out) if event["event"] == "commit"]


@contextlib.contextmanager
def agreement(job: Job) -> Iterator[None]:
    """Ends once all workers know at which step they save, because of what was done inside."""

    def agreed() -> int:
        return sum(event["event"] == "agreement" for event in journal(job.out))

    before = agreed()
    yield
    wait_for(lambda: agreed() == before + 2, 60.0, "the workers agree")


def stop(job: Job, *pids: int) -> None:
    with agreement(job):
        for pid in pids:
            os.kill(pid, signal.SIGTERM)


def kill_at_once(*pids: int) -> None:
    """None of them lives to see the end of another."""
    for signal_number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, signal_number)


def run(cluster: Cluster, script: str, out: Path, *options: str, gates: Sequence[object] = (), **variables: str) -> Job:
    storage = ("--storage", str(out / "storage"), "--name", "run", "--gates", *map(str, gates))
    return cluster.run(script, out, *options, *storage, **{**ON, **variables})


def newest_of_its_own(out: Path) -> int | None:
    """The epoch of the newest checkpoint of the script that Ray's controller knows, and would hand out again."""
    path = out / "storage/run/checkpoint_manager_snapshot.json"
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
        return json.loads(path.read_text())["latest_checkpoint_result"]["metrics"]["epoch"]
    return None


@pytest.mark.core
def test_sigterm_to_one_worker_in_an_evaluation_and_to_both(cluster: Cluster, expected: Any, tmp_path: Path) -> None:
    job = run(cluster, "ray_vanilla.py", tmp_path, gates=("evaluation-0", 13))
    pids = job.reach(10)  # an evaluation follows: the save does not wait for its end
    stop(job, pids[1])
    wait_for(lambda: ("jit", 10) in commits(tmp_path), 60.0, "a commit in the middle of an evaluation")
    job.open("evaluation-0")
    pids = job.reach(13, after=pids)
    stop(job, *pids)
    job.open(13)
    assert job.result() == expected("ray_vanilla.py")
    assert commits(tmp_path) == [("jit", 10), ("jit", 13), ("final", 30)]
    attempts = [event["resumed_from"] for event in journal(tmp_path) if event["event"] == "attempt"]
    assert attempts == [None, 10, 13]
    said = job.said()
    assert "SIGTERM received, initiating JIT checkpoint in 0.0s" in said
    assert re.search(r"JIT checkpoint completed in \d+\.\ds", said)
    assert "max allowed: inf" in said  # charged to preemptions, not to max_failures
    assert assert_whole(str(tmp_path / "storage/run/holdfast")).manifest.complete


@pytest.mark.share(0)
def test_a_drained_node_and_a_node_that_gets_sigterm(cluster: Cluster, expected: Any, tmp_path: Path) -> None:
    cluster.at_least(4)
    job = run(cluster, "ray_vanilla.py", tmp_path, gates=(5, 12))
    pids = job.reach(5)
    with agreement(job):
        cluster.drain(job.at(1)[2], 60)
    job.open(5)
    pids = job.reach(12, after=pids)
    with agreement(job):
        cluster.node_of(pids[0]).send_signal(signal.SIGTERM)
    job.open(12)
    assert job.result() == expected("ray_vanilla.py")
    assert commits(tmp_path) == [("jit", 5), ("jit", 12), ("final", 30)]
    assert {event["source"] for event in journal(tmp_path) if event["event"] == "notice"} == {"ray"}


def test_a_killed_worker_costs_no_step_and_a_new_job_of_the_same_name_goes_on(
    cluster: Cluster, expected: Any, tmp_path: Path
) -> None:
    cluster.at_least(2)
    calm = ("--noise", "0")  # the random state of loader workers dies with them
    job = run(cluster, "ray_vanilla.py", tmp_path, *calm, gates=(6,))
    pids = job.reach(6)
    os.kill(pids[1], signal.SIGKILL)
    job.open(6)
    assert job.wait() == 1, job.said()
    rescued = assert_whole(str(tmp_path / "storage/run/holdfast"))
    assert (rescued.manifest.reason, rescued.step) == ("rescue", 6)
    job = run(cluster, "ray_vanilla.py", tmp_path, *calm, gates=(9,))
    job.reach(9, after=pids)
    command = [sys.executable, "-m", "holdfast.cli", "preempt", "--ray", "run", "--json"]
    with subprocess.Popen(command, env=cluster.environ, stdout=subprocess.PIPE, text=True) as rehearsal:
        wait_for(lambda: any(event["event"] == "notice" for event in journal(tmp_path)), 120.0, "the notice")
        job.open(9)
        outcome = json.loads(rehearsal.communicate(timeout=120)[0])["preemptions"][0]
    assert (outcome["reason"], outcome["steps_lost"], rehearsal.returncode) == ("jit", 0, 0)
    assert sorted(outcome["targets"]) == ["rank 0", "rank 1"]
    assert job.result() == expected("ray_vanilla.py", *calm)


@pytest.mark.share(0)
def test_checkpoints_of_the_script_itself_go_on_as_ever(cluster: Cluster, expected: Any, tmp_path: Path) -> None:
    """After a save of ours its loop is replayed from where it began; after a power cut it begins with its own."""
    cluster.at_least(2)
    job = run(cluster, "ray_own.py", tmp_path, gates=(13, 22))
    pids = job.reach(13)
    stop(job, pids[0])  # in its second epoch: one checkpoint of its own is older
    job.open(13)
    pids = job.reach(22, after=pids)
    wait_for(
        lambda: newest_of_its_own(tmp_path) == 1, 60.0, "Ray's controller notes the checkpoint of the second epoch"
    )
    kill_at_once(*pids)  # in its third: the newest of its own is newer than ours, and nobody is left to save
    assert job.wait() == 1
    job = run(cluster, "ray_own.py", tmp_path)
    assert job.result() == expected("ray_own.py")
    assert (tmp_path / "starts-0").read_text().split() == ["0", "0", "2"]
    storage = tmp_path / "storage/run"  # where Ray's controller removes older ones when it has time
    wait_for(lambda: len(list(storage.glob("checkpoint_[0-9]*"))) == 1, 30.0, "num_to_keep=1")
    assert job.said().count("'epoch': 2") > 0


@pytest.mark.share(0)
def test_a_script_that_wants_them_gets_our_checkpoints_from_ray(
    cluster: Cluster, expected: Any, tmp_path: Path
) -> None:
    """In the workers that Ray starts again, and in a new job of the same name."""
    cluster.at_least(2)
    handed = {"HOLDFAST_RAY_GET_CHECKPOINT": "jit"}
    job = run(cluster, "ray_handed.py", tmp_path, gates=(5, 12), **handed)
    pids = job.reach(5)
    stop(job, pids[0])
    job.open(5)
    pids = job.reach(12, after=pids)
    job.kill()  # the driver: its workers go with it, and have no time to save
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60.0, "the workers leave")
    job = run(cluster, "ray_handed.py", tmp_path, **handed)
    assert job.result() == expected("ray_handed.py")
    # A loop without a loader has its boundaries after its steps: the one in flight is finished first.
    assert (tmp_path / "starts-0").read_text().split() == ["0", "6", "6"]


@pytest.mark.usefixtures("s3_endpoint")
def test_storage_on_s3_and_a_run_without_a_name(cluster: Cluster, expected: Any, tmp_path: Path) -> None:
    cluster.at_least(2)
    storage = f"s3://{BUCKET}/{tmp_path.name}"
    job = cluster.run("ray_vanilla.py", tmp_path, "--storage", storage, "--gates", "5", **ON)
    pids = job.reach(5)
    os.kill(pids[0], signal.SIGTERM)
    job.open(5)
    assert job.result() == expected("ray_vanilla.py")
    said = job.said()
    assert said.count("this run has no name") == 1
    assert re.search(rf"resuming from {storage}/ray_train_run-[^/]+/holdfast/checkpoint-\d+, step \d+", said)


@pytest.mark.share(0)
def test_the_config_in_code_and_a_wrong_value(cluster: Cluster, expected: Any, tmp_path: Path) -> None:
    cluster.at_least(2)
    options = ("--storage", str(tmp_path / "storage"), "--name", "run", "--gates", "5")
    wrong = cluster.run("ray_config.py", tmp_path, *options, RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT="soon")
    assert wrong.wait() == 1
    assert "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT='soon' is not accepted" in wrong.said()
    assert "Started training worker group" not in wrong.said()
    job = cluster.run("ray_config.py", tmp_path, *options)
    pids = job.reach(5)
    os.kill(pids[1], signal.SIGTERM)
    job.open(5)
    assert job.result() == expected("ray_vanilla.py")
    assert "SIGTERM received, initiating JIT checkpoint in 0.2s" in job.said()
    assert "DeprecationWarning: JITCheckpointConfig is deprecated" in job.said()


@pytest.mark.share(0)
def test_the_script_of_the_page(cluster: Cluster, tmp_path: Path) -> None:
    cluster.at_least(2)
    page = (ROOT / "docs/ray.md").read_text()
    code = re.search(r"```python\n(.+?)```", page, re.DOTALL)[1]
    script = tmp_path / "train_ray.py"
    sums = []
    for name in ("preempted", "undisturbed"):
        script.write_text(code.replace("/tmp/ray-results", str(tmp_path / name)).replace("range(20)", "range(4)"))
        with (tmp_path / f"{name}.log").open("w+") as log:
            variables = {**cluster.environ, **ON, "RAY_ADDRESS": cluster.address}
            job = subprocess.Popen([sys.executable, script], env=variables, stdout=log, stderr=log)
            cluster.jobs.append(Job(job, tmp_path, Path(log.name)))
            if name == "preempted":
                began = tmp_path / "preempted/first/holdfast/.holdfast/journal.jsonl"
                wait_for(lambda: began.exists() and '"training"' in began.read_text(), 240.0, "the training begins")  # noqa: B023
                mine = [marker for marker in markers() if marker.location.startswith(str(tmp_path))]
                os.kill(next(marker.pid for marker in mine if marker.rank == 1), signal.SIGTERM)
            assert job.wait(300.0) == 0, Path(log.name).read_text()
        said = (tmp_path / f"{name}.log").read_text()
        assert ("resuming from" in said) == (name == "preempted")
        sums.append(re.search(r"sum of all parameters: (\S+)", said)[1])
    assert sums[0] == sums[1]


def reported(out: Path) -> list[list[Any]]:
    """Epoch, loss and whether there was a checkpoint, of every report that Ray's callbacks were given."""
    return [json.loads(line) for line in (out / "reported").read_text().splitlines()]


def what_it_restores_to() -> dict[int, Any]:
    """What ``ray_restores.py`` ends with: its two workers do the same, so one process does it too."""
    torch.manual_seed(0)
    x = torch.arange(160, dtype=torch.float32).reshape(40, 4) / 100
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    state = {name: value.tolist() for name, value in model.state_dict().items()}
    return {0: state, 1: state}


@pytest.mark.parametrize("raising", [("0", "1"), ("1",)], ids=["all ranks", "one rank"])
@pytest.mark.core
@pytest.mark.share(2)
def test_a_function_that_fails_and_restores_itself_does_so_as_ever(
    cluster: Cluster, tmp_path: Path, raising: tuple[str, ...]
) -> None:
    """Its own exception is its own: nothing is replayed, and ``max_failures=1`` is enough."""
    cluster.at_least(2)
    job = run(cluster, "ray_restores.py", tmp_path, "--raising", *raising)
    assert job.result() == what_it_restores_to()
    assert (tmp_path / "starts-0").read_text().split() == ["0", "2"]
    assert [(epoch, kept) for epoch, _, kept in reported(tmp_path)] == [(epoch, True) for epoch in range(4)]
    assert "replaying" not in job.said()


@pytest.mark.xfail(
    reason="a replay shows the files of the run's beginning: the script does not find the one by which it knows that "
    "it has raised, which only the lost part of the first attempt has made",
    strict=True,
)
@pytest.mark.parametrize("raising", [("0", "1"), ("1",)], ids=["all ranks", "one rank"])
@pytest.mark.share(2)
def test_after_a_failure_and_a_preemption_each_report_is_made_once(
    cluster: Cluster, tmp_path: Path, raising: tuple[str, ...]
) -> None:
    """Without checkpoints of its own, what all ranks raise is survived without waiting, and without a loss."""
    cluster.at_least(2)
    job = run(cluster, "ray_restores.py", tmp_path, "--own", "0", "--raising", *raising, gates=(13,))
    pids = job.reach(13)
    stop(job, pids[0])
    job.open(13)
    assert job.result() == what_it_restores_to()
    assert [epoch for epoch, _, _ in reported(tmp_path)] == [0, 1, 2, 3]
    rescue, _, final = (event for event in journal(tmp_path) if event["event"] == "commit")
    assert (rescue["reason"], rescue["step"], final["reason"]) == ("rescue", 10, "final")
    assert rescue["inexact"] == []
    assert rescue["since_request_s"] < 15.0


@pytest.mark.share(0)
def test_rays_own_linear_example_is_preempted_and_reports_each_epoch_once(cluster: Cluster, tmp_path: Path) -> None:
    """Unmodified, from Ray's wheel: it copies its DDP model after every epoch, and both ranks report a checkpoint."""
    cluster.at_least(2)
    script = Path(str(files("ray.train.examples.pytorch") / "torch_linear_example.py"))
    job = cluster.run(str(script), tmp_path, "--num-workers", "2", "--epochs", "30", HOME=str(tmp_path), **ON)
    wait_for(lambda: "Reporting training result 2:" in job.said() or job.process.poll() is not None, 240.0, "an epoch")
    mine = [marker for marker in markers() if marker.location.startswith(str(tmp_path))]
    os.kill(next(marker.pid for marker in mine if marker.rank == 1), signal.SIGTERM)
    assert job.wait() == 0, job.said()
    said = job.said()
    assert "training goes on" in said
    results = re.findall(r"Reporting training result (\d+):", said)
    assert sorted(map(int, results)) == sorted([*range(1, 31)] * 2)


@pytest.mark.share(0)
def test_lightning_on_ray_is_looked_after_by_the_adapter_of_lightning(
    cluster: Cluster, expected: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cluster.at_least(2)
    job = run(cluster, "ray_lightning.py", tmp_path, gates=(4, 17))
    pids = job.reach(4)
    stop(job, pids[1])
    job.open(4)
    pids = job.reach(17, after=pids)  # one checkpoint of its own is older
    stop(job, pids[0])
    job.open(17)
    assert job.result() == expected("ray_lightning.py")
    assert [reason for reason, _ in commits(tmp_path)] == ["jit", "jit", "final"], job.said()
    assert [(epoch, step) for epoch, step, _ in reported(tmp_path)] == [(0, 10), (1, 20), (2, 30)]


@pytest.mark.share(0)
def test_a_worker_that_cannot_be_protected_trains_or_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.at_least(2)
    required = run(cluster, "ray_refused.py", tmp_path, HOLDFAST_ENABLED="require")
    assert required.wait() == 1
    why = r"PyTorch loops in this worker are not followed: .*SequentialLR"
    assert re.search(rf"UnprotectedError: {why}.*refuses to train unprotected", required.said())
    assert not (tmp_path / "began").exists()
    job = run(cluster, "ray_refused.py", tmp_path)
    assert job.wait() == 0, job.said()
    assert re.search(why, job.said())
    assert (tmp_path / "trained").exists()
