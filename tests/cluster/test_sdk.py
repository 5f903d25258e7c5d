"""A trainer of the Kubeflow SDK on the real cluster: it trains in pods, is suspended, goes on, and loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.jobs import claim
from tests.cluster.trainings import folder_of
from tests.kit import python_path
from tests.unit.kubeflow import functions

pytest.importorskip("kubeflow.trainer", reason="needs the Kubeflow SDK: pip install 'holdfast[kubeflow]'")

from kubeflow.trainer import KubernetesBackendConfig, TrainerClient
from kubeflow.trainer.options import Name

from holdfast.errors import ConfigError
from holdfast.kubeflow import (
    JobNotFoundError,
    TransformersTrainer,
    checkpoints,
    pause,
    progress,
    resume,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MOUNT = "/mnt/kubeflow-checkpoints"
STEPS = 160


def undisturbed(folder: Path) -> dict:
    """What a run without holdfast ends with."""
    script = folder / "plain.py"
    path = folder / "plain.json"
    script.write_text(
        f"from tests.unit.kubeflow import functions\nfunctions.tiny({STEPS}, path={str(path)!r})\n"
        # Else threads of gloo abort some processes on their way out.
        "import torch.distributed\ntorch.distributed.destroy_process_group()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        env={**os.environ, "PYTHONPATH": python_path(), "HOLDFAST_ENABLED": "0", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(path.read_text())


@pytest.fixture
def client(operator, monkeypatch: pytest.MonkeyPatch) -> TrainerClient:
    monkeypatch.setenv("KUBECONFIG", operator.environ["KUBECONFIG"])
    config = KubernetesBackendConfig(config_file=operator.environ["KUBECONFIG"], namespace="default")
    return TrainerClient(config)


def cli(operator, *words: str) -> str:
    words = (sys.executable, "-m", "holdfast.cli", "jobs", *words)
    return operator.run(*words, "--on", "kubernetes", "-n", "default")


def test_a_suspended_job_ends_with_the_losses_and_the_bits_of_an_undisturbed_one(operator, client, tmp_path):
    operator.apply(claim("sdk"))
    trainer = TransformersTrainer(
        func=functions.tiny,
        func_args={"steps": STEPS, "pause_s": 0.4, "path": f"{MOUNT}/runs/told.json"},
        num_nodes=2,
        resources_per_node={"cpu": "1", "memory": "1500Mi"},
        output_dir="pvc://sdk/runs",
        env={"OMP_NUM_THREADS": "1", "HOLDFAST_KILL_WAIT": "0"},
    )
    name = client.train(trainer=trainer, options=[Name("sdk")])
    try:
        wait_for(name, client=client, step=5, timeout_s=240)
        assert f"{name} · Running · step" in cli(operator, "progress", name)
        stopped = pause(name, client=client)
        assert stopped.state == "Paused"
        assert operator.get("trainjob", name)["spec"]["suspend"] is True
        folder = Path(folder_of(operator, "sdk"), "runs")
        saved = sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))
        assert 5 <= saved[-1] < STEPS
        # The operator sees what the pods said last when they are gone: the status follows a moment later.
        operator.until(
            lambda: checkpoints(name, client=client)[0]["step"] == saved[-1], message="the checkpoint is shown"
        )
        assert "Paused" in cli(operator, "list")

        resume(name, client=client)
        going = operator.until(lambda: progress(name, client=client).resumed_from, message="resumed")
        assert going == f"checkpoint-{saved[-1]}"
        ended = wait_for(name, client=client, timeout_s=180)
        assert ended.state == "Complete"
        assert client.get_job(name).status == "Complete"
        assert "[Kubeflow] JIT checkpointing enabled" in "\n".join(client.get_job_logs(name))
        told, plain = json.loads((folder / "told.json").read_text()), undisturbed(tmp_path)
        assert told["trace"] == plain["trace"]
        assert told["digest"] == plain["digest"]
        assert (folder / "final" / "model.safetensors").is_file()
        pods = operator.get("pods", "-l", f"jobset.sigs.k8s.io/jobset-name={name}")["items"]
        assert {pod["spec"]["terminationGracePeriodSeconds"] for pod in pods} == {60}
    finally:
        client.delete_job(name)
    operator.until(
        lambda: "sdk-holdfast" not in operator.kubectl("get", "configmaps"), message="what was carried is gone"
    )
    assert list(folder.glob("checkpoint-*")), "checkpoints stay"


def test_what_the_cluster_does_not_have_is_said_before_anything_is_submitted(operator, client):
    for words, given in (
        (
            "output_dir: the claim 'nowhere' does not exist in the namespace 'default'",
            {"output_dir": "pvc://nowhere/x"},
        ),
        ("secret_name: the secret 'keys' does not exist", {"output_dir": "s3://b/p", "secret_name": "keys"}),
        ("output_dir: 'here' is relative", {"output_dir": "here"}),
    ):
        with pytest.raises(ConfigError, match=words):
            client.train(trainer=TransformersTrainer(func=functions.fails, **given), options=[Name("never")])
    assert "never" not in operator.kubectl("get", "trainjobs,configmaps")
    with pytest.raises(JobNotFoundError, match="no TrainJob 'never'"):
        progress("never", client=client)
