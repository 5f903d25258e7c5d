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

from tests.cluster.test_trainjob import drain
from tests.cluster.trainings import folder_of
from tests.kit import ROOT
from tests.kit.kube import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLE = ROOT / "examples/kubernetes/ray"
EPOCHS, STEPS = 5, 5 * 50


@functools.cache
def expected() -> str:
    """Of the same script in a Ray of this machine, without holdfast."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "RAY_"))}
        environ |= {"HOLDFAST_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        options = ["--results", folder, "--epochs", str(EPOCHS), "--step-s", "0"]
        command = [sys.executable, str(EXAMPLE / "train_ray.py"), *options]
        subprocess.run(command, env=environ, check=True, capture_output=True, timeout=PATIENCE_S, cwd=folder)
        return Path(folder, "digest").read_text()


def made_small(job: dict[str, Any]) -> None:
    """For a cluster without spot machines, and with the image that is there."""
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


class Training:
    """A RayJob, seen from outside."""

    def __init__(self, kube: Any) -> None:
        self.kube = kube
        things = list(yaml.safe_load_all(kube.kubectl("kustomize", str(EXAMPLE))))
        (job,) = (thing for thing in things if thing["kind"] == "RayJob")
        made_small(job)
        self.name = job["metadata"]["name"]
        kube.apply(*things)

    def folder(self) -> str:
        return folder_of(self.kube, f"{self.name}-results")

    def progress(self) -> dict[str, Any]:
        (path,) = glob.glob(f"{self.folder()}/**/training_progress.json", recursive=True)
        with open(path, encoding="utf-8") as file:
            return json.load(file)

    def until_step(self, step: int) -> int:
        return self.kube.until(lambda: self._at_least(step), message=f"step {step}")

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


def test_the_annotations_become_variables_of_every_ray_container_and_a_bad_value_is_refused(operator):
    operator.add("kuberay")
    things = yaml.safe_load_all(operator.kubectl("kustomize", str(EXAMPLE)))
    (spec,) = (thing["spec"]["rayClusterSpec"] for thing in things if thing["kind"] == "RayJob")
    on = {"ray.io/jit-checkpoint-enabled": "true", "ray.io/jit-checkpoint-kill-wait": "5.0"}
    for kind, inside in (
        ("RayCluster", spec),
        ("RayService", {"rayClusterConfig": spec, "serveConfigV2": ""}),
        ("RayJob", {"rayClusterSpec": spec, "entrypoint": "true"}),
    ):
        thing = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": "tried"}, "spec": inside}
        thing["metadata"]["annotations"] = on
        words = ("create", "--dry-run=server", "-o", "json", "-f", "-")
        made = json.loads(operator.kubectl(*words, stdin=json.dumps(thing)))["spec"]
        made = made.get("rayClusterConfig") or made.get("rayClusterSpec") or made
        for group in (made["headGroupSpec"], *made["workerGroupSpecs"]):
            given = {one["name"]: one.get("value") for one in group["template"]["spec"]["containers"][0]["env"]}
            assert given["RAY_TRAIN_JIT_CHECKPOINT_ENABLED"] == "true"
            assert given["RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT"] == "5.0"
            assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= 65
        thing["metadata"]["annotations"] = {"ray.io/jit-checkpoint-kill-wait": "soon"}
        assert "jit-checkpoint-kill-wait: 'soon' is not accepted; it must be a number of seconds" in operator.refused(
            thing
        )


def test_an_annotated_rayjob_resumes_when_a_worker_is_deleted_and_a_node_is_drained(operator):
    operator.add("kuberay")
    job = Training(operator)
    try:
        before = job.until_step(20)
        operator.kubectl("delete", "pod", job.workers()[0], "--wait=false")
        first = operator.until(lambda: (job.resumed_at() or -1) >= before and job.resumed_at(), message="resumed")
        before = job.until_step(first + 20)
        drain(operator, job.workers()[1], "ray.io/node-type=worker")
        operator.until(lambda: (job.resumed_at() or -1) >= before, message="resumed again")
        operator.until(lambda: job.status().get("jobStatus") == "SUCCEEDED", message="complete")
        assert job.progress()["step"] == STEPS
        assert Path(job.folder(), "digest").read_text() == expected()
    finally:
        operator.kubectl("delete", "rayjob", job.name, "--wait=false")
        operator.kubectl("delete", "configmap", job.name)
