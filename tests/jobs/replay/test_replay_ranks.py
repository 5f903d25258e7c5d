"""Unchanged scripts of several ranks: whoever is told to stop, and whoever is killed, all go on from one step."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys

import pytest

from tests.jobs.replay import drill
from tests.jobs.replay.checks import check, go_on, uninterrupted
from tests.kit.checks import assert_whole


@pytest.fixture(scope="module")
def plain():
    """Runs plain PyTorch scripts; see drill.py."""
    server = drill.Server()
    yield server
    server.close()


STOPS = {
    "rank-0": {"at": "step 9"},
    "rank-1": {"at": "backward 20", "rank": 1},
    "all": {"at": "optimizer 11", "also": [1]},
    "all-0.1s": {"at": "after-optimizer 8", "rank": 1, "also": [0], "skew_s": 0.1},
    "all-1s": {"at": "optimizer 3", "rank": 1, "also": [0], "skew_s": 1.0},
    "first-step": {"at": "backward 1", "rank": 1},
    "between-epochs": {"at": "epoch 0"},
    "evaluation": {"at": "evaluation 2"},
    "save": {"at": "save 8", "rank": 1},
}


@pytest.mark.core
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.share(4)
def test_ddp_that_is_stopped_anywhere_ends_with_the_same_bits(plain, tmp_path, stop):
    env = {}
    if stop == "all-1s":
        env = {"HOLDFAST_KILL_WAIT": "1.3", "PAUSE": "0.15"}
    elif stop == "save":
        env = {"HOLDFAST_SAVE_EVERY": "4 steps"}
    check(plain, drill.Spec(str(tmp_path / "run"), "plain_ddp", 2, [STOPS[stop]], env))


def test_a_notice_in_the_last_step_of_ddp(plain, tmp_path):
    check(plain, drill.Spec(str(tmp_path / "run"), "plain_ddp", 2, [{"at": "optimizer 18", "rank": 1}]), may_end=True)


def test_three_ranks_add_their_gradients_in_the_same_order_after_a_resume(plain, tmp_path):
    check(plain, drill.Spec(str(tmp_path / "run"), "plain_ddp", 3, [{"at": "after-optimizer 7", "rank": 2}]))


@pytest.mark.parametrize("step", [1, 6])
def test_ddp_with_a_static_graph_ends_with_the_same_bits(plain, tmp_path, step):
    check(plain, drill.Spec(str(tmp_path / "run"), "plain_static", 3, [{"at": f"step {step}", "rank": 2}]))


def test_a_communication_hook_that_keeps_a_state_is_said_to_be_inexact(plain, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), "plain_ddp", 2, [{"at": "step 6"}], {"HOOK": "1"})
    first = plain.run(spec)
    assert set(first.codes) == {143}, first.log
    assert "what DDP's communication hook keeps is not saved (PowerSGDState): a resume will not be exact" in first.log
    assert any("PowerSGDState" in words for words in assert_whole(spec.dir).manifest.inexact)
    again = plain.run(spec.plain())
    assert again.codes == [0, 0], again.log
    assert "is not exact: " in again.log


def test_loader_workers_of_every_rank_go_on_with_their_random_numbers(plain, tmp_path):
    check(plain, drill.Spec(str(tmp_path / "run"), "plain_ddp", 2, [{"at": "step 10"}], {"WORKERS": "2"}))


@pytest.mark.core
@pytest.mark.parametrize("place", ["step 5", "evaluation 1"])
def test_a_loop_on_accelerate_with_two_ranks(plain, tmp_path, place):
    """Its loaders are one batch ahead of the script, and its sampler's generator is shared by the ranks."""
    check(plain, drill.Spec(str(tmp_path / "run"), "plain_accelerate", 2, [{"at": place}]))


@pytest.mark.core
@pytest.mark.parametrize(("place", "rank", "best"), [("step 8", 0, "all"), ("optimizer 14", 1, "rank 0")])
def test_copies_and_pickles_of_what_is_trained_are_the_scripts_own(plain, tmp_path, place, rank, best):
    """An average that is called inside a step, the best model so far, and files of whole objects."""
    fault = {"at": place, "rank": rank}
    check(plain, drill.Spec(str(tmp_path / "run"), "plain_copies", 2, [fault], {"BEST": best}))


def test_the_best_model_so_far_after_an_error(plain, tmp_path):
    """It was copied since the last look at what the script has made."""
    spec = drill.Spec(str(tmp_path / "run"), "plain_copies", 1, [{"at": "backward 15", "action": "RAISE"}])
    spec.env["BEST"] = "all"
    assert plain.run(spec).codes == [1]
    go_on(plain, spec)


@pytest.mark.core
@pytest.mark.parametrize(
    ("place", "rank", "step"), [("backward 20", 1, 9), ("backward 20", 0, 9), ("evaluation 2", 0, 6)]
)
def test_when_a_rank_is_killed_the_other_saves_for_both(plain, tmp_path, place, rank, step):
    spec = drill.Spec(str(tmp_path / "run"), "plain_ddp", 2, [{"at": place, "rank": rank, "action": "KILL"}])
    outcome = plain.run(spec)
    assert outcome.codes[rank] == -signal.SIGKILL
    newest = assert_whole(spec.dir)
    assert (newest.step, newest.manifest.reason) == (step, "rescue"), outcome.log
    assert not newest.manifest.inexact
    go_on(plain, spec)


def test_what_dies_with_a_rank_is_said_and_the_weights_are_exact_all_the_same(plain, tmp_path):
    """Killed after its forward pass, a rank has not yet read its loss, which the others will ask it for."""
    spec = drill.Spec(str(tmp_path / "run"), "plain_ddp", 2, [{"at": "after-optimizer 9", "action": "KILL"}])
    outcome = plain.run(spec)
    newest = assert_whole(spec.dir)
    assert newest.step == 9, outcome.log
    assert newest.manifest.inexact == ("values of step 9 that the script of rank 0 had not yet read are lost",)
    again = plain.run(spec.plain())
    expected = uninterrupted(plain, spec)
    different = [line for line, other in zip(again.printed[0], expected[0], strict=True) if line != other]
    assert [line.split()[:2] for line in different] == [["step", "9"]]
    assert again.printed[1] == expected[1]


def test_another_number_of_ranks_is_refused_in_plain_words(plain, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), "plain_ddp", 2, [{"at": "step 3"}])
    assert set(plain.run(spec).codes) == {143}
    outcome = plain.run(spec.plain(world=3))
    assert outcome.codes == [1, 1, 1]
    assert "was saved by 2 ranks, and this job has 3: a loop is replayed by as many ranks as before" in outcome.log
    go_on(plain, spec)


@pytest.mark.slow
def test_sigterm_to_torchrun(plain, tmp_path):
    """The launcher passes it on to its ranks, and the same command goes on."""
    spec = drill.Spec(str(tmp_path / "run"), "plain_ddp", 2)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    environment = {
        **kept,
        "HOLDFAST_ENABLED": "1",
        "HOLDFAST_DIR": spec.dir,
        "HOLDFAST_KILL_WAIT": "0",
        "OMP_NUM_THREADS": "1",
        "PAUSE": "1",
    }
    script = str(drill.SCRIPTS / "plain_ddp.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    printed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if line.startswith("step 4 "):
                process.send_signal(signal.SIGTERM)
    assert process.returncode != 0
    assert 4 <= assert_whole(spec.dir).step < 18
    again = subprocess.run(
        command, stdout=subprocess.PIPE, env={**environment, "PAUSE": "0"}, text=True, timeout=240, check=True
    )
    for lines in uninterrupted(plain, spec):
        for line in lines:
            assert line in again.stdout


def forget(folder: str, rank: int) -> int:
    """Make the newest checkpoint one that a survivor on another machine has saved, without that rank's part."""
    newest = assert_whole(folder)
    files = tuple(entry for entry in newest.manifest.files if entry.path != f"rank-{rank:05d}.safetensors")
    assert len(files) == len(newest.manifest.files) - 1, newest.manifest.files
    lost = (f"the random state and data position of rank {rank} are lost",)
    manifest = dataclasses.replace(newest.manifest, files=files, inexact=lost)
    newest.backend.amend(newest.name, manifest.encode())
    return newest.step


def test_a_rank_whose_part_died_with_its_machine_goes_on_with_anothers_though_that_has_read_more(plain, tmp_path):
    # Rank 0 alone reads the loss after each step, to print it.
    spec = drill.Spec(str(tmp_path / "run"), "plain_ddp", 2, [{"at": "step 9"}], {"EVALUATE": "0"})
    assert set(plain.run(spec).codes) == {143}
    step = forget(spec.dir, 1)
    again = plain.run(dataclasses.replace(spec, faults=[{"at": "step 14"}]))
    assert set(again.codes) == {143}, again.log
    assert "holds no random state of rank 1" in again.log
    assert assert_whole(spec.dir).step > step
    done = plain.run(spec.plain())
    assert done.codes == [0, 0], done.log
    assert assert_whole(spec.dir).manifest.complete
