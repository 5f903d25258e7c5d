"""A Trainer's checkpoints under holdfast: which are used, which stay, and that they are still the Trainer's own."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from holdfast.store.base import SENTINEL
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

BEST = {**EVALUATE, "save_strategy": "steps", "save_steps": 6, "load_best_model_at_end": True}
WORST = {**BEST, "metric_for_best_model": "eval_loss", "greater_is_better": True}  # an early one, which then is old


@pytest.fixture
def server() -> drill.Server:
    return drill.shared()


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


# ---------------------------------------------------------------------- which one is used


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "holdfast-rank-00000.safetensors"])
def test_a_flipped_bit_is_found_and_the_one_before_is_used(server, tmp_path, file):
    spec = drill.Spec(str(tmp_path / "run"), args=SAVE, faults=[fault("forward", 14)])
    server.run(spec)
    *_, before, newest = steps_in(spec.dir)
    flip_a_bit(tmp_path / f"run/checkpoint-{newest}" / file)
    resumed = server.run(spec.plain())
    assert resumed.codes == [0], resumed.log
    assert "checksum" in resumed.log
    assert f"checkpoint-{before}, step {before}" in resumed.log
    assert_same(resumed, without_holdfast(server, spec))


@pytest.mark.parametrize("world", [1, 2])
def test_transformers_alone_goes_on_from_it_to_the_same_end(server, tmp_path, world):
    spec = drill.Spec(str(tmp_path / "run"), world=world, faults=[fault("forward", 7)])
    server.run(spec)
    resumed = server.run(spec.plain(env={"HOLDFAST_ENABLED": "0"}, options=["--resume", "true"]))
    assert resumed.codes == [0] * world, resumed.log
    assert resumed.result["digest"] == without_holdfast(server, spec).result["digest"]


def test_a_checkpoint_holds_what_the_trainer_writes_and_loads_with_its_own_readers(server, tmp_path):
    import torch
    from safetensors.torch import load_file

    spec = drill.Spec(str(tmp_path / "run"), args=SAVE, faults=[fault("forward", 10)])
    server.run(spec)
    alone = drill.Spec(str(tmp_path / "alone"), args={**SAVE, "max_steps": 8}, env={"HOLDFAST_ENABLED": "0"})
    server.run(alone)
    ours, theirs = tmp_path / "run/checkpoint-8", tmp_path / "alone/checkpoint-8"
    assert {path.name for path in theirs.iterdir()} <= {path.name for path in ours.iterdir()}
    for name in ("optimizer.pt", "scheduler.pt"):
        assert torch.load(ours / name, weights_only=True).keys() == torch.load(theirs / name, weights_only=True).keys()
    mine, own = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert mine.keys() == own.keys()
    assert (ours / "config.json").read_text() == (theirs / "config.json").read_text()
    state, other = (json.loads((path / "trainer_state.json").read_text()) for path in (ours, theirs))
    assert state.keys() == other.keys()
    assert torch.load(ours / "training_args.bin", weights_only=False).output_dir == spec.dir


def test_a_run_that_was_begun_without_holdfast_goes_on_with_it(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), args=SAVE, faults=[fault("forward", 11, action="KILL")])
    server.run(spec.plain(env={"HOLDFAST_ENABLED": "0"}, faults=spec.faults))
    assert steps_in(spec.dir) == [4, 8]
    outcome = server.run(spec.plain(faults=[fault("forward", 15)]))
    assert outcome.codes == [143], outcome.log
    assert "which was written without holdfast" in outcome.log
    resumed = server.run(spec.plain())
    assert resumed.codes == [0], resumed.log
    assert {4, 8} <= set(steps_in(spec.dir))
    assert resumed.result["digest"] == without_holdfast(server, spec).result["digest"]


def test_what_others_left_half_written_is_not_used_and_not_in_the_way(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), args=SAVE, faults=[fault("forward", 11)])
    server.run(spec)
    marked, torn = tmp_path / "run/checkpoint-30", tmp_path / "run/checkpoint-28"
    marked.mkdir()
    (marked / SENTINEL).write_text("Checkpoint started at step 30 and in progress...")
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    (torn / "trainer_state.json").write_text('{"global_step": 28}')
    resumed = server.run(spec.plain())
    assert resumed.codes == [0], resumed.log
    assert "removed checkpoint-30, which was not whole" in resumed.log or not marked.joinpath(SENTINEL).exists()
    assert len(list(tmp_path.glob("run/previous-*/checkpoint-28"))) == 1
    assert_same(resumed, without_holdfast(server, spec))


def test_get_last_checkpoint_names_no_unfinished_one(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), args=SAVE, faults=[fault("forward", 11)])
    server.run(spec)
    newest = steps_in(spec.dir)[-1]
    unfinished = tmp_path / "run/checkpoint-99"
    unfinished.mkdir()
    (unfinished / SENTINEL).touch()
    resumed = server.run(spec.plain(options=["--resume", "last"]))
    assert resumed.codes == [0], resumed.log
    assert f"checkpoint-{newest}, step {newest}" in resumed.log
    assert resumed.result["digest"] == without_holdfast(server, spec).result["digest"]


def test_a_folder_that_the_script_names_wins_and_the_same_command_again_goes_on(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), args=SAVE, faults=[fault("forward", 11)])
    server.run(spec)
    named = ["--resume", f"{spec.dir}/checkpoint-4"]
    outcome = server.run(spec.plain(options=named, faults=[fault("forward", 7)]))
    assert outcome.codes == [143], outcome.log
    assert steps_in(spec.dir)[0] == 4
    assert steps_in(spec.dir)[-1] < 11, "newer ones are set aside"
    assert list(tmp_path.glob("run/previous-*/checkpoint-8"))
    newest = steps_in(spec.dir)[-1]
    resumed = server.run(spec.plain(options=named))
    assert f"step {newest}" in resumed.log
    assert resumed.result["digest"] == without_holdfast(server, spec).result["digest"]


# ---------------------------------------------------------------------- a finished run


def test_a_finished_run_started_again_returns_at_once_with_its_model_and_output(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), world=2, faults=[fault("forward", 7)])
    interrupt_and_resume(server, spec)
    again = server.run(spec.plain())
    assert again.codes == [0, 0], again.log
    assert "this run is complete at step 18; HOLDFAST_RESUME=never starts it anew" in again.log
    plain = without_holdfast(server, spec)
    assert again.result["model"] == plain.result["model"]
    assert again.result["loss"] == plain.result["loss"]
    assert again.trained == plain.trained
    assert again.result["metrics"]["train_runtime"] > 0
    anew = server.run(spec.plain(env={"HOLDFAST_RESUME": "never"}))
    assert_same(anew, plain)


def test_the_best_model_is_loaded_at_the_end_also_of_a_finished_run(server, tmp_path):
    args = {**WORST, "save_total_limit": 2}
    spec = drill.Spec(str(tmp_path / "run"), args=args, faults=[fault("evaluation", 18)])
    plain = without_holdfast(server, spec)
    assert plain.result["best"].endswith("checkpoint-6")
    interrupt_and_resume(server, spec)
    assert steps_in(spec.dir) == [6, 36]
    assert server.run(spec.plain()).result["model"] == plain.result["model"]


# ---------------------------------------------------------------------- which ones stay


def test_save_total_limit_is_kept_as_transformers_keeps_it(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), args={**SAVE, "save_total_limit": 2})
    server.run(spec)
    assert steps_in(spec.dir) == [32, 36]
    assert_whole(spec.dir, minimum=2)


def test_a_limit_of_one_leaves_the_best_alone_and_the_run_is_still_known_to_be_complete(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), args={**WORST, "save_total_limit": 1})
    first = server.run(spec)
    assert steps_in(spec.dir) == [6]
    again = server.run(spec)
    assert "this run is complete at step 36" in again.log
    assert again.result["model"] == first.result["model"]


def test_without_a_limit_the_trainers_saves_stay_and_of_interruptions_the_last_few(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), args={"save_strategy": "steps", "save_steps": 18})
    for step in (3, 6, 9, 12, 15):
        assert server.run(spec.plain(faults=[fault("forward", step)])).codes == [143]
    server.run(spec)
    assert [step for step in steps_in(spec.dir) if step >= 18] == [18, 36]
    assert len(steps_in(spec.dir)) == 5


def test_save_only_model_leaves_out_the_rest_except_where_it_is_needed_to_go_on(server, tmp_path):
    args = {**SAVE, "save_only_model": True}
    spec = drill.Spec(str(tmp_path / "run"), args=args, faults=[fault("forward", 10)])
    interrupt_and_resume(server, spec)
    kept = {step: (tmp_path / f"run/checkpoint-{step}/optimizer.pt").exists() for step in steps_in(spec.dir)}
    assert not any(there for step, there in kept.items() if step % 4 == 0 and step != 36)
    assert any(there for step, there in kept.items() if 8 < step < 14)


# ---------------------------------------------------------------------- what others want of them


def test_callbacks_are_told_of_a_save_when_it_is_whole(server, tmp_path):
    seen = tmp_path / "seen"
    spec = drill.Spec(str(tmp_path / "run"), args=SAVE, options=["--record-saves", str(seen)])
    server.run(spec)
    told = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [entry["step"] for entry in told] == list(range(4, 37, 4))
    for entry in told:
        assert "holdfast.json" in entry["files"]
        assert SENTINEL not in entry["files"]


def test_the_hub_gets_the_committed_folder(server, tmp_path):
    args = {**SAVE, "push_to_hub": True, "save_steps": 12}
    spec = drill.Spec(str(tmp_path / "run"), args=args, options=["--trainer", "Uploading"])
    outcome = server.run(spec)
    assert outcome.codes == [0], outcome.log
    pushed = [json.loads(line) for line in Path(f"{spec.dir}.pushed").read_text().splitlines()]
    assert [entry["folder"] for entry in pushed] == [f"{spec.dir}/checkpoint-{step}" for step in (12, 24, 36)]
    for entry in pushed:
        assert "holdfast.json" in entry["files"]
        assert SENTINEL not in entry["files"]


def test_files_that_a_subclass_adds_are_in_every_checkpoint(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), args=SAVE, options=["--trainer", "Extra"], faults=[fault("forward", 10)])
    interrupt_and_resume(server, spec)
    for step in steps_in(spec.dir):
        assert (tmp_path / f"run/checkpoint-{step}/notes.txt").read_text() == f"step {step}\n"
    recorded = assert_whole(spec.dir).manifest.files
    assert {"extra.pt", "notes.txt"} <= {entry.path for entry in recorded}


# ---------------------------------------------------------------------- where they lie


def test_another_folder_by_setting(server, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    args = {**WORST, "save_total_limit": 2}
    spec = drill.Spec(
        str(tmp_path / "run"), args=args, env={"HOLDFAST_DIR": str(elsewhere)}, faults=[fault("forward", 14)]
    )
    assert server.run(spec).codes == [143]
    assert steps_in(spec.dir) == []
    resumed = server.run(spec.plain())
    assert resumed.result["best"] == str(elsewhere / "checkpoint-6")
    assert resumed.result["digest"] == without_holdfast(server, spec).result["digest"]


@pytest.mark.parametrize("world", [1, 2])
def test_object_storage(server, tmp_path, s3_uri, s3_variables, world):
    args = {**WORST, "save_total_limit": 2}
    spec = drill.Spec(
        str(tmp_path / "run"),
        world=world,
        args=args,
        env={**s3_variables, "HOLDFAST_DIR": s3_uri},
        faults=[fault("evaluation", 12)],
    )
    outcome = server.run(spec)
    assert set(outcome.codes) == {143}, outcome.log
    assert steps_in(spec.dir) == []
    resumed = server.run(spec.plain())
    assert resumed.codes == [0] * world, resumed.log
    plain = without_holdfast(server, spec)
    assert resumed.result["best"] == f"{s3_uri}/checkpoint-6"
    assert resumed.result["digest"] == plain.result["digest"]
    again = server.run(spec.plain())
    assert "is complete" in again.log
    assert again.result["model"] == plain.result["model"]


# ---------------------------------------------------------------------- progress


def test_the_progress_file_is_right_across_attempts(server, tmp_path):
    from holdfast.progress import read_progress

    progress = tmp_path / "progress.json"
    env = {"TRAINING_PROGRESS_FILE": str(progress)}
    spec = drill.Spec(str(tmp_path / "run"), args=EVALUATE, env=env, faults=[fault("forward", 20)])
    server.run(spec)
    (step,) = steps_in(spec.dir)
    first = read_progress(progress)
    assert (first["step"], first["totalSteps"], first["totalEpochs"], first["epoch"]) == (step, 36, 3, 2)
    assert first["resumedFrom"] is None
    history = json.loads((tmp_path / f"run/checkpoint-{step}/trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert float(first["loss"]) == pytest.approx(losses[-1], abs=1e-4)
    assert "validationLoss" in first
    assert "learningRate" in first
    job = server.start(spec.plain(slow_step_s=30.0))  # it is killed in its first step, however late this looks
    while (second := read_progress(progress))["resumedFrom"] is None:
        assert job.alive(), job.log()
        time.sleep(0.02)
    job.send(signal.SIGKILL, 0)
    assert job.wait().codes == [-9]
    assert (second["step"], second["totalSteps"], second["loss"]) == (step, 36, first["loss"])
    assert second["resumedFrom"] == f"checkpoint-{step}"
    server.run(spec.plain())
    last = read_progress(progress)
    assert (last["step"], last["percentComplete"], last["epoch"]) == (36, "100.0", 3)
    assert last["checkpointing"]["latestCheckpoint"] == f"{spec.dir}/checkpoint-36"
