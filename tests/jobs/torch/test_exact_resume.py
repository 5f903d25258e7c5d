"""An interrupted run ends with the same bits as an uninterrupted one, for each thing that can hold state."""

from __future__ import annotations

import pytest

from tests.jobs.torch import drill
from tests.jobs.torch.checks import uninterrupted
from tests.kit.checks import assert_whole

SHAPES = {
    "shuffled loader without workers": {"world": 1},
    "two loader workers": {"world": 1, "workers": 2},
    "three loader workers that draw random numbers": {"world": 1, "workers": 3, "augment": True},
    "random numbers in the main process's dataset": {"world": 1, "augment": True},
    "gradient accumulation": {"world": 2, "accumulate": 3, "samples": 144},
    "batch normalisation": {"world": 2, "batchnorm": True},
    "AMP scaler": {"world": 1, "scaler": True},
    "torchdata's stateful loader": {"world": 1, "stateful": True},
    "torchdata's stateful loader with random workers": {"world": 1, "stateful": True, "workers": 2, "augment": True},
    "two ranks with workers": {"world": 2, "workers": 2, "augment": True},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", [1, 10, 12])
@pytest.mark.share(7)
def test_resume_is_exact_with(server, tmp_path, shape, step):
    spec = drill.Spec(str(tmp_path / "run"), faults=[{"rank": 0, "step": step, "phase": "backward"}], **SHAPES[shape])
    outcome = server.run(spec)
    assert set(outcome.codes) == {143}, outcome.log
    assert not assert_whole(spec.dir).manifest.inexact
    resumed = server.run(drill.Spec(**{**vars(spec), "faults": []}))
    assert resumed.codes == [0] * spec.world, resumed.log
    plain = uninterrupted(server, spec)
    assert resumed.digest == plain.digest, resumed.log
    left = resumed.results[0]["trace"]
    assert left == plain.results[0]["trace"][-len(left) :]


@pytest.mark.parametrize("isolate", [False, True])
def test_an_evaluation_that_draws_random_numbers_does_not_shift_the_rest(server, tmp_path, isolate):
    shape = {"world": 1, "evaluate_every": 5, "isolate_evaluation": isolate}
    faults = [{"rank": 0, "step": 10, "phase": "evaluation"}]
    spec = drill.Spec(str(tmp_path / "run"), evaluation_s=0.5, faults=faults, **shape)
    assert server.run(spec).codes == [143]
    assert assert_whole(spec.dir).step == 10
    resumed = server.run(drill.Spec(**{**vars(spec), "faults": [], "evaluation_s": 0.0}))
    assert resumed.digest == uninterrupted(server, spec).digest


def test_a_notice_in_a_long_evaluation_does_not_wait_for_its_end(server, tmp_path):
    shape = {"world": 1, "evaluate_every": 5, "isolate_evaluation": True}
    faults = [{"rank": 0, "step": 10, "phase": "evaluation"}]
    spec = drill.Spec(str(tmp_path / "run"), evaluation_s=30.0, settings={"grace_period": 6.0}, faults=faults, **shape)
    job = server.start(drill.Spec(**{**vars(spec), "evaluate_every": 10}))
    outcome = job.wait()
    assert outcome.codes == [143], outcome.log
    assert outcome.after_notice_s < 15  # and the evaluation lasts for 30 s
    assert assert_whole(spec.dir).step == 10


def test_a_finished_run_that_is_started_again_has_nothing_to_do_unless_told_to_start_anew(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), 1)
    first = server.run(spec)
    again = server.run(spec)
    assert again.results[0]["first"] == again.results[0]["steps"] == first.results[0]["steps"]
    assert again.digest == first.digest
    assert "HOLDFAST_RESUME=never" in again.log
    anew = server.run(drill.Spec(spec.dir, 1, settings={"resume": "never"}))
    assert anew.results[0]["first"] == 0
    assert anew.digest == first.digest


def test_more_epochs_than_before_go_on_from_the_end(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), 1, epochs=2)
    server.run(spec)
    longer = server.run(drill.Spec(spec.dir, 1, epochs=3))
    assert longer.results[0]["first"] == 48
    assert longer.digest == uninterrupted(server, drill.Spec("", 1, epochs=3)).digest


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sharded_state_saved_on_two_ranks_resumes_on(server, tmp_path, world):
    spec = drill.Spec(str(tmp_path / "run"), 2, fsdp=True, faults=[{"rank": 1, "step": 10, "phase": "forward"}])
    outcome = server.run(spec)
    assert set(outcome.codes) == {143}, outcome.log
    newest = assert_whole(spec.dir)
    resumed = server.run(drill.Spec(spec.dir, world, fsdp=True))
    assert resumed.codes == [0] * world, resumed.log
    assert resumed.results[0]["first"] == newest.step
    if world == 2:
        assert resumed.digest == uninterrupted(server, spec).digest


def test_sharded_weights_load_with_torch_alone(server, tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp

    spec = drill.Spec(str(tmp_path / "run"), 2, fsdp=True)
    server.run(spec)
    state = {"0.weight": torch.zeros(16, 8), "3.bias": torch.zeros(2)}
    folder = f"{spec.dir}/{assert_whole(spec.dir).name}/model"
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder), no_dist=True)
    assert state["0.weight"].abs().sum() > 0


def test_weights_load_with_safetensors_alone(server, tmp_path):
    from safetensors.torch import load_file

    spec = drill.Spec(str(tmp_path / "run"), 1)
    server.run(spec)
    weights = load_file(f"{spec.dir}/{assert_whole(spec.dir).name}/model.safetensors")
    assert sorted(weights) == ["0.bias", "0.weight", "3.bias", "3.weight"]


def test_two_ranks_in_one_process_group_that_become_three_go_on(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), 2, faults=[{"rank": 1, "step": 10, "phase": "backward"}])
    server.run(spec)
    resumed = server.run(drill.Spec(spec.dir, 3))
    assert resumed.codes == [0, 0, 0], resumed.log
    assert "saved by 2 ranks and is loaded by 3" in resumed.log
