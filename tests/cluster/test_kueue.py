"""With Kueue's own controller, which decides who trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import expected_digest
from tests.cluster.trainings import Training
from tests.kit.kube import Kube

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"


def queue() -> list[dict[str, Any]]:
    """Room for one job of two nodes at a time; who is more important may take it."""
    group, version = "kueue.x-k8s.io", "v1beta1"

    def thing(kind: str, name: str, **fields: Any) -> dict[str, Any]:
        return {"apiVersion": f"{group}/{version}", "kind": kind, "metadata": {"name": name}, **fields}

    quota = [{"name": "cpu", "nominalQuota": "1"}, {"name": "memory", "nominalQuota": "8Gi"}]
    cluster_queue = {
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [
            {"coveredResources": ["cpu", "memory"], "flavors": [{"name": "any", "resources": quota}]},
        ],
    }
    return [
        thing("ResourceFlavor", "any"),
        thing("ClusterQueue", "all", spec=cluster_queue),
        thing("LocalQueue", "training", spec={"clusterQueue": "all"}),
        thing("WorkloadPriorityClass", "low", value=10, description="waits"),
        thing("WorkloadPriorityClass", "high", value=1000, description="does not wait"),
    ]


def test_a_job_that_is_preempted_by_a_more_important_one_saves_waits_and_goes_on(operator, training):
    operator.add("kueue")
    operator.until(lambda: operator.apply(*queue()), message="Kueue takes its queues")
    labels = {QUEUE: "training", PRIORITY: "low"}
    low = training("unimportant", labels, epochs=10, cpu="500m")
    before = low.until_step(30)
    high = training("important", {**labels, PRIORITY: "high"}, epochs=2, cpu="500m")
    operator.until(lambda: low.progress().get("phase") == "Suspended" and not low.pods(), message="preempted")
    assert high.until_complete()["step"] == 2 * 50
    operator.until(lambda: low.progress().get("recoveries") == 1, message="admitted again")
    assert low.step_of_resume() >= before
    pauses_and_goes_on(operator, low)
    assert low.until_complete()["step"] == 10 * 50
    assert low.digest() == expected_digest(10)


def pauses_and_goes_on(operator: Kube, low: Training) -> None:
    """By the command, although Kueue takes back what anybody else writes to ``spec.suspend``."""
    holdfast = (str(Path(sys.executable).with_name("holdfast")), "jobs")
    names = ("--on", "kubernetes", "--namespace", "default", low.name)
    assert "· Paused ·" in operator.run(*holdfast, "pause", *names)
    uid = operator.get("trainjob", low.name)["metadata"]["uid"]
    [workload] = operator.get("workloads", "-l", f"kueue.x-k8s.io/job-uid={uid}")["items"]
    assert workload["spec"]["active"] is False
    saved = low.progress()
    assert (saved["phase"], low.pods()) == ("Suspended", [])
    operator.run(*holdfast, "resume", *names)
    operator.until(lambda: low.progress().get("recoveries") == 2, message="resumed")
    assert low.step_of_resume() == saved["step"]
