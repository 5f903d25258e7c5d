"""TrainJobs that really train in containers, with Kubeflow Trainer's and JobSet's own controllers."""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any

import pytest
from jobs import claim, expected_digest, trainjob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Training:
    """A TrainJob that was submitted, and what can be seen of it from outside."""

    def __init__(self, kube, name: str, **options: Any) -> None:
        self.kube, self.name = kube, name
        kube.apply(claim(name))
        kube.apply(trainjob(name, **options))

    def progress(self) -> dict[str, Any]:
        return self.kube.get("trainjob", self.name).get("status", {}).get("trainingProgress", {})

    def until_step(self, step: int, timeout_s: float = 90) -> int:
        return self.kube.until(lambda: self.at_least(step), timeout_s, f"{self.name} at step {step}")

    def at_least(self, step: int) -> int | None:
        found = self.file().get("step", 0)
        return found if found >= step else None

    def file(self) -> dict[str, Any]:
        """What the progress file in the pod of rank 0 says."""
        pod = self.pods()[0]
        path = "/workspace/training_progress.json"
        return json.loads(self.kube.kubectl("exec", pod, "-c", "node", "--", "cat", path))

    def pods(self) -> list[str]:
        """Names of the pods that run, by rank."""
        selector = f"jobset.sigs.k8s.io/jobset-name={self.name}"
        items = self.kube.get("pods", "-l", selector, "--field-selector=status.phase=Running")["items"]
        living = [item for item in items if not item["metadata"].get("deletionTimestamp")]
        order = "batch.kubernetes.io/job-completion-index"
        return [i["metadata"]["name"] for i in sorted(living, key=lambda item: item["metadata"]["labels"][order])]

    def until_complete(self, timeout_s: float = 180) -> dict[str, Any]:
        words = ("wait", "trainjob", self.name, "--for=condition=Complete", f"--timeout={timeout_s:.0f}s")
        output = self.kube.kubectl(*words, check=False, timeout=timeout_s + 20)
        assert "condition met" in output, output + self.kube.state()
        return self.kube.until(lambda: self.progress().get("phase") == "Complete" and self.progress(), 60)

    def digest(self) -> str:
        with open(f"{self.folder()}/digest", encoding="ascii") as file:
            return file.read()

    def folder(self) -> str:
        volume = self.kube.get("pvc", self.name)["spec"]["volumeName"]
        path = self.kube.get("pv", volume)["spec"]
        return path.get("hostPath", path.get("local", {}))["path"]

    def order(self, what: str) -> None:
        """Let something happen to rank 1 after its next step."""
        folder = self.kube.until(self.folder, 30, "the claim is bound")
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/order.tmp", "w", encoding="ascii") as file:
            file.write(what)
        os.rename(f"{folder}/order.tmp", f"{folder}/order")

    def messages(self) -> list[str]:
        found = self.kube.get("events", "--field-selector", f"involvedObject.name={self.name}")["items"]
        return [event["message"] for event in found]

    def events(self) -> list[str]:
        found = self.kube.get("events", "--field-selector", f"involvedObject.name={self.name}")["items"]
        return [event["reason"] for event in found if event["source"].get("component") == "holdfast.dev/operator"]

    def step_of_resume(self) -> int:
        return int(re.fullmatch(r"checkpoint-(\d+)", self.progress()["resumedFrom"])[1])

    def remove(self) -> None:
        self.kube.kubectl("delete", "trainjob", self.name, "--wait=false")


@pytest.fixture
def training(operator, request):
    submitted: list[Training] = []

    def submit(name: str, **options: Any) -> Training:
        submitted.append(Training(operator, name, **options))
        return submitted[-1]

    yield submit
    for one in submitted:
        one.remove()


def evict(kube, pod: str) -> None:
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": "default"}}
    path = f"/api/v1/namespaces/default/pods/{pod}/eviction"
    kube.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


def drain(kube, pod: str) -> None:
    node = kube.get("pod", pod)["spec"]["nodeName"]
    words = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--disable-eviction", "--timeout=60s")
    selector = ("--pod-selector", "holdfast.dev/managed")
    kube.kubectl("drain", node, *words, *selector)
    kube.kubectl("uncordon", node)


def test_pods_are_deleted_evicted_drained_and_no_completed_step_is_lost(operator, training):
    job = training("interrupted", epochs=24)
    stops = [
        lambda pods: operator.kubectl("delete", "pod", pods[1], "--wait=false"),
        lambda pods: evict(operator, pods[0]),
        lambda pods: drain(operator, pods[1]),
    ]
    step = 0
    for number, stop in enumerate(stops, 1):
        before = job.until_step(step + 20)
        operator.until(lambda seen=before: job.progress().get("step", 0) >= seen, 60, "progress in the status")
        assert job.progress()["phase"] == "Running"
        before = job.until_step(before)
        stop(job.pods())
        operator.until(lambda seen=number: job.progress().get("recoveries") == seen, 120, f"resumed {number} times")
        step = job.step_of_resume()
        assert step >= before
    ended = job.until_complete()
    assert ended["step"] == 24 * 50
    assert ended["recoveries"] == len(stops)
    assert job.digest() == expected_digest(24)
    assert {"Running", "Preempted", "Resumed", "CheckpointCommitted", "Complete"} <= set(job.events())
    jobset = operator.get("jobset", job.name)["status"]
    assert not jobset.get("restartsCountTowardsMax"), jobset
    columns = operator.kubectl("get", "trainjob", job.name).splitlines()
    assert columns[0].split()[:6] == ["NAME", "STATE", "PHASE", "STEP", "PROGRESS", "ETA"]
    assert str(24 * 50) in columns[1].split()


def test_a_container_out_of_memory_is_told_apart_and_goes_on(operator, training):
    job = training("hungry", epochs=4)
    before = job.until_step(20)
    job.order("eat")
    operator.until(lambda: job.progress().get("recoveries") == 1, 120, "resumed")
    assert job.step_of_resume() >= before - 1
    assert any("OOMKilled" in message for message in job.messages()), job.messages()
    assert job.until_complete()["step"] == 4 * 50


def test_a_job_that_crashes_each_time_fails_in_the_end(operator, training):
    job = training("crashing", epochs=4)
    job.order("crash")
    operator.until(lambda: job.progress().get("phase") == "Failed", 240, "failed")
    restarts = operator.get("jobset", job.name)["status"]["restartsCountTowardsMax"]
    assert restarts == 3
    assert "Failed" in job.events()


def test_suspend_saves_and_resume_goes_on(operator, training):
    job = training("suspended")
    before = job.until_step(20)
    operator.kubectl("patch", "trainjob", "suspended", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    operator.until(lambda: not job.pods() and job.progress().get("phase") == "Suspended", 60, "suspended")
    time.sleep(1)
    operator.kubectl("patch", "trainjob", "suspended", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    operator.until(lambda: job.progress().get("recoveries") == 1, 90, "resumed")
    assert job.step_of_resume() >= before
    job.until_complete()
    assert job.digest() == expected_digest()
