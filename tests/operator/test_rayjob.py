"""The example of a RayJob on spot machines, with KubeRay's own operator."""

from __future__ import annotations

import functools
import glob
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_trainjob import drain
from trainings import folder_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples/kubernetes/ray"
EPOCHS, STEPS = 8, 8 * 50


@functools.cache
def expected() -> str:
    """Of the same script in a Ray of this machine, without holdfast."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "RAY_"))}
        environ |= {"HOLDFAST_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        options = ["--results", folder, "--epochs", str(EPOCHS), "--step-s", "0"]
        command = [sys.executable, str(EXAMPLE / "train_ray.py"), *options]
        subprocess.run(command, env=environ, check=True, capture_output=True, timeout=200, cwd=folder)
        return Path(folder, "digest").read_text()


def rayjob() -> dict[str, Any]:
    """The example for a small cluster without spot machines, and with the image that is there."""
    job = yaml.safe_load((EXAMPLE / "rayjob.yaml").read_text())
    job["spec"]["entrypoint"] += f" --epochs {EPOCHS} --step-s 0.1"
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        pod.pop("nodeSelector", None)
        pod["containers"][0]["image"] = "localhost/host:latest"
        pod["containers"][0]["imagePullPolicy"] = "IfNotPresent"
        requests = {"cpu": "100m", "memory": "256Mi"}
        pod["containers"][0]["resources"] = {"requests": requests, "limits": {"memory": "3Gi"}}
        group["rayStartParams"] |= {"object-store-memory": "100000000"}
    for group in cluster["workerGroupSpecs"]:
        group["rayStartParams"] |= {"num-cpus": "1"}
    submitter = {"name": "ray-job-submitter", "image": "localhost/host:latest", "imagePullPolicy": "IfNotPresent"}
    job["spec"]["submitterPodTemplate"] = {"spec": {"restartPolicy": "Never", "containers": [submitter]}}
    return job


class Training:
    """A RayJob, seen from outside."""

    def __init__(self, kube: Any) -> None:
        self.kube = kube
        self.name = rayjob()["metadata"]["name"]
        kube.kubectl("create", "configmap", self.name, f"--from-file={EXAMPLE}/train_ray.py")
        kube.apply(yaml.safe_load((EXAMPLE / "claim.yaml").read_text()))
        kube.apply(rayjob())

    def folder(self) -> str:
        return folder_of(self.kube, f"{self.name}-results")

    def progress(self) -> dict[str, Any]:
        (path,) = glob.glob(f"{self.folder()}/**/training_progress.json", recursive=True)
        with open(path, encoding="utf-8") as file:
            return json.load(file)

    def until_step(self, step: int) -> int:
        return self.kube.until(lambda: self._at_least(step), 200, f"step {step}")

    def _at_least(self, step: int) -> int | None:
        try:
            found = self.progress().get("step", 0)
        except (OSError, ValueError):
            return None
        return found if found >= step else None

    def workers(self) -> list[str]:
        items = self.kube.get("pods", "-l", "ray.io/node-type=worker")["items"]
        return [item["metadata"]["name"] for item in items if not item["metadata"].get("deletionTimestamp")]

    def resumed_at(self) -> int | None:
        try:
            name = self.progress().get("resumedFrom")
        except (OSError, ValueError):
            return None
        return int(name.removeprefix("checkpoint-")) if name else None

    def status(self) -> dict[str, Any]:
        return self.kube.get("rayjob", self.name).get("status", {})


def test_an_annotated_rayjob_resumes_when_a_worker_is_deleted_and_a_node_is_drained(operator):
    operator.add("kuberay")
    job = Training(operator)
    try:
        before = job.until_step(20)
        operator.kubectl("delete", "pod", job.workers()[0], "--wait=false")
        first = operator.until(lambda: (job.resumed_at() or -1) >= before and job.resumed_at(), 200, "resumed")
        before = job.until_step(first + 20)
        drain(operator, job.workers()[1], "ray.io/node-type=worker")
        operator.until(lambda: (job.resumed_at() or -1) >= before, 200, "resumed again")
        operator.until(lambda: job.status().get("jobStatus") == "SUCCEEDED", 200, "complete")
        assert job.progress()["step"] == STEPS
        assert Path(job.folder(), "digest").read_text() == expected()
    finally:
        operator.kubectl("delete", "rayjob", job.name, "--wait=false")
        operator.kubectl("delete", "configmap", job.name)
