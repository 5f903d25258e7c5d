"""SIGTERM to any rank, in any phase, with any skew: no completed step is lost, and the end is the same, bit for bit."""

from __future__ import annotations

import signal

import pytest

from tests.jobs.torch import drill
from tests.jobs.torch.checks import uninterrupted
from tests.kit.checks import assert_whole, last_completed_when_noticed
from tests.kit.jobs import journal

PHASES = ["forward", "backward", "optimizer", "after-optimizer", "save", "evaluation"]

# who gets SIGTERM first (in the phase itself), who else, how much later
TARGETS = {
    "rank0": (0, (), 0.0),
    "rank1": (1, (), 0.0),
    "all": (0, (1,), 0.0),
    "all-0.1s": (0, (1,), 0.1),
    "all-1s": (1, (0,), 1.0),
}


def fault(phase: str, rank: int, step: int = 12, **more) -> dict:
    return {"rank": rank, "step": step, "phase": phase, **more}


def check(server, spec: drill.Spec, limit_s: float = 40.0) -> None:
    """Interrupt, look at what is left, resume without faults, and compare."""
    plain = {"faults": [], "settings": {}, "step_s": 0.0, "evaluation_s": 0.0}
    outcome = server.run(spec, limit_s)
    assert set(outcome.codes) == {143}, outcome.log
    newest = assert_whole(spec.dir)
    assert newest.step >= last_completed_when_noticed(spec.dir), outcome.log
    assert not newest.manifest.inexact
    resumed = server.run(drill.Spec(**{**vars(spec), **plain}), limit_s)
    assert resumed.codes == [0] * spec.world, resumed.log
    assert resumed.results[0]["first"] == newest.step
    assert resumed.digest == uninterrupted(server, spec).digest, resumed.log


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.share(5)
def test_sigterm_loses_no_completed_step_and_resume_is_exact(server, tmp_path, phase, target):
    rank, also, skew_s = TARGETS[target]
    spec = drill.Spec(
        str(tmp_path / "run"),
        save_every="4 steps",
        evaluate_every=6,
        settings={"kill_wait": 1.3 if skew_s >= 1 else 0.0},
        step_s=0.05 if skew_s >= 1 else 0.0,
        faults=[fault(phase, rank, also=also, skew_s=skew_s)],
    )
    check(server, spec)


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_to_a_run_of_one_process(server, tmp_path, phase):
    check(
        server, drill.Spec(str(tmp_path / "run"), 1, save_every="4 steps", evaluate_every=6, faults=[fault(phase, 0)])
    )


@pytest.mark.parametrize("store", ["rank0", "agent"])
def test_three_ranks_agree_wherever_the_store_lives(server, tmp_path, store):
    check(server, drill.Spec(str(tmp_path / "run"), 3, store=store, faults=[fault("backward", 2, 5)]))


def test_a_second_and_a_third_signal_change_nothing(server, tmp_path):
    faults = [fault("backward", 0, 8), fault("forward", 0, 9), fault("backward", 1, 9)]
    check(server, drill.Spec(str(tmp_path / "run"), settings={"kill_wait": 0.3}, step_s=0.02, faults=faults))


def test_a_notice_before_the_first_step_loses_nothing(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), faults=[fault("forward", 0, 1)])
    outcome = server.run(spec)
    assert set(outcome.codes) == {143}, outcome.log
    resumed = server.run(drill.Spec(spec.dir))
    assert resumed.digest == uninterrupted(server, spec).digest


def test_a_notice_after_the_last_step_lets_the_run_end(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), faults=[fault("end", 1, 36), fault("end", 0, 36)])
    outcome = server.run(spec)
    if outcome.codes != [0, 0]:
        assert set(outcome.codes) <= {0, 143}, outcome.log
    assert assert_whole(spec.dir).step == 36
    again = server.run(drill.Spec(spec.dir))
    assert again.codes == [0, 0]
    assert again.digest == uninterrupted(server, spec).digest


@pytest.mark.parametrize("behind_s", [1.0, 0.0], ids=["a-second", "for-ever"])
def test_a_notice_when_one_rank_is_at_its_end_and_another_is_not(server, tmp_path, behind_s):
    behind = fault("evaluation", 0, 36, action="HANG", skew_s=behind_s)
    spec = drill.Spec(
        str(tmp_path / "run"),
        evaluate_every=36,
        isolate_evaluation=True,
        settings={"grace_period": 20.0 if behind_s else 6.0},
        faults=[behind, fault("save", 1, 36)],
    )
    outcome = server.run(spec)
    assert outcome.codes == [0, 0] if behind_s else 143 in outcome.codes, outcome.log
    newest = assert_whole(spec.dir)
    assert (newest.step, newest.manifest.complete) == (36, bool(behind_s))
    again = server.run(drill.Spec(**{**vars(spec), "faults": []}))
    assert again.codes == [0, 0], again.log
    assert {result["steps"] for result in again.results.values()} == {36}
    assert again.digest == uninterrupted(server, spec).digest


@pytest.mark.parametrize("phase", ["save", "commit"])
def test_the_rank_that_leads_dies_while_the_end_is_saved(server, tmp_path, phase):
    spec = drill.Spec(str(tmp_path / "run"), save_every="10 steps", faults=[fault(phase, 0, 36, action="KILL")])
    outcome = server.run(spec)
    assert outcome.codes[0] == -signal.SIGKILL
    assert assert_whole(spec.dir).step == 36, outcome.log
    again = server.run(drill.Spec(spec.dir))
    assert again.codes == [0, 0], again.log
    assert again.digest == uninterrupted(server, spec).digest


def test_a_notice_while_the_last_checkpoint_is_committed_lets_the_run_end(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), faults=[fault("commit", 0, 36, also=(1,))])
    outcome = server.run(spec)
    assert outcome.codes == [0, 0], outcome.log
    assert assert_whole(spec.dir).manifest.complete


def test_a_notice_while_a_periodic_commit_is_made(server, tmp_path):
    check(server, drill.Spec(str(tmp_path / "run"), save_every="4 steps", faults=[fault("commit", 0, 12)]))


def test_a_loop_outside_the_main_thread_hears_the_signal_after_listen(server, tmp_path):
    check(server, drill.Spec(str(tmp_path / "run"), 1, in_thread=True, faults=[fault("forward", 0)]))


def test_many_interruptions_end_with_the_same_bits(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), save_every="5 steps")
    faults = [("backward", 0, 3), ("optimizer", 1, 9), ("forward", 1, 16), ("after-optimizer", 0, 22)]
    for phase, rank, step in faults:
        outcome = server.run(drill.Spec(**{**vars(spec), "faults": [fault(phase, rank, step)]}))
        assert set(outcome.codes) == {143}, outcome.log
    final = server.run(spec)
    assert final.digest == uninterrupted(server, spec).digest
    assert [event["event"] for event in journal(spec.dir)].count("attempt") == 5


def test_sigterm_to_the_whole_process_group_does_not_take_the_save_with_the_loader_workers(server, tmp_path):
    import os

    spec = drill.Spec(str(tmp_path / "run"), 1, workers=2, step_s=0.25, settings={"kill_wait": 0.2})
    job = server.start(spec)
    job.wait_for("training")
    os.killpg(job.pids[0], signal.SIGTERM)
    outcome = job.wait()
    assert outcome.codes == [143], outcome.log
    assert_whole(spec.dir)
    resumed = server.run(drill.Spec(spec.dir, 1, workers=2))
    assert resumed.digest == uninterrupted(server, spec).digest


def test_the_log_says_what_happens_in_the_words_users_look_for(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), 1, settings={"kill_wait": 0.1}, step_s=0.01, faults=[fault("forward", 0)])
    outcome = server.run(spec)
    assert "SIGTERM received, initiating JIT checkpoint in 0.1s" in outcome.log
    assert "JIT checkpoint completed in " in outcome.log


def test_another_exit_code_by_choice(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), 1, settings={"exit_code": 7}, faults=[fault("forward", 0)])
    assert server.run(spec).codes == [7]


def test_another_signal_by_choice(server, tmp_path):
    spec = drill.Spec(
        str(tmp_path / "run"), 1, settings={"signals": "USR1"}, faults=[fault("forward", 0, action="USR1")]
    )
    assert server.run(spec).codes == [143]


def test_a_file_can_be_the_notice(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), step_s=0.5, settings={"notice_file": str(tmp_path / "leave")})
    job = server.start(spec)
    job.wait_for("training")
    (tmp_path / "leave").write_text('{"grace": 15}')
    outcome = job.wait()
    assert outcome.codes == [143, 143], outcome.log
    assert_whole(spec.dir)
