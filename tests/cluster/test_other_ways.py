"""Where the CRD may not be touched and nobody may exec into pods: annotations, and pods that tell by themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.jobs import NAMESPACE, claim, expected_digest, trainjob
from tests.cluster.trainings import folder_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:holdfast-operator"
SHOW = """
import json, os, sys, urllib.request, ssl
def told(token):
    url, authority = os.environ["HOLDFAST_PROGRESS_URL"], os.environ["HOLDFAST_PROGRESS_CA"]
    request = urllib.request.Request(url, b'{"step": 999999}', {"Authorization": f"Bearer {token}"}, method="POST")
    try:
        return urllib.request.urlopen(request, context=ssl.create_default_context(cadata=authority)).status
    except urllib.error.HTTPError as error:
        return error.code
def answer(token):  # of the replica that acts
    return next(status for status in iter(lambda: told(token), None) if status != 503)
own = open("/var/run/secrets/kubernetes.io/serviceaccount/token").read()
print(json.dumps([answer(own), answer("x.y.z"), answer("a" * 20000)]))
"""


def leads_one_of(kube) -> bool:
    """Whether the pod that leads is there, and stays."""
    holder = kube.get("lease", "holdfast-operator", "-n", NAMESPACE)["spec"]["holderIdentity"]
    items = kube.get("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/name=holdfast-operator")["items"]
    staying = [item["metadata"]["name"] for item in items if not item["metadata"].get("deletionTimestamp")]
    return any(holder.startswith(name) for name in staying)


@pytest.fixture
def other(operator):
    """The operator with other values, for one test."""

    def upgrade(*values: str) -> None:
        words = ("helm", "upgrade", "holdfast-operator", operator.chart, "-n", NAMESPACE, "-f", operator.values)
        operator.run(*words, *(f"--set={value}" for value in values))
        operator.kubectl("rollout", "status", "-n", NAMESPACE, "deployment/holdfast-operator", "--timeout=300s")
        operator.until(lambda: leads_one_of(operator), message="a pod of the new version leads")

    upgrade("progress.by=push", "crd.patch=false")
    yield operator
    upgrade()


def test_a_job_asks_by_annotation_and_its_pods_tell_their_progress(other):
    can = ("auth", "can-i", "create", "pods", "--subresource=exec", f"--as={ACCOUNT}")
    assert other.kubectl(*can, check=False).strip() == "no"
    name = "telling"
    job = trainjob(name, epochs=6)
    job["metadata"]["annotations"] = {"holdfast.dev/checkpointing": json.dumps(job["spec"].pop("checkpointing"))}
    other.apply(claim(name))
    other.apply(job)

    def shown() -> dict[str, Any]:
        thing = other.get("trainjob", name)
        assert "trainingProgress" not in thing.get("status", {})
        return json.loads(thing["metadata"].get("annotations", {}).get("holdfast.dev/training-progress", "{}"))

    def pod() -> str:
        selector = f"jobset.sigs.k8s.io/jobset-name={name}"
        items = other.get("pods", "-l", selector, "--field-selector=status.phase=Running")["items"]
        return items[0]["metadata"]["name"]

    try:
        seen = other.until(lambda: shown().get("step", 0) > 20 and shown(), message="progress in the annotation")
        assert seen["phase"] == "Running"
        # A token that was made for another use, one that is none, and one that is too long.
        said = other.kubectl("exec", pod(), "-c", "node", "--", "python", "-c", SHOW)
        assert json.loads(said) == [401, 401, 400]
        other.kubectl("delete", "pod", pod(), "--wait=false")
        other.until(lambda: shown().get("recoveries") == 1, message="resumed")
        other.until(lambda: shown().get("phase") == "Complete", message="complete")
        assert shown()["step"] == 6 * 50
        with open(f"{folder_of(other, name)}/digest", encoding="ascii") as file:
            assert file.read() == expected_digest(6)
    finally:
        other.kubectl("delete", "trainjob", name, "--wait=false")
