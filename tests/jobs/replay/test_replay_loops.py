"""Unchanged scripts of one process, stopped anywhere: started again they end with the same bits."""

from __future__ import annotations

import pytest

from tests.jobs.replay import drill
from tests.jobs.replay.checks import check, go_on, uninterrupted
from tests.kit.checks import assert_whole

CASES = {
    "plain_mnist": ["epoch 2 batch 4", "backward 1", "optimizer 17", "test 1 batch 1", "epoch 1 mean"],
    "plain_tricks": ["step 7", "backward 30", "epoch 1"],
    "plain_getbatch": ["iteration 14 loss", "optimizer 7", "estimate 3"],
    "plain_gan": ["step 11", "after-optimizer 9"],
    "plain_plateau": ["epoch 4 batch 3", "epoch 5 loss"],
    "plain_accelerate": ["step 15", "evaluation 2"],
}


@pytest.fixture(scope="module")
def plain():
    """Runs plain PyTorch scripts; see drill.py."""
    server = drill.Server()
    yield server
    server.close()


@pytest.mark.core(2)
@pytest.mark.parametrize(
    ("script", "place"),
    [pytest.param(script, place, id=f"{script}-{place}") for script, places in CASES.items() for place in places],
)
@pytest.mark.share(4)
def test_a_script_that_is_stopped_anywhere_ends_with_the_same_bits(plain, tmp_path, script, place):
    check(plain, drill.Spec(str(tmp_path / "run"), script, faults=[{"at": place}]))


@pytest.mark.parametrize("place", ["backward 39", "after-optimizer 39", "test 3 loss"])
def test_a_notice_in_or_after_the_last_step_lets_the_run_end_or_saves_it(plain, tmp_path, place):
    check(plain, drill.Spec(str(tmp_path / "run"), "plain_mnist", faults=[{"at": place}]), may_end=True)


@pytest.mark.core(3)
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("scaler", "backward 4"),
        ("lbfgs", "step 3"),
        ("loose", "step 8"),
        ("compiled", "step 7"),
        ("sampler", "step 8"),
        ("mixed", "step 16"),
        ("endless", "step 11"),
        ("stateful", "step 5"),
    ],
)
@pytest.mark.share(3)
def test_loops_of_other_kinds(plain, tmp_path, kind, place):
    check(plain, drill.Spec(str(tmp_path / "run"), "plain_kinds", faults=[{"at": place}], options=[kind]))


@pytest.mark.core
def test_variables_that_hold_much_are_restored(plain, tmp_path):
    """A deque of 6,000 transitions, closures, generators, slots, thirty dataclasses one inside the other."""
    check(plain, drill.Spec(str(tmp_path / "run"), "plain_memory", faults=[{"at": "step 5"}]))


def test_a_variable_that_finds_no_room_is_named_at_the_save_and_at_the_resume(plain, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), "plain_memory", 1, [{"at": "step 3"}], {"COUNT": "600", "ROOM": "2000"})
    first = plain.run(spec)
    assert first.codes == [143]
    assert "lacks variables of the script: main: memory" in first.log
    (said,) = assert_whole(spec.dir).manifest.inexact
    assert said.startswith("variables of rank 0: ")
    assert "found no room" in said
    assert "the checkpoint lacks variables of the script" in plain.run(spec.plain()).log


@pytest.mark.core
def test_many_interruptions_end_with_the_same_bits(plain, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), "plain_tricks", env={"HOLDFAST_SAVE_EVERY": "5 steps"})
    for place in ("step 3", "step 9", "backward 52", "step 21", "epoch 2"):
        outcome = plain.run(drill.Spec(**{**vars(spec), "faults": [{"at": place}]}))
        assert outcome.codes == [143], outcome.log
    go_on(plain, spec)


def test_a_stop_inside_a_periodic_save(plain, tmp_path):
    env = {"HOLDFAST_SAVE_EVERY": "4 steps"}
    check(plain, drill.Spec(str(tmp_path / "run"), "plain_gan", faults=[{"at": "save 8"}], env=env))
    check(plain, drill.Spec(str(tmp_path / "other"), "plain_getbatch", faults=[{"at": "commit 8"}], env=env))


def test_saves_by_epochs_come_at_the_end_of_each_pass_that_trains(plain, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), "plain_mnist", env={"HOLDFAST_SAVE_EVERY": "1 epoch"})
    outcome = plain.run(spec)
    assert outcome.printed == uninterrupted(plain, spec)
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [
        "checkpoint-13",
        "checkpoint-26",
        "checkpoint-39",
    ]


def test_a_complete_run_that_is_started_again_does_not_train_and_ends_alike(plain, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), "plain_plateau")
    first = plain.run(spec)
    assert first.codes == [0], first.log
    again = go_on(plain, spec)
    assert "where it is complete (HOLDFAST_RESUME=never starts it anew)" in again.log
    anew = plain.run(spec.plain(env={"HOLDFAST_RESUME": "never"}))
    assert anew.printed == first.printed
    assert "starting anew as told" in anew.log
