"""An interrupted Trainer ends with the same bits, and the same log, as transformers alone without interruption."""

from __future__ import annotations

import pytest

from tests.jobs.transformers import drill
from tests.jobs.transformers.checks import (
    EVALUATE,
    assert_same,
    fault,
    interrupt_and_resume,
    steps_in,
    without_holdfast,
)
from tests.kit.checks import assert_whole

GROUPED = {"train_sampling_strategy": "group_by_length"}
BY_METRIC = {**EVALUATE, "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "eval_loss"}

SHAPES = {
    "gradient accumulation": {"args": {"gradient_accumulation_steps": 3}},
    "gradient accumulation that does not divide the epoch": {"args": {"gradient_accumulation_steps": 5}},
    "loader workers": {"args": {"dataloader_num_workers": 2}},
    "a dataset that draws random numbers": {"options": ["--augment"]},
    "a dataset that draws, with accumulation": {"options": ["--augment"], "args": {"gradient_accumulation_steps": 3}},
    "loader workers that draw random numbers": {"options": ["--augment"], "args": {"dataloader_num_workers": 2}},
    "persistent workers that draw": {
        "options": ["--augment"],
        "args": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
    },
    "batches grouped by length": {"options": ["--varied"], "args": GROUPED},
    "an iterable dataset": {"options": ["--stream"], "args": {"max_steps": 30}},
    "a schedule that follows a metric": {"args": BY_METRIC},
    "a number of steps that ends within an epoch": {"args": {"max_steps": 22}},
    "another data seed": {"args": {"data_seed": 13}},
    "two ranks": {"world": 2},
    "two ranks with accumulation": {"world": 2, "args": {"gradient_accumulation_steps": 2}},
    "two ranks with workers that draw": {
        "world": 2,
        "options": ["--augment"],
        "args": {"dataloader_num_workers": 1},
    },
    "two ranks with a dataset that draws": {"world": 2, "options": ["--augment"]},
    "two ranks grouped by length": {"world": 2, "options": ["--varied"], "args": GROUPED},
    "two ranks and an iterable dataset": {"world": 2, "options": ["--stream"], "args": {"max_steps": 16}},
    "three ranks whose gradients are added in an order": {
        "world": 3,
        "options": ["--width", "200"],
        "args": {"ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 1},
    },
}


@pytest.fixture
def server() -> drill.Server:
    return drill.shared()


@pytest.mark.core(2)
@pytest.mark.share(4)
@pytest.mark.parametrize("shape", SHAPES)
def test_resume_is_exact_with(server, tmp_path, shape):
    """Interrupted once in the first epoch and once in the second."""
    spec = drill.Spec(str(tmp_path / "run"), **SHAPES[shape])
    plain = without_holdfast(server, spec)
    total = plain.result["step"]
    for step in (max(2, total // 9), total // 2):
        outcome = server.run(spec.plain(faults=[fault("optimizer", step, spec.world - 1)]))
        assert set(outcome.codes) == {143}, outcome.log
        assert not assert_whole(spec.dir).manifest.inexact
    resumed = server.run(spec)
    assert resumed.codes == [0] * spec.world, resumed.log
    assert_same(resumed, plain)


def test_epochs_that_a_callback_ends_before_their_time(server, tmp_path):
    args = {"num_train_epochs": 4, "eval_strategy": "steps", "eval_steps": 3, "logging_strategy": "epoch"}
    # Slow enough that each notice is heard before the next one is due.
    spec = drill.Spec(str(tmp_path / "run"), options=["--short-epochs"], args=args, slow_step_s=0.05)
    for phase, step in (("optimizer", 7), ("evaluation", 9), ("optimizer", 14), ("evaluation", 18)):
        outcome = server.run(spec.plain(faults=[fault(phase, step)]))
        assert outcome.codes == [143], outcome.log
    resumed = server.run(spec)
    assert resumed.codes == [0], resumed.log
    assert_same(resumed, without_holdfast(server, spec))


@pytest.mark.core
def test_holdfast_alone_changes_nothing(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), world=2, options=["--augment"], args=EVALUATE)
    assert_same(server.run(spec), without_holdfast(server, spec))


@pytest.mark.parametrize("every", ["5 steps", "6 steps", "1 epoch", "0.05s"])
def test_periodic_saves_by_setting_are_exact_to_go_on_from(server, tmp_path, every):
    """All ranks are killed without a word: what the last periodic save holds is what is left."""
    faults = [fault("forward", 16, rank, action="KILL") for rank in (0, 1)]
    spec = drill.Spec(
        str(tmp_path / "run"),
        world=2,
        args=EVALUATE,
        env={"HOLDFAST_SAVE_EVERY": every},
        faults=faults,
        slow_step_s=0.2 if every.endswith("s") and "steps" not in every else 0.02,
    )
    outcome = server.run(spec)
    assert outcome.codes == [-9, -9]
    newest = assert_whole(spec.dir)
    assert newest.manifest.reason == "periodic"
    resumed = server.run(spec.plain())
    assert resumed.codes == [0, 0], resumed.log
    assert_same(resumed, without_holdfast(server, spec))


@pytest.mark.parametrize("strategy", ["steps", "epoch", "best"])
def test_the_trainers_own_saves_are_exact_to_go_on_from(server, tmp_path, strategy):
    args = {
        "save_strategy": strategy,
        "save_steps": 6,
        "eval_strategy": "epoch" if strategy == "epoch" else "steps",
        "eval_steps": 6,
        "metric_for_best_model": "eval_loss",
    }
    spec = drill.Spec(str(tmp_path / "run"), args=args, faults=[fault("forward", 28, action="KILL")])
    outcome = server.run(spec)
    assert outcome.codes == [-9]
    assert_whole(spec.dir)
    resumed = server.run(spec.plain())
    assert resumed.codes == [0], resumed.log
    assert_same(resumed, without_holdfast(server, spec))


def test_more_epochs_than_before_go_on_from_the_end(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), args={"num_train_epochs": 2, "lr_scheduler_type": "constant"})
    assert server.run(spec).codes == [0]
    longer = spec.plain(args={**spec.args, "num_train_epochs": 3})
    resumed = server.run(longer)
    assert "step 24" in resumed.log
    assert resumed.result["digest"] == without_holdfast(server, longer).result["digest"]


def test_two_trainings_in_one_script_are_two_runs(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), options=["--times", "2"])
    first = server.run(spec.plain(faults=[fault("forward", 20)]))
    assert first.codes == [143], first.log
    second = server.run(spec.plain(faults=[fault("forward", 4)]))  # the first is over by then
    assert second.codes == [143], second.log
    assert steps_in(f"{spec.dir}/train-2")
    last = server.run(spec)
    assert last.codes == [0], last.log
    assert last.result["model"] == without_holdfast(server, spec).result["model"]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_and_says_what_is_not_exact(server, tmp_path, before, after):
    spec = drill.Spec(str(tmp_path / "run"), world=before, faults=[fault("forward", 7)])
    server.run(spec)
    resumed = server.run(spec.plain(world=after))
    assert resumed.codes == [0] * after, resumed.log
    assert f"saved by {before} ranks and is loaded by {after}" in resumed.log


def test_a_batch_size_that_is_found_by_trying_starts_over(server, tmp_path):
    args = {"auto_find_batch_size": True, "per_device_train_batch_size": 8, "save_strategy": "steps", "save_steps": 2}
    spec = drill.Spec(str(tmp_path / "run"), options=["--memory", "6"], args=args)
    plain = without_holdfast(server, spec)
    outcome = server.run(spec.plain(faults=[fault("forward", 15)]))
    assert outcome.codes == [143], outcome.log
    resumed = server.run(spec)
    assert resumed.codes == [0], resumed.log
    assert resumed.result["digest"] == plain.result["digest"]


def test_a_run_that_has_just_begun_again_is_told_to_leave(server, tmp_path):
    """With or without a step of its own."""
    spec = drill.Spec(str(tmp_path / "run"), world=2, faults=[fault("forward", 7)])
    server.run(spec)
    again = spec.plain(faults=[fault("start", steps_in(spec.dir)[-1], 1)])
    interrupt_and_resume(server, again)
