"""The example of a TrainJob with TRL, on the real cluster: claim, runtime, job and script as they are in the tree."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cluster.trainings import Submitted, folder_of
from tests.kit import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLE = ROOT / "examples/kubernetes/gpt2"
STEPS = "400"


def test_gpt2_is_preempted_resumes_and_shows_how_far_it_is(operator):
    things = list(yaml.safe_load_all(operator.kubectl("kustomize", str(EXAMPLE))))
    (runtime,) = (thing for thing in things if thing["kind"] == "TrainingRuntime")
    job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["containers"][0] |= {"image": "localhost/host:latest", "imagePullPolicy": "IfNotPresent"}
    # Without a network, and small: everything else is the example's.
    pod["containers"][0]["env"] = [{"name": "HF_HUB_OFFLINE", "value": "1"}, {"name": "HOME", "value": "/tmp"}]
    trainer = job["spec"]["trainer"]
    trainer["args"] = ["--model", "tiny", "--dataset", "text", "--output", "/workspace/checkpoints", "--steps", STEPS]
    trainer["resourcesPerNode"] = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "3Gi"}}
    # A quick machine would come to the end while it waits before it saves.
    job["spec"]["checkpointing"]["env"].append({"name": "HOLDFAST_KILL_WAIT", "value": "0"})
    operator.apply(*things)
    operator.until(lambda: operator.apply(job), message="Kubeflow Trainer knows the runtime")
    training = Submitted(operator, "gpt2")
    try:
        before = training.until_step(20)
        operator.kubectl("delete", "pod", training.pods()[1], "--wait=false")
        operator.until(lambda: training.progress().get("recoveries") == 1, message="resumed")
        assert training.step_of_resume() >= before
        shown = operator.until(lambda: training.progress().get("percentComplete") and training.progress())
        assert shown["totalSteps"] == int(STEPS)
        ended = training.until_complete()
        assert (ended["step"], ended["percentComplete"]) == (int(STEPS), "100.0")
        assert Path(folder_of(operator, "gpt2-checkpoints"), "final/model.safetensors").is_file()
    finally:
        training.remove()
        operator.kubectl("delete", "configmap", "gpt2-train")
