"""The operator, installed from its chart in the cluster of all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.jobs import NAMESPACE, crd_spec
from tests.cluster.trainings import Training
from tests.kit.kube import Kube


@pytest.fixture(scope="session")
def operator(kube: Kube) -> Iterator[Kube]:
    """The cluster with the operator, installed as its chart says, and after it, which is harder, what it watches."""
    kube.kubectl("create", "namespace", NAMESPACE, check=False)
    values = {
        "image": {"repository": "localhost/host", "tag": "latest", "pullPolicy": "IfNotPresent"},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
    }
    Path(kube.values).write_text(yaml.safe_dump(values))
    kube.run("helm", "install", "holdfast-operator", kube.chart, "-n", NAMESPACE, "-f", kube.values)
    kube.kubectl("rollout", "status", "-n", NAMESPACE, "deployment/holdfast-operator", "--timeout=300s")
    kube.add("jobset", "trainer")
    kube.until(lambda: "checkpointing" in crd_spec(kube), message="the fields are in the CRD")
    kube.until(lambda: ca_bundle(kube), message="the API server trusts the webhooks")
    yield kube
    kube.run("helm", "uninstall", "holdfast-operator", "-n", NAMESPACE)
    left = kube.kubectl(
        "get", "secrets,leases,deployments,services,roles,serviceaccounts", "-n", NAMESPACE, "-o", "name"
    )
    left += kube.kubectl("get", "clusterroles,clusterrolebindings,mutatingwebhookconfigurations", "-o", "name")
    assert "holdfast" not in left
    assert "checkpointing" not in crd_spec(kube)


def ca_bundle(kube: Kube) -> bool:
    webhooks = kube.get("mutatingwebhookconfiguration", "holdfast-operator")["webhooks"]
    return all(webhook["clientConfig"].get("caBundle") for webhook in webhooks)


@pytest.fixture
def training(operator: Kube) -> Iterator[Callable[..., Training]]:
    """Submits a TrainJob, which is deleted at the end."""
    submitted: list[Training] = []

    def submit(name: str, labels: dict[str, str] | None = None, **options: Any) -> Training:
        submitted.append(Training(operator, name, labels, **options))
        return submitted[-1]

    yield submit
    for one in submitted:
        one.remove()
