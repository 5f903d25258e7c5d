"""A plain Job that really trains, with nothing that it may write to but an object store."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest

from tests.cluster.jobs import TRAIN
from tests.kit.ports import free_port
from tests.kit.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, find_versitygw

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HOST = "10.89.0.254"
"""This machine, as pods of the test cluster see it."""


@pytest.fixture
def variables(operator, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a container that uses an S3 server on this machine."""
    if operator.script is None:
        pytest.skip("needs a cluster whose pods reach this machine: one made by what HOLDFAST_TEST_CLUSTER names")
    (tmp_path / "data" / BUCKET).mkdir(parents=True)
    address = f"{HOST}:{free_port()}"
    command = [find_versitygw(tmp_path), "--port", address, "--region", "us-east-1", "--quiet", "posix"]
    environ = {**os.environ, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with contextlib.ExitStack() as stack:
        server = subprocess.Popen([*command, str(tmp_path / "data")], env=environ, **quiet)
        stack.callback(server.wait)
        stack.callback(server.kill)
        yield {
            "AWS_ENDPOINT_URL": f"http://{address}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "SSL_CERT_FILE": certifi.where(),  # the root of these pods has none
        }


def test_a_job_without_root_and_without_a_volume_is_preempted_and_goes_on_from_the_object_store(operator, variables):
    name, epochs = "plain-training", 4
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": variables}
    block = {
        "resumeFromCheckpoint": False,  # from another job: its own restart must go on all the same
        "gracePeriodSeconds": 30,
        "storage": {"uri": f"s3://{BUCKET}/{name}", "secretRef": {"name": name}},
        "env": [{"name": "HOLDFAST_KILL_WAIT", "value": "0"}, {"name": "HOME", "value": "/tmp"}],
    }
    container = {
        "name": "main",
        "image": "localhost/host",
        "imagePullPolicy": "IfNotPresent",
        "command": ["torchrun", "--standalone", TRAIN, str(epochs), "0.05", "/tmp/digest"],
        "securityContext": {"runAsUser": 65534, "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    template = {"spec": {"containers": [container], "volumes": [{"name": "tmp", "emptyDir": {}}]}}
    template["spec"] |= {"restartPolicy": "Never", "hostNetwork": True}  # nodes reach this machine, and pods do not
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {"template": template}}
    job["metadata"]["annotations"] = {"holdfast.dev/checkpointing": json.dumps(block)}
    operator.apply(secret, job)

    def shown() -> dict:
        annotations = operator.get("job", name)["metadata"]["annotations"]
        return json.loads(annotations.get("holdfast.dev/training-progress", "{}"))

    try:
        before = operator.until(lambda: shown().get("step"), message="progress, from the termination log")
        assert shown()["phase"] == "Running"
        operator.kubectl("delete", "pod", "-l", f"batch.kubernetes.io/job-name={name}", "--wait=false")
        operator.until(lambda: shown().get("recoveries") == 1, message="resumed")
        assert int(shown()["resumedFrom"].removeprefix("checkpoint-")) >= before
        ended = operator.until(lambda: shown().get("phase") == "Complete" and shown(), message="complete")
        assert ended["step"] == epochs * 100
        assert "estimatedTimeRemaining" not in ended
    finally:
        operator.kubectl("delete", f"job/{name}", f"secret/{name}", "--wait=false")
