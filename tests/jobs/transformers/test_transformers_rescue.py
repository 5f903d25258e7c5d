"""A rank of a Trainer is killed without a word, or fails: the others save, and at most the step in flight is lost."""

from __future__ import annotations

import pytest

from tests.jobs.transformers import drill
from tests.jobs.transformers.checks import EVALUATE, SAVE, assert_same, fault, without_holdfast
from tests.kit.checks import assert_whole

KILL = {"action": "KILL"}


@pytest.fixture
def server() -> drill.Server:
    return drill.shared()


def check(server: drill.Server, spec: drill.Spec, killed: int, step: int) -> None:
    outcome = server.run(spec)
    assert outcome.codes[killed] == -9, outcome.log
    assert all(code in (1, 143) for rank, code in enumerate(outcome.codes) if rank != killed), outcome.log
    newest = assert_whole(spec.dir)
    assert newest.step >= step - 1, f"step {newest.step} is left of {step}\n{outcome.log}"
    assert not newest.manifest.inexact, outcome.log
    resumed = server.run(spec.plain())
    assert resumed.codes == [0] * spec.world, resumed.log
    assert_same(resumed, without_holdfast(server, spec))


@pytest.mark.core(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "optimizer", "after-optimizer", "evaluation"])
@pytest.mark.share(3)
def test_sigkill_of_a_rank_of_two_loses_at_most_the_step_in_flight(server, tmp_path, phase, rank):
    spec = drill.Spec(str(tmp_path / "run"), world=2, args=EVALUATE, faults=[fault(phase, 12, rank, **KILL)])
    check(server, spec, rank, 12 if phase != "evaluation" else 13)


@pytest.mark.parametrize("rank", [0, 1])
def test_sigkill_inside_a_periodic_save(server, tmp_path, rank):
    spec = drill.Spec(str(tmp_path / "run"), world=2, args=SAVE, faults=[fault("save", 8, rank, **KILL)])
    check(server, spec, rank, 8)


@pytest.mark.parametrize("rank", [0, 2])
def test_sigkill_of_a_rank_of_three(server, tmp_path, rank):
    faults = [fault("forward", 5, rank, **KILL)]
    check(server, drill.Spec(str(tmp_path / "run"), world=3, store="agent", faults=faults), rank, 5)


def test_a_dead_ranks_draws_for_its_data_are_known(server, tmp_path):
    options, faults = ["--augment"], [fault("forward", 5, 1, **KILL)]
    check(server, drill.Spec(str(tmp_path / "run"), world=2, options=options, faults=faults), 1, 5)


def test_sigkill_between_two_batches_of_a_step(server, tmp_path):
    args, faults = {"gradient_accumulation_steps": 2}, [fault("optimizer", 4, 1, **KILL)]
    check(server, drill.Spec(str(tmp_path / "run"), world=2, args=args, faults=faults), 1, 4)


def test_running_statistics_are_those_of_the_last_boundary(server, tmp_path):
    options, faults = ["--batchnorm"], [fault("forward", 5, 0, **KILL)]
    check(server, drill.Spec(str(tmp_path / "run"), world=2, options=options, faults=faults), 0, 5)


def test_an_exception_saves_the_last_step_and_is_not_swallowed(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), faults=[fault("optimizer", 9, action="RAISE")])
    outcome = server.run(spec)
    assert outcome.codes == [1]
    assert "InjectedError" in outcome.log
    newest = assert_whole(spec.dir)
    assert (newest.step, newest.manifest.reason) == (8, "rescue")
    assert_same(server.run(spec.plain()), without_holdfast(server, spec))


def test_an_exception_on_one_of_two_ranks_is_told_to_the_other(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), world=2, faults=[fault("optimizer", 9, 1, action="RAISE")])
    outcome = server.run(spec)
    assert outcome.codes[1] == 1
    assert outcome.codes[0] in (1, 143)
    assert assert_whole(spec.dir).step >= 8
    assert_same(server.run(spec.plain()), without_holdfast(server, spec))


def test_a_loop_that_is_left_and_entered_again_goes_on(server, tmp_path):
    """As in a notebook: interrupted by hand, and trained once more."""
    spec = drill.Spec(str(tmp_path / "run"), options=["--again"], faults=[fault("forward", 9, action="INT")])
    outcome = server.run(spec)
    assert outcome.codes == [0], outcome.log
    assert "resuming from" in outcome.log
    assert outcome.result["model"] == without_holdfast(server, spec).result["model"]
