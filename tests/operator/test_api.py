"""What the API server itself accepts, refuses and keeps, with the operator installed from its chart."""

from __future__ import annotations

import json
import time

import pytest
from jobs import NAMESPACE, claim, crd_spec, trainjob

pytestmark = pytest.mark.timeout(240)


def changed(**block):
    thing = trainjob("refused")
    thing["spec"]["checkpointing"] |= block
    return thing


VOLUME = {"claimName": "c", "mountPath": "/checkpoints"}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"interval": "soon"}, "interval must be a duration such as 30s, 5m or 1h30m"),
        ({"maxCheckpoints": 0}, "maxCheckpoints must be 1 or more"),
        ({"gracePeriodSeconds": 1}, "gracePeriodSeconds must be 5 or more"),
        ({"storage": {"uri": "ftp://host/path"}}, "uri must begin with s3://, gs:// or az://"),
        ({"storage": {"uri": "s3://key:secret@bucket/x"}}, "uri must hold no credentials"),
        ({"storage": {"persistentVolume": {"claimName": "c"}}}, "mountPath is missing"),
        ({"storage": {"persistentVolume": {"mountPath": "/c"}}}, "claimName is missing"),
        ({"storage": {"persistentVolume": {"claimName": "c", "mountPath": "here"}}}, "mountPath must be an absolute"),
        ({"storage": {"uri": "/elsewhere", "persistentVolume": VOLUME}}, "uri must lie below"),
        ({"storage": {"accessMode": "Sometimes", "persistentVolume": VOLUME}}, "Unsupported value"),
        (
            {"env": [{"name": "CHECKPOINT_STRATEGY", "value": "daily"}]},
            "CHECKPOINT_STRATEGY must be epoch, steps or time",
        ),
        (
            {"env": [{"name": "CHECKPOINT_SAVE_TYPE", "value": "half"}]},
            "CHECKPOINT_SAVE_TYPE must be full or incremental",
        ),
        ({"env": [{"name": "PROGRESS_UPDATE_FREQUENCY", "value": "0"}]}, "PROGRESS_UPDATE_FREQUENCY must be a whole"),
    ],
)
def test_a_block_that_is_not_accepted_is_refused_in_plain_words(operator, block, message):
    # By the webhook, and by the API server itself where no webhook looks.
    said = operator.refused(changed(**block))
    assert "is not accepted; it must be" in said or "is missing; it must be" in said or "does not lie on" in said, said
    assert message in operator.refused(changed(**block), namespace="kube-system")


def test_a_bad_annotation_is_refused_too(operator):
    thing = trainjob("annotated")
    del thing["spec"]["checkpointing"]
    thing["metadata"]["annotations"] = {"holdfast.dev/checkpointing": '{"interval": "soon"}'}
    assert 'interval: \\"soon\\" is not accepted' in json.dumps(operator.refused(thing)).replace("\\\\", "\\")


def test_defaults_are_filled_in_and_the_block_cannot_be_changed_later(operator):
    operator.apply(claim("fixed"))
    operator.apply({**trainjob("fixed"), "spec": {**trainjob("fixed")["spec"], "suspend": True}})
    block = operator.get("trainjob", "fixed")["spec"]["checkpointing"]
    assert (block["enabled"], block["maxCheckpoints"], block["resumeFromCheckpoint"]) == (True, 3, True)
    words = ("patch", "trainjob", "fixed", "--type=merge", "-p", '{"spec":{"checkpointing":{"maxCheckpoints":9}}}')
    assert "cannot be changed after the job was created" in operator.kubectl(*words, check=False)
    operator.kubectl("delete", "trainjob", "fixed")


def test_an_upgrade_that_replaces_the_crd_gets_the_fields_back(operator):
    path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/checkpointing"
    patch = json.dumps([{"op": "remove", "path": path}])
    operator.kubectl("patch", "crd", "trainjobs.trainer.kubeflow.org", "--type=json", "-p", patch)
    assert "checkpointing" not in crd_spec(operator)
    operator.until(lambda: "checkpointing" in crd_spec(operator), 60, "the field is back")


def test_the_operator_may_do_what_it_does_and_no_more(operator):
    def may(*words: str) -> bool:
        account = f"system:serviceaccount:{NAMESPACE}:holdfast-operator"
        return operator.kubectl("auth", "can-i", *words, f"--as={account}", check=False).startswith("yes")

    assert may("create", "pods", "--subresource=exec")
    assert may("patch", "trainjobs.trainer.kubeflow.org", "--subresource=status")
    assert may("patch", "crd/trainjobs.trainer.kubeflow.org")
    assert not may("patch", "crd/jobsets.jobset.x-k8s.io")
    assert not may("get", "secrets", "-n", "default")
    assert not may("create", "pods")
    assert not may("delete", "persistentvolumeclaims")
    assert not may("delete", "trainjobs.trainer.kubeflow.org")


def test_what_the_webhooks_add_to_a_plain_job_and_to_a_jobset(operator):
    pod = {
        "containers": [{"name": "main", "image": "localhost/host", "command": ["sleep", "1"]}],
        "restartPolicy": "Never",
    }
    block = {"storage": {"persistentVolume": {"claimName": "shared", "mountPath": "/c"}}}
    annotations = {"holdfast.dev/checkpointing": json.dumps(block)}
    job = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"suspend": True, "template": {"spec": pod}}}
    operator.apply({**job, "metadata": {"name": "plain", "annotations": annotations}})
    spec = operator.get("job", "plain")["spec"]
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["Ignore", "Ignore"]
    names = [variable["name"] for variable in spec["template"]["spec"]["containers"][0]["env"]]
    assert {"HOLDFAST_ENABLED", "CHECKPOINT_URI", "TRAINING_PROGRESS_FILE", "HOLDFAST_RUN_ID"} <= set(names)
    replicated = [{"name": "w", "replicas": 1, "template": {"spec": {"template": {"spec": pod}}}}]
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "spec": {"suspend": True, "replicatedJobs": replicated},
    }
    operator.apply({**jobset, "metadata": {"name": "set", "annotations": annotations}})
    policy = operator.get("jobset", "set")["spec"]["failurePolicy"]
    assert policy["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    operator.apply({**jobset, "metadata": {"name": "later"}})
    text = f"holdfast.dev/checkpointing={json.dumps(block)}"
    said = operator.kubectl("annotate", "jobset", "later", text, check=False)
    assert "cannot be added to a JobSet that is there already" in said
    operator.kubectl("delete", "job/plain", "jobset/set", "jobset/later", "--wait=false")


PRETENDS = """
import json, os, sys, time
data = {
    "torn": b'{"step": 5, "loss',
    "huge": b'{"step": 5, "loss": "' + b"x" * 100_000_000 + b'"}',
    "not json": b"<html><script>alert(1)</script></html>",
    "markup": b'{"step": "<b>5</b>", "estimatedTimeRemaining": "\\\\u001b[31m"}',
    "stale": b'{"step": 5, "lastUpdateTime": "2020-01-01T00:00:00Z"}',
}[sys.argv[1]]
os.makedirs("/workspace", exist_ok=True)
with open("/workspace/training_progress.json", "wb") as file:
    file.write(data)
time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["torn", "huge", "not json", "markup", "stale"])
def test_a_progress_file_that_no_run_writes_changes_nothing_but_a_condition(operator, kind):
    name = f"pretends-{kind.replace(' ', '-')}"
    operator.apply(claim(name))
    thing = trainjob(name)
    thing["spec"]["trainer"] |= {"numNodes": 1, "command": ["python", "-c", PRETENDS, kind]}
    operator.apply(thing)

    def condition():
        shown = operator.get("trainjob", name)["status"]["trainingProgress"]
        found = {one["type"]: one for one in shown["conditions"]}["ProgressReadable"]
        return (shown, found) if found["status"] == "False" and "No such file" not in found["message"] else None

    shown, found = operator.until(condition, 60, "the condition says so")
    assert shown["phase"] == "Running"
    assert found["reason"] == ("Stale" if kind == "stale" else "NotReadable")
    assert shown.get("step") in (None, 5 if kind == "stale" else None)
    assert "<" not in json.dumps(shown)
    operator.kubectl("delete", "trainjob", name, "--wait=false")


def test_a_leader_that_is_killed_is_followed_by_the_other_replica(operator):
    lease = operator.get("lease", "holdfast-operator", "-n", NAMESPACE)["spec"]["holderIdentity"]
    leader = lease.rsplit("-", 1)[0]
    operator.kubectl("delete", "pod", leader, "-n", NAMESPACE, "--grace-period=0", "--force")
    began = time.monotonic()
    operator.until(
        lambda: operator.get("lease", "holdfast-operator", "-n", NAMESPACE)["spec"]["holderIdentity"] != lease,
        60,
        "another replica leads",
    )
    assert time.monotonic() - began < 45
    assert "interval" in operator.refused(changed(interval="soon"))
