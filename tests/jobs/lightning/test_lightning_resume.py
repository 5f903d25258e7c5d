"""``Trainer.fit`` of a script that does not know holdfast, stopped everywhere: it ends with the same bits."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.jobs.lightning.drill import Outcome, Server, Spec, shared
from tests.kit.checks import assert_whole, last_completed_when_noticed
from tests.kit.jobs import journal

COMPARED = ("digests", "steps", "epochs", "metrics", "best", "lr", "waited", "seen")
_known: dict[str, Outcome] = {}


@pytest.fixture(scope="module")
def server():
    return shared()


def fault(
    step: int, phase: str, *, rank: int = 0, action: str = "TERM", also: tuple[int, ...] = (), skew_s=0.0
) -> dict:
    return {"rank": rank, "step": step, "phase": phase, "action": action, "also": list(also), "skew_s": skew_s}


def undisturbed(server: Server, tmp_path: Path, args: list[str], world: int = 1) -> list[dict]:
    """Of a run without holdfast that nobody stopped; once for each kind."""
    key = json.dumps([world, args])
    if key not in _known:
        _known[key] = server.run(Spec(str(tmp_path / "undisturbed"), args, world, on=False))
        assert _known[key].codes == [0] * world, _known[key].log
    return _known[key].results


def assert_same(outcome: Outcome, expected: list[dict], but: str = "") -> None:
    assert outcome.codes == [0] * len(expected), outcome.log
    names = [name for name in COMPARED if name != but]
    for found, wanted in zip(outcome.results, expected, strict=True):
        assert {name: found[name] for name in names} == {name: wanted[name] for name in names}


def stop_and_go_on(server, tmp_path, args, faults, world=1, **env) -> tuple[Outcome, Outcome]:
    """Nothing that was completed is lost, and the end is the same."""
    expected = undisturbed(server, tmp_path, args, world)
    job = Spec(str(tmp_path / "run"), args, world, faults=faults, env=env)
    stopped = server.run(job)
    assert stopped.codes == [143] * world, stopped.log
    saved = [event for event in journal(job.dir) if event["event"] == "commit" and event["reason"] == "jit"]
    noticed = last_completed_when_noticed(job.dir)
    if noticed:
        assert len(saved) == 1
        assert assert_whole(job.dir).step >= noticed
    again = server.run(Spec(job.out, args, world, env=env))
    assert_same(again, expected)
    return stopped, again


ALONE = {
    "in the middle of an epoch": ([], fault(7, "forward")),
    "before the first step": ([], fault(0, "start")),
    "in the first step": ([], fault(1, "forward")),
    "in the optimizer": ([], fault(20, "optimizer")),
    "between the optimizer and the end of the batch": ([], fault(20, "after-optimizer")),
    "in the last step": ([], fault(36, "forward")),
    "in the last step of an epoch": ([], fault(12, "after-optimizer")),
    "at the end of an epoch": ([], fault(12, "epoch-end")),
    "in a validation": (["--val-s", "0.2"], fault(24, "evaluation")),
    "in a validation within an epoch": (["--val-interval", "5", "--val-s", "0.1"], fault(17, "evaluation")),
    "where only some epochs are validated": (["--val-every", "2"], fault(20, "forward")),
    "while gradients are accumulated": (["--accumulate", "5"], fault(4, "forward")),
    "with loader workers": (["--workers", "2"], fault(18, "forward")),
    "with max_steps": (["--max-steps", "17"], fault(17, "forward")),
    "with a plateau scheduler": (["--plateau"], fault(21, "forward")),
    "with a metric object": (["--metric"], fault(24, "forward")),
    "with averaged weights in a validation": (["--average", "--val-s", "0.1"], fault(12, "evaluation")),
    "with manual optimization": (["--manual"], fault(18, "forward")),
    "with an iterable dataset": (["--loader", "iterable"], fault(18, "forward")),
    "with a stateful loader": (["--loader", "stateful"], fault(18, "forward")),
    "with two loaders": (["--loader", "pair"], fault(20, "forward")),
    "with loaders that are made anew": (["--reload", "1"], fault(18, "forward")),
    "with fewer batches than the loader has": (["--limit", "7"], fault(14, "after-optimizer")),
    "after a search for a learning rate": (["--find-rate"], fault(18, "forward")),
}


@pytest.mark.core(2)
@pytest.mark.share(5)
@pytest.mark.parametrize("case", ALONE)
def test_a_fit_that_is_stopped_goes_on_and_ends_with_the_same_bits(server, tmp_path, case) -> None:
    args, one = ALONE[case]
    stop_and_go_on(server, tmp_path, args, [one])


TWO = {
    "rank 0 alone": ([], fault(7, "forward")),
    "rank 1 alone": ([], fault(7, "backward", rank=1)),
    "both": ([], fault(8, "forward", also=(1,))),
    "both, 0.1 s apart": (["--step-s", "0.02"], fault(4, "forward", also=(1,), skew_s=0.1)),
    "both, 1 s apart": (["--step-s", "0.02"], fault(4, "forward", rank=1, also=(0,), skew_s=1.0)),
    "rank 1 in the first step": ([], fault(1, "forward", rank=1)),
    "rank 1 in the last step": ([], fault(18, "forward", rank=1)),
    "rank 1 in a validation": (["--val-s", "0.2"], fault(6, "evaluation", rank=1)),
    "accumulation and workers": (["--accumulate", "2", "--workers", "1", "--metric"], fault(5, "forward", rank=1)),
}


@pytest.mark.core
@pytest.mark.parametrize("case", TWO)
@pytest.mark.share(4)
def test_two_ranks_save_one_step_whichever_is_told(server, tmp_path, case) -> None:
    args, one = TWO[case]
    stop_and_go_on(server, tmp_path, args, [one], world=2)


def test_it_can_be_stopped_again_and_again(server, tmp_path) -> None:
    expected = undisturbed(server, tmp_path, ["--metric"])
    out = str(tmp_path / "run")
    for step in (5, 6, 12, 13, 25, 36):
        job = Spec(out, ["--metric"], faults=[fault(step, "after-optimizer")])
        stopped = server.run(job)
        assert stopped.codes == [143], stopped.log
        assert assert_whole(job.dir).step == step
    assert_same(server.run(Spec(out, ["--metric"])), expected)


def test_a_notice_does_not_wait_for_the_end_of_a_validation(server, tmp_path) -> None:
    """A validation that ends has its model saved; this one has not."""
    args = ["--val-s", "1"]
    job = Spec(str(tmp_path / "run"), args, faults=[fault(12, "evaluation")])
    stopped = server.run(job)
    assert stopped.codes == [143], stopped.log
    assert assert_whole(job.dir).step == 12
    assert not list(Path(job.out).glob("models-0/*"))


def from_inside_of(step: int) -> tuple[str, ...]:
    """What a save in the middle of a step says of the drill's module and callback."""
    return (
        f"attributes of module are from inside of step {step}",
        f"attributes of callback 1, Beat are from inside of step {step}",
        f"what on_save_checkpoint of the module adds is from inside of step {step}",
    )


@pytest.mark.core
@pytest.mark.parametrize(("victim", "phase"), [(1, "backward"), (0, "forward"), (1, "evaluation")])
def test_survivors_of_a_killed_rank_save_and_the_end_is_the_same(server, tmp_path, victim, phase) -> None:
    step = 12 if phase == "evaluation" else 8
    args = ["--val-s", "0.1"]
    expected = undisturbed(server, tmp_path, args, 2)
    job = Spec(str(tmp_path / "run"), args, 2, faults=[fault(step, phase, rank=victim, action="KILL")])
    stopped = server.run(job)
    assert stopped.codes[victim] == -signal.SIGKILL
    newest = assert_whole(job.dir)
    assert newest.step >= step - 1
    assert set(newest.manifest.inexact) <= set(from_inside_of(newest.step + 1))
    assert_same(server.run(Spec(job.out, args, 2)), expected, but="seen")


def test_an_exception_of_the_script_loses_no_step(server, tmp_path) -> None:
    expected = undisturbed(server, tmp_path, [])
    job = Spec(str(tmp_path / "run"), faults=[fault(18, "backward", action="RAISE")])
    stopped = server.run(job)
    assert stopped.codes == [1]
    assert "injected in backward of step 18" in stopped.log
    newest = assert_whole(job.dir)
    assert newest.step == 17
    assert newest.manifest.inexact == from_inside_of(18)
    assert_same(server.run(Spec(job.out)), expected, but="seen")


@pytest.mark.share(3)
@pytest.mark.parametrize(("world", "every"), [(2, "4 steps"), (1, "1 epoch"), (1, "5 steps")])
def test_periodic_saves_are_what_is_left_when_all_ranks_are_killed(server, tmp_path, world, every) -> None:
    expected = undisturbed(server, tmp_path, [], world)
    step = 15
    kill = fault(step, "forward", action="KILL", also=tuple(range(1, world)))
    job = Spec(str(tmp_path / "run"), [], world, faults=[kill], env={"HOLDFAST_SAVE_EVERY": every}, saved_first=True)
    stopped = server.run(job)
    assert stopped.codes == [-signal.SIGKILL] * world
    assert 0 < assert_whole(job.dir).step < step
    assert_same(server.run(Spec(job.out, [], world, env=job.env)), expected)


def test_a_notice_in_a_periodic_save_loses_neither(server, tmp_path) -> None:
    expected = undisturbed(server, tmp_path, [])
    job = Spec(str(tmp_path / "run"), faults=[fault(10, "save")], env={"HOLDFAST_SAVE_EVERY": "5 steps"})
    stopped = server.run(job)
    assert stopped.codes == [143], stopped.log
    assert assert_whole(job.dir, minimum=2).step >= 10
    assert_same(server.run(Spec(job.out, env=job.env)), expected)


def test_workers_live_on_when_everyone_is_told(server, tmp_path) -> None:
    """SIGTERM to the whole process group, in a validation with workers of its own."""
    args = ["--workers", "1", "--val-workers", "1", "--val-s", "0.2"]
    expected = undisturbed(server, tmp_path, args)
    running = server.start(Spec(str(tmp_path / "run"), args))
    wait_for(Path(running.spec.out, "validating-0"), lambda text: text and int(text) >= 12)
    os.killpg(running.pids[0], signal.SIGTERM)
    stopped = running.wait()
    assert stopped.codes == [143], stopped.log
    assert_same(server.run(Spec(running.spec.out, args)), expected)


def wait_for(path: Path, test, limit_s: float = 60.0) -> None:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if path.exists() and test(path.read_text()):
            return
        time.sleep(0.01)
    raise TimeoutError(f"{path} did not come to be")


def test_a_fit_that_is_complete_is_not_trained_again_unless_it_is_told_to(server, tmp_path) -> None:
    expected = undisturbed(server, tmp_path, ["--metric"])
    out = str(tmp_path / "run")
    assert_same(server.run(Spec(out, ["--metric"])), expected)
    again = server.run(Spec(out, ["--metric"]))
    assert_same(again, expected)
    assert again.results[0]["trace"] == []
    assert "this run is complete at step 36; HOLDFAST_RESUME=never starts it anew" in again.log
    anew = server.run(Spec(out, ["--metric"], env={"HOLDFAST_RESUME": "never"}))
    assert_same(anew, expected)
    assert len(anew.results[0]["trace"]) == 36


def test_a_complete_fit_goes_on_when_its_limit_is_raised(server, tmp_path) -> None:
    out = str(tmp_path / "run")
    assert server.run(Spec(out, ["--epochs", "2"])).codes == [0]
    longer = server.run(Spec(out, []))
    assert longer.results[0]["digests"] == undisturbed(server, tmp_path, [])[0]["digests"]
    assert longer.results[0]["trace"][0][0] == 24


def test_several_fits_of_a_script_each_have_their_place(server, tmp_path) -> None:
    args = ["--fits", "2"]
    expected = undisturbed(server, tmp_path, args)
    running = server.start(Spec(str(tmp_path / "run"), [*args, "--step-s", "0.1"]))
    second = Path(running.spec.dir, "fit-2/.holdfast/journal.jsonl")
    wait_for(second, lambda text: '"training"' in text)
    running.send(signal.SIGTERM, 0)
    stopped = running.wait()
    assert stopped.codes == [143], stopped.log
    assert assert_whole(running.spec.dir).manifest.complete
    again = server.run(Spec(running.spec.out, args))
    assert_same(again, expected)


def test_the_checkpoint_loads_with_lightning_alone(server, tmp_path) -> None:
    """In the middle of an epoch, and at its end."""
    for step in (7, 12):
        job = Spec(str(tmp_path / f"run-{step}"), faults=[fault(step, "after-optimizer")])
        assert server.run(job).codes == [143]
        newest = assert_whole(job.dir)
        file = f"{job.dir}/{newest.name}/lightning.ckpt"
        alone = server.run(Spec(str(tmp_path / f"alone-{step}"), ["--ckpt", file], on=False))
        assert alone.codes == [0], alone.log
        assert alone.results[0]["steps"] == 36
        assert alone.results[0]["trace"][0][0] == newest.step


def test_checkpoints_of_the_script_itself_are_as_ever_and_nothing_is_saved_twice(server, tmp_path) -> None:
    args = ["--own-checkpoints"]
    expected = undisturbed(server, tmp_path, args)
    plain = {path.name for path in (tmp_path / "undisturbed").glob("[mo]*/*.ckpt")}
    _, again = stop_and_go_on(server, tmp_path, args, [fault(18, "forward")])
    assert not list((tmp_path / "run/own").glob("on_exception*"))
    assert {path.name for path in (tmp_path / "run").glob("[mo]*/*.ckpt")} == plain
    assert again.results[0]["best"] == expected[0]["best"]


def test_a_checkpoint_that_the_script_names_wins_if_it_is_ahead(server, tmp_path) -> None:
    args = ["--own-checkpoints"]
    out = str(tmp_path / "run")
    assert server.run(Spec(out, args, faults=[fault(7, "forward")])).codes == [143]
    alone = server.run(Spec(out, args, on=False, faults=[fault(18, "forward", action="KILL")]))
    assert alone.codes == [-signal.SIGKILL]
    again = server.run(Spec(out, args))
    assert again.codes == [0], again.log
    assert "is at step 15, ahead of checkpoint-7" in again.log
    assert again.results[0]["trace"][0][0] == 15


def test_another_number_of_ranks_goes_on_with_the_same_weights(server, tmp_path) -> None:
    job = Spec(str(tmp_path / "run"), [], 2, faults=[fault(8, "forward")])
    assert server.run(job).codes == [143, 143]
    alone = server.run(Spec(job.out))
    assert alone.codes == [0], alone.log
    assert "was saved by 2 ranks and is loaded by 1" in alone.log
    assert alone.results[0]["epochs"] == 3


def test_what_cannot_be_exact_is_said(server, tmp_path) -> None:
    job = Spec(str(tmp_path / "run"), ["--swa"], faults=[fault(7, "forward")])
    stopped = server.run(job)
    assert stopped.codes == [143], stopped.log
    assert stopped.log.count("may not be exact: StochasticWeightAveraging") == 1
    assert len(assert_whole(job.dir).manifest.inexact) == 1


def test_a_place_with_checkpoints_of_another_kind_is_refused(server, tmp_path) -> None:
    import torch

    import holdfast

    place = tmp_path / "of-a-loop"
    with holdfast.Run(place, model=torch.nn.Linear(2, 2)) as run:
        run.step()
    refused = server.run(Spec(str(tmp_path / "run"), env={"HOLDFAST_DIR": str(place)}))
    assert refused.codes == [1]
    assert "holds no run.safetensors" in refused.log or "holds no lightning.ckpt" in refused.log
    assert "it is not of a Lightning fit: give another place with HOLDFAST_DIR" in refused.log
    assert_whole(str(place))


def test_a_strategy_that_is_not_known_is_left_alone(server, tmp_path) -> None:
    job = Spec(str(tmp_path / "run"), ["--own-strategy"])
    done = server.run(job)
    assert done.codes == [0], done.log
    assert "holdfast keeps out of this fit: the strategy OwnStrategy is not supported" in done.log
    assert not Path(job.dir).exists()


@pytest.mark.core
def test_the_other_name_of_the_package_is_the_same_to_us(server, tmp_path) -> None:
    expected = undisturbed(server, tmp_path, [])
    out, package = str(tmp_path / "run"), "pytorch_lightning"
    stopped = server.run(Spec(out, package=package, faults=[fault(18, "forward")]))
    assert stopped.codes == [143], stopped.log
    assert_same(server.run(Spec(out, package=package)), expected)


def test_progress_is_told_across_attempts(server, tmp_path) -> None:
    job = Spec(str(tmp_path / "run"), faults=[fault(18, "forward")])
    assert server.run(job).codes == [143]
    told = json.loads(Path(job.dir, "training_progress.json").read_text())
    step = assert_whole(job.dir).step
    wanted = {"epoch": 2, "totalEpochs": 3, "step": step, "totalSteps": 36, "resumedFrom": None}
    assert {name: told[name] for name in wanted} == wanted
    assert server.run(Spec(job.out)).codes == [0]
    told = json.loads(Path(job.dir, "training_progress.json").read_text())
    wanted = {"epoch": 3, "step": 36, "totalSteps": 36, "percentComplete": "100.0"}
    assert {name: told[name] for name in wanted} == wanted
    assert told["resumedFrom"] == f"checkpoint-{step}"
    assert told["checkpointing"]["latestCheckpoint"].endswith("checkpoint-36")
    for name in ("loss", "validationLoss", "learningRate"):
        assert float(told[name]) > 0


def test_a_fit_is_saved_to_object_storage(server, tmp_path, s3_uri, s3_variables) -> None:
    expected = undisturbed(server, tmp_path, [])
    env = {"HOLDFAST_DIR": s3_uri, "XDG_STATE_HOME": str(tmp_path / "state"), **s3_variables}
    out = str(tmp_path / "run")
    stopped = server.run(Spec(out, env=env, faults=[fault(18, "forward")]))
    assert stopped.codes == [143], stopped.log
    assert "JIT checkpoint completed" in stopped.log
    assert_same(server.run(Spec(out, env=env)), expected)
