"""A rank is killed without a notice: the survivors save, and at most the step in flight is lost."""

from __future__ import annotations

import pytest

from tests.jobs.torch import drill
from tests.jobs.torch.checks import uninterrupted
from tests.kit.checks import assert_whole

PHASES = ["forward", "backward", "optimizer", "after-optimizer", "save", "evaluation"]


def check(server, spec: drill.Spec, killed: int, step: int) -> None:
    outcome = server.run(spec, 40.0)
    assert outcome.codes[killed] == -9
    assert all(code in (1, 143) for rank, code in enumerate(outcome.codes) if rank != killed), outcome.log
    newest = assert_whole(spec.dir)
    assert newest.step >= step - 1, f"step {newest.step} is left of {step}\n{outcome.log}"
    assert not newest.manifest.inexact, outcome.log
    resumed = server.run(drill.Spec(**{**vars(spec), "faults": []}), 40.0)
    assert resumed.codes == [0] * spec.world, resumed.log
    assert resumed.digest == uninterrupted(server, spec).digest, resumed.log


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.share(3)
def test_sigkill_of_a_rank_of_two_loses_at_most_the_step_in_flight(server, tmp_path, phase, rank):
    faults = [{"rank": rank, "step": 12, "phase": phase, "action": "KILL"}]
    spec = drill.Spec(
        str(tmp_path / "run"), save_every="4 steps", evaluate_every=6, isolate_evaluation=True, faults=faults
    )
    check(server, spec, rank, 12 if phase not in ("save", "evaluation") else 13)


SIDES = {
    "the dead rank is behind": (1, [{"rank": 1, "step": 12, "phase": "optimizer", "action": "KILL"}], 0),
    "with loader workers": (1, [{"rank": 1, "step": 12, "phase": "after-optimizer", "action": "KILL"}], 2),
    "the dead rank is ahead": (
        0,
        [
            {"rank": 1, "step": 12, "phase": "evaluation", "action": "HANG", "skew_s": 3.0},
            {"rank": 0, "step": 13, "phase": "forward", "action": "KILL"},
        ],
        0,
    ),
}


@pytest.mark.parametrize("case", SIDES)
@pytest.mark.share(2)
def test_ranks_that_are_on_different_sides_of_the_end_of_an_epoch_resume_exactly(server, tmp_path, case):
    """Step 12 is the last of an epoch, after which the loop evaluates: opening a pass draws random numbers."""
    victim, faults, workers = SIDES[case]
    spec = drill.Spec(str(tmp_path / "run"), workers=workers, evaluate_every=6, isolate_evaluation=True, faults=faults)
    check(server, spec, victim, 12)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("phase", ["forward", "optimizer"])
@pytest.mark.share(5)
def test_sigkill_of_a_rank_of_three(server, tmp_path, phase, rank):
    faults = [{"rank": rank, "step": 9, "phase": phase, "action": "KILL"}]
    check(server, drill.Spec(str(tmp_path / "run"), 3, store="agent", faults=faults), rank, 9)


def test_a_checkpoint_says_so_when_the_dead_ranks_random_numbers_cannot_be_known(server, tmp_path):
    # The evaluation after step 12 draws random numbers and is not marked as one; the dead rank did not come to it.
    faults = [{"rank": 1, "step": 12, "phase": "optimizer", "action": "KILL"}]
    spec = drill.Spec(str(tmp_path / "run"), evaluate_every=6, faults=faults)
    outcome = server.run(spec)
    newest = assert_whole(spec.dir)
    assert newest.step == 12, outcome.log
    assert newest.manifest.inexact == ("the random state and data position of rank 1 are lost",)


def test_two_of_three_ranks_are_killed_and_the_last_one_saves(server, tmp_path):
    faults = [{"rank": rank, "step": 9, "phase": "forward", "action": "KILL"} for rank in (0, 2)]
    spec = drill.Spec(str(tmp_path / "run"), 3, faults=faults)
    outcome = server.run(spec)
    assert outcome.codes[0] == outcome.codes[2] == -9
    assert assert_whole(spec.dir).step >= 8, outcome.log
    resumed = server.run(drill.Spec(spec.dir, 3))
    assert resumed.digest == uninterrupted(server, spec).digest


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
@pytest.mark.share(3)
def test_running_statistics_are_those_of_rank_0_at_the_boundary_whoever_is_killed(server, tmp_path, phase, rank):
    faults = [{"rank": rank, "step": 9, "phase": phase, "action": "KILL"}]
    check(server, drill.Spec(str(tmp_path / "run"), batchnorm=True, faults=faults), rank, 9)


def test_gradient_accumulation_with_a_kill_between_micro_batches(server, tmp_path):
    faults = [{"rank": 0, "step": 4, "phase": "forward", "action": "KILL"}]
    check(server, drill.Spec(str(tmp_path / "run"), accumulate=3, samples=144, faults=faults), 0, 4)


def test_loader_workers_and_a_killed_rank(server, tmp_path):
    faults = [{"rank": 1, "step": 9, "phase": "forward", "action": "KILL"}]
    check(server, drill.Spec(str(tmp_path / "run"), workers=2, faults=faults), 1, 9)


def test_an_exception_in_the_users_code_saves_the_last_step_and_is_not_swallowed(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), 1, faults=[{"rank": 0, "step": 9, "phase": "forward", "action": "RAISE"}])
    outcome = server.run(spec)
    assert outcome.codes == [1]
    assert "InjectedError" in outcome.log
    newest = assert_whole(spec.dir)
    assert (newest.step, newest.manifest.reason) == (8, "rescue")
    assert server.run(drill.Spec(spec.dir, 1)).digest == uninterrupted(server, spec).digest


def test_an_exception_on_one_of_two_ranks_is_told_to_the_other(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), faults=[{"rank": 1, "step": 9, "phase": "forward", "action": "RAISE"}])
    outcome = server.run(spec)
    assert outcome.codes[1] == 1
    assert outcome.codes[0] in (1, 143)
    assert assert_whole(spec.dir).step == 8
    assert server.run(drill.Spec(spec.dir)).digest == uninterrupted(server, spec).digest


def test_an_exception_inside_the_optimizer_step_saves_nothing_half_changed(server, tmp_path):
    faults = [{"rank": 0, "step": 9, "phase": "after-optimizer", "action": "RAISE"}]
    spec = drill.Spec(str(tmp_path / "run"), 1, save_every="4 steps", faults=faults)
    outcome = server.run(spec)
    assert outcome.codes == [1]
    assert assert_whole(spec.dir).step == 8
    assert server.run(drill.Spec(spec.dir, 1)).digest == uninterrupted(server, spec).digest


@pytest.mark.parametrize(("phase", "rank"), [("save", 0), ("save", 1), ("commit", 0)])
def test_a_rank_killed_in_the_middle_of_the_just_in_time_save(server, tmp_path, phase, rank):
    faults = [
        {"rank": 0, "step": 9, "phase": "forward", "action": "TERM"},
        *[{"rank": rank, "step": step, "phase": phase, "action": "KILL"} for step in range(9, 37)],
    ]
    spec = drill.Spec(str(tmp_path / "run"), store="agent", faults=faults)
    outcome = server.run(spec, 40.0)
    assert outcome.codes[rank] == -9, outcome.log
    newest = assert_whole(spec.dir)
    assert newest.step >= 9, outcome.log
    resumed = server.run(drill.Spec(spec.dir))
    assert resumed.digest == uninterrupted(server, spec).digest, resumed.log
