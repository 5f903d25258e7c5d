"""Jobs of the SDK's local-process backend, with real processes: nothing is lost and nobody is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from kubeflow.trainer import LocalProcessBackendConfig, TrainerClient
from kubeflow.trainer.options import Name

from holdfast.errors import ConfigError
from holdfast.kubeflow import (
    JobNotFoundError,
    Panel,
    PeriodicCheckpointConfig,
    TransformersTrainer,
    checkpoints,
    pause,
    progress,
    records,
    resume,
    wait_for,
)
from holdfast.kubeflow.view import as_html
from holdfast.launch.control import NotLiveError
from holdfast.store import open_backend
from tests.kit import python_path
from tests.unit.kubeflow import functions
from tests.unit.kubeflow.processes import processes_of

pytestmark = pytest.mark.core(0)


@pytest.fixture
def client(state: Path) -> TrainerClient:
    return TrainerClient(LocalProcessBackendConfig())


def gone(*words: str) -> bool:
    limit = time.monotonic() + 40
    while processes_of(*words):
        if time.monotonic() > limit:
            return False
        time.sleep(0.2)
    return True


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "jobs", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def tiny(output: str, path: Path, steps: int = 60, **more: Any) -> TransformersTrainer:
    given = {"steps": steps, "path": str(path), **more}
    return TransformersTrainer(func=functions.tiny, func_args=given, num_nodes=2, output_dir=output)


def test_a_paused_job_ends_with_the_losses_and_the_bits_of_an_undisturbed_one(
    client: TrainerClient, state: Path, tmp_path: Path
) -> None:
    whole = client.train(trainer=tiny("whole", tmp_path / "whole.json"))
    assert wait_for(whole, client=client, timeout_s=120).step == 60
    assert client.get_job(whole).status == "Complete"

    name = client.train(trainer=tiny("paused", tmp_path / "paused.json", pause_s=0.2))
    assert wait_for(name, step=5, timeout_s=120).state == "Running"
    assert client.get_job(name).status == "Running"
    stopped = pause(name)
    assert stopped.state == "Paused"
    assert 5 <= (stopped.step or 0) < 60
    assert [process for process in processes_of(str(state)) if "torch" in " ".join(process.cmdline())] == []
    assert client.get_job(name).status == "Created", "what the SDK knows: as a suspended TrainJob"
    newest = checkpoints(name)[0]
    assert (newest["step"], newest["reason"], newest["state"]) == (stopped.step, "jit", "whole")
    assert cli("progress", name).stdout.startswith(f"{name} · Paused · step {stopped.step} of 60")

    resume(name)
    ended = wait_for(name, client=client, timeout_s=120)
    assert ended.resumed_from == f"checkpoint-{stopped.step}"
    one, other = (json.loads((tmp_path / f"{kind}.json").read_text()) for kind in ("whole", "paused"))
    assert other["trace"] == one["trace"]
    assert other["digest"] == one["digest"]
    assert one["output_dir"] == "elsewhere", "the script's own arguments are not changed"
    assert "paused at step" in "\n".join(client.get_job_logs(name))
    assert "[Kubeflow] JIT checkpointing enabled" in "\n".join(client.get_job_logs(name))

    from transformers import GPT2LMHeadModel

    final = GPT2LMHeadModel.from_pretrained(tmp_path / "paused" / "final")
    last = GPT2LMHeadModel.from_pretrained(tmp_path / "paused" / "checkpoint-60")
    for key, value in last.state_dict().items():
        assert torch.equal(final.state_dict()[key], value)
    with pytest.raises(NotLiveError, match="Complete"):
        pause(name)
    client.delete_job(name)
    client.delete_job(whole)
    assert gone(str(state))


def test_deleting_a_job_saves_it_ends_all_its_processes_and_keeps_its_checkpoints(
    client: TrainerClient, state: Path, tmp_path: Path
) -> None:
    name = client.train(trainer=tiny("out", tmp_path / "x.json", steps=5000, pause_s=0.05))
    wait_for(name, step=3, timeout_s=120)
    assert len(processes_of(str(state))) >= 3, "a launcher, an agent and the ranks"
    client.delete_job(name)
    assert gone(str(state)), [process.cmdline() for process in processes_of(str(state))]
    assert [folder for folder in os.listdir(tmp_path / "out") if folder.startswith("checkpoint-")]
    limit = time.monotonic() + 20
    while (state / "holdfast" / "jobs" / name).exists() and time.monotonic() < limit:
        time.sleep(0.1)
    assert not (state / "holdfast" / "jobs" / name).exists()
    with pytest.raises(JobNotFoundError, match=name):
        records.read_record(name)


def test_a_job_outlives_the_notebook_and_is_found_again(state: Path, tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import time
        from tests.unit.kubeflow import functions
        from kubeflow.trainer import LocalProcessBackendConfig, TrainerClient
        from kubeflow.trainer.options import Name
        from holdfast.kubeflow import TransformersTrainer
        trainer = TransformersTrainer(func=functions.tiny, func_args={"steps": 4000, "pause_s": 0.05}, output_dir="out")
        TrainerClient(LocalProcessBackendConfig()).train(trainer=trainer, options=[Name("mine")])
        print("started", flush=True)
        time.sleep(600)
        """
    )
    notebook = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": python_path(), "MARK": "of the notebook", "PYTHONHASHSEED": "7"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert notebook.stdout is not None
    assert notebook.stdout.readline() == "started\n"
    notebook.send_signal(signal.SIGKILL)
    notebook.wait()
    before = wait_for("mine", step=3, timeout_s=120)
    listed = cli("list", "--json")
    assert [job["name"] for job in json.loads(listed.stdout)["jobs"]] == ["mine"]
    paused = cli("pause", "mine", "--json")
    assert paused.returncode == 0, paused.stderr
    step = json.loads(paused.stdout)["trainingProgress"]["step"]
    assert step >= (before.step or 0)
    assert f"checkpoint-{step}" in cli("checkpoints", "mine").stdout
    # Its launcher dies while it is paused: it is started again with the interpreter of its submission, by another one,
    # whose variables it gets, but for those that decide how it runs.
    for process in processes_of("holdfast.cli.noted"):
        if str(state) in " ".join(process.cmdline()):
            process.kill()
    other = tmp_path / "bin" / "python"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    code = "import sys; sys.executable = sys.argv[1]; from holdfast.kubeflow import resume; resume('mine')"
    environ = {**os.environ, "MARK": "of the resumer", "PYTHONHASHSEED": "8"}
    subprocess.run([sys.executable, "-c", code, str(other)], env=environ, timeout=120, check=True)
    assert wait_for("mine", step=step + 3, timeout_s=120).resumed_from == f"checkpoint-{step}"
    for process in processes_of(str(state)):
        assert process.cmdline()[0] == sys.executable
        assert process.environ()["MARK"] == "of the resumer"
        assert process.environ()["PYTHONHASHSEED"] == "7"
    assert "JIT checkpointing enabled" in cli("logs", "mine").stdout
    assert cli("delete", "mine").stdout == "mine is deleted\n"
    assert not processes_of(str(state))
    missing = cli("progress", "mine", "--on", "local")
    assert missing.returncode == 3
    assert "no local job 'mine'" in missing.stderr


def test_a_resume_wins_over_a_pause_in_progress_and_over_a_launcher_that_was_told_to_leave(
    client: TrainerClient, state: Path, tmp_path: Path
) -> None:
    given, env = {"steps": 5000, "pause_s": 0.05}, {"HOLDFAST_KILL_WAIT": "6"}
    name = client.train(trainer=TransformersTrainer(func=functions.tiny, func_args=given, output_dir="out", env=env))
    wait_for(name, step=3, timeout_s=120)
    began = time.monotonic()
    assert pause(name, wait=False).state == "Pausing"
    assert time.monotonic() - began < 5, "six seconds pass before it saves"
    assert client.get_job(name).status == "Running"
    assert pause(name, wait=False).state == "Pausing"
    resume(name)
    saved = checkpoints(name)[0]["step"]
    assert wait_for(name, "Running", step=saved + 2, timeout_s=120).resumed_from == f"checkpoint-{saved}"

    launcher = records.read_record(name).owner()
    assert launcher is not None
    os.kill(launcher.pid, signal.SIGTERM)
    stopped = wait_for(name, "Paused", timeout_s=60)
    assert records.read_record(name).code == 143
    assert pause(name).state == "Paused"
    resume(name)
    again = wait_for(name, "Running", step=(stopped.step or 0) + 2, timeout_s=120)
    assert again.resumed_from == f"checkpoint-{stopped.step}"
    client.delete_job(name)
    assert gone(str(state))


@pytest.mark.core
def test_a_job_that_still_loads_is_paused_too(client: TrainerClient, state: Path, tmp_path: Path) -> None:
    given = {"path": str(tmp_path / "loading"), "seconds": 600}
    name = client.train(trainer=TransformersTrainer(func=functions.loads, func_args=given, output_dir="out"))
    limit = time.monotonic() + 60
    while not (tmp_path / "loading").exists():
        assert time.monotonic() < limit
        time.sleep(0.1)
    assert pause(name, timeout_s=60).state == "Paused"
    resume(name)
    assert wait_for(name, timeout_s=60).state == "Complete"
    client.delete_job(name)
    assert gone(str(state))


def test_a_function_that_fails_is_a_failed_job_with_its_traceback(client: TrainerClient, state: Path) -> None:
    name = client.train(trainer=TransformersTrainer(func=functions.fails))
    assert wait_for(name, "Failed", timeout_s=120).state == "Failed"
    assert client.get_job(name).status == "Failed"
    assert "RuntimeError: no luck today" in "\n".join(client.get_job_logs(name))
    assert gone(str(state))
    with pytest.raises(RuntimeError, match="failed"):
        wait_for(name, timeout_s=5)


def test_variables_and_arguments_arrive_as_they_would_on_kubernetes(
    client: TrainerClient, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_NOTEBOOK", "here")
    monkeypatch.setenv("HOLDFAST_SAVE_EVERY", "1 step")
    wheel = tmp_path / "mypackage-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("mypackage.py", "answer = 42\n")
        file.writestr("mypackage-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: mypackage\nVersion: 1.0\n")
        file.writestr("mypackage-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("mypackage-1.0.dist-info/RECORD", "")
    path = tmp_path / "told.json"
    trainer = TransformersTrainer(
        func=functions.environment,
        func_args={"path": str(path), "given": {"a": [1, "$x", None]}},
        env={"MINE": "a $b 'c'", "OF_THE_NOTEBOOK": "changed"},
        packages_to_install=[str(wheel)],
    )
    name = client.train(trainer=trainer)
    limit = time.monotonic() + 180
    while (state_now := progress(name).state) != "Complete":  # not a moment without it
        assert state_now in ("Created", "Running"), client.get_job_logs(name)
        assert time.monotonic() < limit
    told = json.loads(path.read_text())
    assert told["given"] == {"a": [1, "$x", None]}
    assert told["env"]["MINE"] == "a $b 'c'"
    assert told["env"]["OF_THE_NOTEBOOK"] == "changed"
    assert told["env"]["WORLD_SIZE"] == "1"
    assert "HOLDFAST_SAVE_EVERY" not in told["env"], "settings of this process are not those of the job"
    assert told["cwd"] == str(tmp_path)
    assert told["python"].endswith("/venv"), "an environment of its own, for the package"
    seen = subprocess.run(
        [f"{told['python']}/bin/python", "-c", "import mypackage, torch, holdfast; print(mypackage.answer)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert seen.stdout == "42\n"
    client.delete_job(name)
    assert gone(str(state))


@pytest.mark.core
def test_adapters_are_merged_into_the_final_model(client: TrainerClient, state: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    given = {"steps": 12, "lora": str(tmp_path)}
    config = PeriodicCheckpointConfig(save_strategy="steps", save_steps=6, save_total_limit=1)
    trainer = TransformersTrainer(
        func=functions.tiny, func_args=given, output_dir=str(tmp_path / "out"), periodic_checkpoint_config=config
    )
    name = client.train(trainer=trainer)
    wait_for(name, timeout_s=120)
    assert [row["step"] for row in checkpoints(name)] == [12], "save_total_limit"
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final")
    assert not [key for key in final.state_dict() if "lora" in key]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base-0").state_dict()
    adapter = load_file(tmp_path / "out" / "checkpoint-12" / "adapter_model.safetensors")
    for key, value in final.state_dict().items():
        if not key.endswith("c_attn.weight"):
            assert torch.equal(value, base[key])
            continue
        prefix = f"base_model.model.{key.removesuffix('.weight')}"
        added = (adapter[f"{prefix}.lora_B.weight"] @ adapter[f"{prefix}.lora_A.weight"]).T * (8 / 4)
        assert torch.allclose(value, base[key] + added, atol=1e-6)
        assert not torch.allclose(value, base[key], atol=1e-4)
    client.delete_job(name)
    assert gone(str(state))


def test_a_job_saves_to_an_object_store_and_goes_on_from_there(
    client: TrainerClient,
    state: Path,
    tmp_path: Path,
    s3_uri: str,
    s3_variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With credentials that the job has, and this process has not."""
    for variable in s3_variables:
        monkeypatch.delenv(variable)
    given = {"steps": 40, "pause_s": 0.2}
    env = {"HOLDFAST_KILL_WAIT": "0", **s3_variables}
    trainer = TransformersTrainer(func=functions.tiny, func_args=given, output_dir=s3_uri, env=env)
    name = client.train(trainer=trainer)
    wait_for(name, step=3, timeout_s=120)
    stopped = pause(name)
    assert stopped.state == "Paused"
    [saved] = checkpoints(name)
    assert (saved["step"], saved["state"], saved["location"]) == (stopped.step, "whole", s3_uri)
    resume(name)
    assert wait_for(name, timeout_s=120).resumed_from == f"checkpoint-{stopped.step}"
    assert checkpoints(name)[0]["step"] == 40
    for variable, value in s3_variables.items():
        monkeypatch.setenv(variable, value)
    assert "model.safetensors" in open_backend(s3_uri).sizes("final")
    assert not list((tmp_path / "elsewhere").glob("**/checkpoint-*")), "the folder of the script stays unused"
    client.delete_job(name)
    assert gone(str(state))


def test_what_means_nothing_here_is_refused_before_anything_is_started(client: TrainerClient, state: Path) -> None:
    def submit(*options: Any, **given: Any) -> str:
        trainer = TransformersTrainer(func=functions.fails, **given)
        return str(client.train(trainer=trainer, options=list(options)))

    for words, options, given in (
        ("output_dir: 'pvc://c/x' is a claim of Kubernetes", [], {"output_dir": "pvc://c/x"}),
        ("name: '../x' is not accepted", [Name("../x")], {}),
        ("PET_NPROC_PER_NODE.*'many' is not accepted", [], {"env": {"PET_NPROC_PER_NODE": "many"}}),
    ):
        with pytest.raises(ConfigError, match=words):
            submit(*options, **given)
    assert not list(state.glob("**/job.json"))


def test_buttons_in_a_notebook_pause_and_resume(client: TrainerClient, state: Path, tmp_path: Path) -> None:
    given = {"steps": 5000, "pause_s": 0.05}
    name = client.train(trainer=TransformersTrainer(func=functions.tiny, func_args=given, output_dir="out"))
    wait_for(name, step=3, timeout_s=120)
    panel = Panel(name, client=client, every_s=0.3)

    def until(state: str) -> None:
        wait_for(name, state, client=client, timeout_s=60)
        limit = time.monotonic() + 20
        while f">{state}<" not in panel.view.value or panel.message.value:
            assert time.monotonic() < limit, (panel.view.value, panel.message.value)
            time.sleep(0.1)

    until("Running")
    assert (panel.pause.disabled, panel.resume.disabled) == (False, True)
    panel.pause.click()
    until("Paused")
    assert (panel.pause.disabled, panel.resume.disabled) == (True, False)
    stopped = progress(name).step
    panel.resume.click()
    until("Running")
    assert (panel.pause.disabled, panel.resume.disabled) == (False, True)
    assert wait_for(name, step=stopped + 2, timeout_s=120).resumed_from == f"checkpoint-{stopped}"
    panel.close()
    client.delete_job(name)
    assert gone(str(state))


def test_the_view_shows_no_markup_of_the_training(state: Path) -> None:
    from holdfast.kubeflow import Progress

    file = {"step": 1, "totalSteps": 2, "percentComplete": "50.0", "loss": "<script>alert(1)</script>"}
    text = as_html(Progress("<b>x", "Running", file))
    assert "<script>" not in text
    assert "<b>x" not in text
    assert "&lt;script&gt;" in text
    assert "width:50.0%" in text
    with pytest.raises(JobNotFoundError):
        progress("none", client=TrainerClient(LocalProcessBackendConfig()))
