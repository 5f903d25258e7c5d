"""TrainJobs that really train in containers, with Kubeflow Trainer's and JobSet's own controllers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import NAMESPACE, expected_digest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def evict(kube, pod: str) -> None:
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": "default"}}
    path = f"/api/v1/namespaces/default/pods/{pod}/eviction"
    kube.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


def drain(kube, pod: str, selector: str = "holdfast.dev/managed") -> None:
    node = kube.get("pod", pod)["spec"]["nodeName"]
    words = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s")
    kube.kubectl("drain", node, *words, "--pod-selector", selector)
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
        if number == 2:  # in the middle of that, those who watch over it are gone, all of them
            selector = ("-l", "app.kubernetes.io/component=operator")
            operator.kubectl("delete", "pods", "-n", NAMESPACE, *selector, "--grace-period=0", "--force")
        operator.until(lambda seen=number: job.progress().get("recoveries") == seen, message=f"resumed {number} times")
        step = job.step_of_resume()
        assert step >= before
    ended = job.until_complete()
    assert ended["step"] == 24 * 50
    assert ended["recoveries"] == len(stops)
    assert job.digest() == expected_digest(24)
    assert {"Created", "Running", "Preempted", "Resumed", "CheckpointCommitted", "Complete"} <= set(job.events())
    assert job.events().count("Resumed") == len(stops)
    jobset = operator.get("jobset", job.name)["status"]
    assert not jobset.get("restartsCountTowardsMax"), jobset
    columns = operator.kubectl("get", "trainjob", job.name).splitlines()
    assert columns[0].split()[:6] == ["NAME", "STATE", "PHASE", "STEP", "PROGRESS", "ETA"]
    assert str(24 * 50) in columns[1].split()


def test_a_container_out_of_memory_is_told_apart_and_goes_on(operator, training):
    job = training("hungry", epochs=4)
    before = job.until_step(20)
    job.order("eat")
    operator.until(lambda: job.progress().get("recoveries") == 1, message="resumed")
    assert job.step_of_resume() >= before - 1
    assert any("OOMKilled" in message for message in job.messages()), job.messages()
    assert job.until_complete()["step"] == 4 * 50


def test_a_job_that_crashes_each_time_fails_in_the_end(operator, training):
    job = training("crashing", epochs=4)
    job.order("crash")
    operator.until(lambda: job.progress().get("phase") == "Failed", message="failed")
    restarts = operator.get("jobset", job.name)["status"]["restartsCountTowardsMax"]
    assert restarts == 3
    assert "Failed" in job.events()


def test_suspend_saves_and_resume_goes_on(operator, training):
    job = training("suspended")
    before = job.until_step(20)
    operator.kubectl("patch", "trainjob", "suspended", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    operator.until(lambda: not job.pods() and job.progress().get("phase") == "Suspended", message="suspended")
    operator.kubectl("patch", "trainjob", "suspended", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    operator.until(lambda: job.progress().get("recoveries") == 1, message="resumed")
    assert job.step_of_resume() >= before
    job.until_complete()
    assert job.digest() == expected_digest()


def killed_with(node: str) -> Iterator[int]:
    """Processes of the pods on a node of the test cluster."""
    for path in Path("/sys/fs/cgroup").glob(f"**/hf-{node}/**/cgroup.procs"):
        try:
            yield from map(int, path.read_text().split())
        except OSError:
            continue


def free_of_controllers(kube, node: str) -> None:
    """Nothing that makes or checks pods runs on the node: without JobSet's own webhook nobody could replace any."""

    def there() -> list[tuple[str, str]]:
        metadata = [
            item["metadata"] for item in kube.get("pods", "-A", f"--field-selector=spec.nodeName={node}")["items"]
        ]
        theirs = [one for one in metadata if one["namespace"] not in ("default", "holdfast-system", "kube-system")]
        return [(one["namespace"], one["name"]) for one in theirs]

    if there():
        kube.kubectl("cordon", node)
        for namespace, name in (found := there()):
            kube.kubectl("delete", "pod", name, "-n", namespace, "--wait=false")
        for namespace in {namespace for namespace, _ in found}:
            kube.kubectl("rollout", "status", "deployment", "-n", namespace, "--timeout=300s")
        kube.until(lambda: not there(), message=f"{node} is free of controllers")
        kube.kubectl("uncordon", node)


def test_a_node_is_lost_and_the_job_goes_on_without_it(operator, training):
    if operator.script is None:
        pytest.skip("needs a cluster whose node can be lost: one made by the script that HOLDFAST_TEST_CLUSTER names")
    job = training("node-lost", epochs=16, interval="20 steps")
    job.until_step(1)
    lost = operator.get("pod", job.pods()[1])["spec"]["nodeName"]
    free_of_controllers(operator, lost)
    before = job.until_step(50)
    kubelet = int((operator.folder / f"cluster/pid/kubelet-{lost}").read_text())
    os.kill(kubelet, signal.SIGSTOP)
    try:
        for pid in set(killed_with(lost)):
            with contextlib.suppress(OSError):  # with the first process of a container the kernel kills the others
                if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        operator.until(lambda: job.progress().get("recoveries") == 1, message="resumed on the node that is left")
        assert job.step_of_resume() >= before - 1
    finally:
        os.kill(kubelet, signal.SIGCONT)
    assert job.until_complete()["step"] == 16 * 50  # with other random numbers for the rank that is gone
