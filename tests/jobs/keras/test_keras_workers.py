"""tf-keras on two workers under MultiWorkerMirroredStrategy: both save one step, whoever heard of the preemption."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.jobs import journal

pytest.importorskip("tf_keras")

from tests.jobs.keras.drill import Job, Outcome, Server
from tests.kit.checks import assert_whole
from tests.kit.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHAPE = ["--validate"]
"""Twelve steps an epoch, three epochs, six batches of validation."""


@pytest.fixture(scope="module")
def workers() -> Iterator[Server]:
    server = Server("tensorflow", "tf_keras")
    yield server
    server.close()


@pytest.fixture(scope="module")
def undisturbed(workers: Server, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return ended(start(workers, tmp_path_factory.mktemp("plain"), *SHAPE, HOLDFAST_ENABLED="0"), 0)


def start(server: Server, folder: Path, *arguments: str, **environment: str) -> list[Job]:
    cluster = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(2)]}
    jobs = []
    for rank in range(2):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
        jobs.append(server.start("keras_workers.py", *arguments, folder=folder, TF_CONFIG=config, **environment))
    return jobs


def ended(jobs: list[Job], *codes: int) -> list[Outcome]:
    """How both ended; ``codes``: of each, or of both."""
    outcomes = [job.wait() for job in jobs]
    expected = list(codes) if len(codes) > 1 else [codes[0]] * len(jobs)
    assert [outcome.code for outcome in outcomes] == expected, "\n\n".join(outcome.log for outcome in outcomes)
    return outcomes


def check_the_rest(server: Server, folder: Path, undisturbed: list[Outcome], *args: str) -> None:
    rest = ended(start(server, folder, *SHAPE, *args), 0)
    assert [outcome.result for outcome in rest] == [outcome.result for outcome in undisturbed], rest[0].log
    progress = json.loads((folder / "run/training_progress.json").read_text())
    assert (progress["step"], progress["totalSteps"], progress["epoch"]) == (36, 36, 3), rest[0].log
    assert float(progress["learningRate"]) > 0


def longest_s(folder: Path) -> float:
    """From a notice to the end of a worker."""
    ends = [event for event in journal(str(folder / "run")) if event["event"] == "end"]
    return max(float(event["since_notice_s"]) for event in ends if "since_notice_s" in event)


def training(folder: Path) -> bool:
    return any(event["event"] == "training" for event in journal(str(folder / "run")))


@pytest.mark.core
@pytest.mark.parametrize(
    ("ranks", "skew_s"), [((0,), 0), ((1,), 0), ((0, 1), 0), ((0, 1), 0.1), ((1, 0), 1.0)], ids=str
)
@pytest.mark.share(5)
def test_signals_from_outside(
    workers: Server, undisturbed: list[Outcome], tmp_path: Path, ranks: tuple[int, ...], skew_s: float
) -> None:
    jobs = start(workers, tmp_path, *SHAPE, "--step-s", "0.3")
    until = time.monotonic() + 200
    while not training(tmp_path):
        assert time.monotonic() < until, jobs[0].log()
        time.sleep(0.01)
    for rank in ranks:
        jobs[rank].send(signal.SIGTERM)
        time.sleep(skew_s)
    ended(jobs, 143)
    newest = assert_whole(str(tmp_path / "run"))
    assert newest.manifest.reason == "jit"
    assert len([file for file in newest.manifest.files if file.path.startswith("rank-")]) == 2
    check_the_rest(workers, tmp_path, undisturbed)


@pytest.mark.share(0)
def test_one_after_the_other_in_every_part_of_an_epoch(
    workers: Server, undisturbed: list[Outcome], tmp_path: Path
) -> None:
    for kill, step in [("1:batch_begin:1", 1), ("0:batch_end:11", 12), ("1:test_batch:3", 12), ("0:batch_begin:2", 14)]:
        jobs = ended(start(workers, tmp_path, *SHAPE, "--kill", kill), 143)
        assert assert_whole(str(tmp_path / "run")).step >= step, jobs[0].log
    check_the_rest(workers, tmp_path, undisturbed)


@pytest.mark.parametrize("moment", ["epoch_end:1", "epoch_begin:2"])
@pytest.mark.share(0)
def test_between_two_epochs(workers: Server, undisturbed: list[Outcome], tmp_path: Path, moment: str) -> None:
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        ended(start(workers, folder, *SHAPE, "--kill", f"{rank}:{moment}"), 143)
        assert assert_whole(str(folder / "run")).step in (12, 13)
        assert longest_s(folder) < 20  # of 40: the one that waits for the other in the next epoch saves nevertheless
        check_the_rest(workers, folder, undisturbed)


def test_between_two_epochs_of_endless_data(workers: Server, tmp_path: Path) -> None:
    endless = ["--data", "repeat"]
    calm, folder = tmp_path / "calm", tmp_path / "preempted"
    for one in (calm, folder):
        one.mkdir()
    undisturbed = ended(start(workers, calm, *endless, HOLDFAST_ENABLED="0"), 0)
    ended(start(workers, folder, *endless, "--kill", "1:epoch_end:1"), 143)
    assert longest_s(folder) < 20
    rest = ended(start(workers, folder, *endless), 0)
    assert [outcome.result for outcome in rest] == [outcome.result for outcome in undisturbed], rest[0].log


def test_decided_when_an_epoch_has_begun_and_none_of_its_batches_is_trained(
    workers: Server, undisturbed: list[Outcome], tmp_path: Path
) -> None:
    """The iterator of that epoch is made by then, and another one would yield another order."""
    ended(start(workers, tmp_path, *SHAPE, "--kill", "1:epoch_begin:2", "--linger-s", "5"), 143)
    assert assert_whole(str(tmp_path / "run")).step == 12
    check_the_rest(workers, tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("epoch", "step", "codes"), [(1, 12, (143, 143)), (3, 36, (143, 0))], ids=["in-the-next-epoch", "at-its-end"]
)
@pytest.mark.share(2)
def test_one_worker_is_further_when_another_is_at_the_end_of_validation(
    workers: Server, undisturbed: list[Outcome], tmp_path: Path, epoch: int, step: int, codes: tuple[int, int]
) -> None:
    """Else one would validate, and wait there for the other, which trains."""
    arguments = ["--kill", f"0:test_end:{epoch}", "--behind-s", "3"]
    ended(start(workers, tmp_path, *SHAPE, *arguments, HOLDFAST_GRACE_PERIOD="15"), *codes)
    assert assert_whole(str(tmp_path / "run")).step == step
    check_the_rest(workers, tmp_path, undisturbed)


def test_the_last_step(workers: Server, undisturbed: list[Outcome], tmp_path: Path) -> None:
    ended(start(workers, tmp_path, *SHAPE, "--kill", "1:batch_end:36"), 143)
    assert assert_whole(str(tmp_path / "run")).step == 36
    check_the_rest(workers, tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("kill", "codes", "step"),
    [("0:batch_begin:17:9", (-9, 1), 16), ("1:batch_end:18:9", (1, -9), 18)],
    ids=["the-one-that-keeps-the-service", "the-other"],
)
@pytest.mark.share(2)
def test_a_killed_worker_costs_at_most_the_step_in_flight(
    workers: Server, undisturbed: list[Outcome], tmp_path: Path, kill: str, codes: tuple[int, int], step: int
) -> None:
    """The survivor's own error ends it, after the rescue."""
    ended(start(workers, tmp_path, *SHAPE, "--kill", kill), *codes)
    newest = assert_whole(str(tmp_path / "run"))
    assert (newest.step, newest.manifest.reason, newest.manifest.inexact) == (step, "rescue", ())
    check_the_rest(workers, tmp_path, undisturbed)


def test_a_worker_that_dies_between_gradients_and_logs_costs_the_step_in_flight(
    workers: Server, undisturbed: list[Outcome], tmp_path: Path
) -> None:
    """The survivor has all gradients by then, and must not have applied them."""
    ended(start(workers, tmp_path, *SHAPE, "--between", "--kill", "1:exchanged:23:9"), 1, -9)  # 6 of them in validation
    newest = assert_whole(str(tmp_path / "run"))
    assert (newest.step, newest.manifest.reason, newest.manifest.inexact) == (16, "rescue", ())
    check_the_rest(workers, tmp_path, undisturbed, "--between")


def test_a_step_that_has_changed_the_weights_is_not_taken_for_the_one_before_it(
    workers: Server, tmp_path: Path
) -> None:
    """Logs that are made from the new weights: the survivor fails for want of the dead worker's. Better no checkpoint
    than a wrong one."""
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
    undisturbed = ended(start(workers, calm, *SHAPE, "--late"), 0)
    failed = ended(start(workers, killed, *SHAPE, "--late", "--kill", "1:applied:17:9"), 1, -9)
    assert "the crash came inside an optimizer step: its state is not saved" in failed[0].log
    rest = ended(start(workers, killed, *SHAPE, "--late"), 0)
    assert [outcome.result for outcome in rest] == [outcome.result for outcome in undisturbed], rest[0].log


def test_one_worker_goes_on_with_what_two_have_left(workers: Server, tmp_path: Path) -> None:
    ended(start(workers, tmp_path, *SHAPE, "--kill", "1:batch_end:17"), 143)
    config = json.dumps({"cluster": {"worker": [f"127.0.0.1:{free_port()}"]}, "task": {"type": "worker", "index": 0}})
    alone = workers.run("keras_workers.py", *SHAPE, folder=tmp_path, TF_CONFIG=config)
    assert alone.code == 0, alone.log
    assert "saved by 2 workers and is loaded by 1" in alone.log
    assert alone.result is not None
    assert alone.result["iterations"] == 36
