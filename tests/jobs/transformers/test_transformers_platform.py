"""What a platform asks of a Trainer whose script it does not change: other arguments, the model at the end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from holdfast.store import open_backend
from holdfast.store.manifest import Manifest
from tests.jobs.transformers import drill
from tests.jobs.transformers.checks import fault, steps_in, without_holdfast


@pytest.fixture
def server() -> drill.Server:
    return drill.shared()


def arguments(**given) -> dict[str, str]:
    return {"HOLDFAST_TRAINER_ARGUMENTS": json.dumps(given)}


def test_arguments_of_the_platform_win_over_those_of_the_script(server, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    env = arguments(output_dir=str(elsewhere), save_strategy="steps", save_steps=5, save_total_limit=2)
    spec = drill.Spec(str(tmp_path / "run"), args={"save_strategy": "no"}, env=env)
    outcome = server.run(spec)
    assert outcome.codes == [0], outcome.log
    plain = without_holdfast(server, spec)
    last = plain.result["history"][-1]["step"]
    assert steps_in(str(elsewhere)) == [last - last % 5 - (5 if last % 5 == 0 else 0), last]
    assert not os.path.exists(spec.dir) or steps_in(spec.dir) == []
    assert outcome.result["digest"] == plain.result["digest"]


def test_a_strategy_that_the_best_model_depends_on_stays(server, tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 6, "save_strategy": "steps", "save_steps": 6}
    spec = drill.Spec(
        str(tmp_path / "run"), args={**best, "load_best_model_at_end": True}, env=arguments(save_strategy="epoch")
    )
    outcome = server.run(spec)
    assert outcome.codes == [0], outcome.log
    assert "save_strategy stays steps" in outcome.log
    assert 6 in steps_in(spec.dir)


def test_a_wrong_value_is_said_and_nothing_is_trained(server, tmp_path):
    outcome = server.run(drill.Spec(str(tmp_path / "run"), env=arguments(learning_rate=1)))
    assert outcome.codes == [1]
    assert "HOLDFAST_TRAINER_ARGUMENTS=" in outcome.log
    assert "save_total_limit" in outcome.log


@pytest.mark.parametrize("place", ["path", "s3"])
def test_the_model_is_there_at_the_end_and_not_before(server, tmp_path, s3_uri, s3_variables, monkeypatch, place):
    env = {"HOLDFAST_FINAL_MODEL": "1"}
    location = str(tmp_path / "run")
    if place == "s3":
        location, env = s3_uri, {**env, **s3_variables, "HOLDFAST_DIR": s3_uri}
    spec = drill.Spec(str(tmp_path / "run"), world=2, env=env, faults=[fault("forward", 5)])
    assert set(server.run(spec).codes) == {143}
    assert open_backend(location).read_manifest("final") is None
    outcome = server.run(spec.plain())
    assert outcome.codes == [0, 0], outcome.log
    assert "the trained model is in" in outcome.log
    backend = open_backend(location)
    manifest = Manifest.decode(backend.read_manifest("final"))
    assert manifest.complete
    paths = {entry.path: entry.size for entry in manifest.files}
    assert {"config.json", "model.safetensors"} <= set(paths)
    assert backend.sizes("final").items() >= paths.items()
    weights = bytearray(paths["model.safetensors"])
    assert backend.read_into("final", "model.safetensors", 0, memoryview(weights)) == len(weights)
    Path(tmp_path, "model.safetensors").write_bytes(weights)
    from safetensors.torch import load_file

    assert load_file(tmp_path / "model.safetensors")
    # Lost, and started again: the run is complete, and the model is written again.
    backend.discard("final")
    again = server.run(spec.plain())
    assert "is complete" in again.log
    assert backend.read_manifest("final") is not None


def test_progress_can_be_switched_off(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), env={"HOLDFAST_PROGRESS": "0"})
    assert server.run(spec).codes == [0]
    assert not os.path.exists(os.path.join(spec.dir, "training_progress.json"))
    assert steps_in(spec.dir)


def test_a_training_that_is_not_saved_does_not_say_that_it_is(server, tmp_path):
    outcome = server.run(drill.Spec(str(tmp_path / "run"), args={"max_steps": 2}, env={"CHECKPOINT_ENABLED": "false"}))
    assert outcome.codes == [0], outcome.log
    assert "[Kubeflow]" not in outcome.log
