"""A Trainer gets SIGTERM: on any rank, anywhere, with any skew. No completed step is lost, and the end is the same."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.jobs.transformers import drill
from tests.jobs.transformers.checks import (
    EVALUATE,
    SAVE,
    assert_same,
    fault,
    interrupt_and_resume,
    steps_in,
    without_holdfast,
)
from tests.kit.checks import assert_whole
from tests.kit.jobs import journal

PHASES = ["forward", "optimizer", "after-optimizer", "log", "evaluation", "evaluated", "save", "commit"]
BOTH = {**EVALUATE, "save_strategy": "steps", "save_steps": 12, "logging_steps": 6}

# who gets SIGTERM first, in the phase itself, who else, how much later
TARGETS = {
    "rank0": (0, (), 0.0),
    "rank1": (1, (), 0.0),
    "all": (0, (1,), 0.0),
    "all-0.1s": (1, (0,), 0.1),
    "all-1s": (0, (1,), 1.0),
}


@pytest.fixture
def server() -> drill.Server:
    return drill.shared()


@pytest.mark.core(2)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.share(3)
def test_one_process_is_told_in(server, tmp_path, phase):
    interrupt_and_resume(server, drill.Spec(str(tmp_path / "run"), args=BOTH, faults=[fault(phase, 12)]))


@pytest.mark.core(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("phase", ["forward", "optimizer", "after-optimizer", "log", "evaluation", "save"])
@pytest.mark.share(5)
def test_two_ranks_agree_when_told_in(server, tmp_path, phase, target):
    rank, also, skew_s = TARGETS[target]
    if phase == "save" and rank == 1:
        phase = "evaluated"  # only rank 0 writes files that both wait for
    spec = drill.Spec(
        str(tmp_path / "run"),
        world=2,
        args=BOTH,
        # The second signal comes within the wait, and the wait ends before the last of the six steps that are left.
        env={"HOLDFAST_KILL_WAIT": "1.1"} if skew_s >= 1 else {},
        slow_step_s=0.25 if skew_s >= 1 else 0.0,
        faults=[fault(phase, 12, rank, also=list(also), skew_s=skew_s)],
    )
    interrupt_and_resume(server, spec)


@pytest.mark.core
@pytest.mark.parametrize("rank", [0, 1])
def test_a_long_evaluation_is_not_waited_for(server, tmp_path, rank):
    spec = drill.Spec(
        str(tmp_path / "run"),
        world=2,
        args={**EVALUATE, "per_device_eval_batch_size": 1},
        slow_evaluation_s=2.0,  # twelve batches
        faults=[fault("evaluation", 6, rank)],
    )
    interrupt_and_resume(server, spec)
    assert steps_in(spec.dir)[0] == 6
    ends = [event["since_notice_s"] for event in journal(spec.dir) if event.get("outcome") == "preempted"]
    assert len(ends) == 2
    assert max(ends) < 15, "it waited for the evaluation"


def test_an_evaluation_at_the_end_of_an_epoch_is_done_again(server, tmp_path):
    args = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    spec = drill.Spec(str(tmp_path / "run"), args=args, faults=[fault("evaluation", 12)])
    interrupt_and_resume(server, spec)


def test_the_end_of_an_epoch_belongs_to_its_last_step(server, tmp_path):
    args = {"eval_strategy": "epoch", "logging_strategy": "epoch"}
    spec = drill.Spec(str(tmp_path / "run"), args=args, faults=[fault("optimizer", 12)])
    interrupt_and_resume(server, spec)


def test_a_notice_before_the_first_step_loses_nothing(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), world=2, faults=[fault("start", 0, 1)])
    outcome = server.run(spec)
    assert set(outcome.codes) == {143}, outcome.log
    assert_same(server.run(spec.plain()), without_holdfast(server, spec))


@pytest.mark.parametrize("phase", ["forward", "optimizer"])
def test_a_notice_in_the_first_step(server, tmp_path, phase):
    interrupt_and_resume(server, drill.Spec(str(tmp_path / "run"), world=2, faults=[fault(phase, 1)]))


@pytest.mark.parametrize("phase", ["optimizer", "epoch", "commit"])
def test_a_notice_in_the_last_step_ends_well_one_way_or_the_other(server, tmp_path, phase):
    spec = drill.Spec(str(tmp_path / "run"), world=2, faults=[fault(phase, 18, 0, also=[1])])
    outcome = server.run(spec)
    assert set(outcome.codes) in ({0}, {143}), outcome.log
    assert assert_whole(spec.dir).step == 18
    again = server.run(spec.plain())
    assert again.codes == [0, 0], again.log
    plain = without_holdfast(server, spec)
    assert again.result["model"] == plain.result["model"]
    assert again.trained == plain.trained


def test_a_second_and_a_third_signal_change_nothing(server, tmp_path):
    faults = [fault("forward", 8), fault("optimizer", 8), fault("forward", 8, 1), fault("optimizer", 9, 1)]
    env = {"HOLDFAST_KILL_WAIT": "0.3"}
    spec = drill.Spec(str(tmp_path / "run"), world=2, env=env, slow_step_s=0.05, faults=faults)
    assert "received again, already saving" in interrupt_and_resume(server, spec).log


def test_many_interruptions_end_with_the_same_bits(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), world=2, args=BOTH)
    for phase, rank, step in [("forward", 0, 2), ("log", 1, 6), ("evaluation", 0, 12), ("optimizer", 1, 17)]:
        outcome = server.run(spec.plain(faults=[fault(phase, step, rank)]))
        assert set(outcome.codes) == {143}, outcome.log
    final = server.run(spec)
    assert final.codes == [0, 0], final.log
    assert_same(final, without_holdfast(server, spec))


@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_to_all_processes_of_a_rank_in_an_evaluation(server, tmp_path, workers):
    """Loader workers get it too: one that dies raises in the trainer, wherever that is."""
    args = {**EVALUATE, "dataloader_num_workers": workers, "per_device_eval_batch_size": 2}
    spec = drill.Spec(str(tmp_path / "run"), args=args, slow_evaluation_s=0.25)
    job = server.start(spec)
    job.wait_for("training")
    while "eval_loss" not in job.log():
        assert job.alive(), job.log()
        time.sleep(0.02)
    os.killpg(job.pids[0], signal.SIGTERM)
    outcome = job.wait()
    assert outcome.codes == [143], outcome.log
    assert assert_whole(spec.dir).step >= 6
    assert_same(server.run(spec.plain()), without_holdfast(server, spec))


@pytest.mark.core
def test_the_log_says_what_happens_in_the_words_users_look_for(server, tmp_path):
    env = {"HOLDFAST_KILL_WAIT": "0.1"}
    spec = drill.Spec(str(tmp_path / "run"), env=env, slow_step_s=0.02, faults=[fault("forward", 5)])
    outcome = server.run(spec)
    for line in (
        "[Kubeflow] JIT checkpoint signal handler registered for SIGTERM",
        "[Kubeflow] JIT checkpointing enabled",
        "SIGTERM received, initiating JIT checkpoint in 0.1s",
        "JIT checkpoint completed in ",
    ):
        assert line in outcome.log


def test_another_exit_code_by_choice(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), env={"HOLDFAST_EXIT_CODE": "7"}, faults=[fault("forward", 5)])
    assert server.run(spec).codes == [7]


@pytest.mark.core
def test_enable_jit_checkpoint_is_taken_over_without_any_variable(server, tmp_path):
    spec = drill.Spec(
        str(tmp_path / "run"),
        world=2,
        args={"enable_jit_checkpoint": True},
        env={"HOLDFAST_ENABLED": ""},
        faults=[fault("forward", 5, 1)],
    )
    assert "[Kubeflow] JIT checkpointing enabled" in interrupt_and_resume(server, spec).log


def test_without_a_variable_and_without_the_argument_nothing_is_done(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), args=SAVE, env={"HOLDFAST_ENABLED": ""})
    outcome = server.run(spec)
    assert outcome.codes == [0]
    assert "Kubeflow" not in outcome.log
    assert not (tmp_path / "run/.holdfast").exists()
    assert not (tmp_path / "run/checkpoint-4/holdfast.json").exists()
