"""What the API server itself accepts, refuses and keeps, with the operator installed from its chart."""

from __future__ import annotations

import base64
import json
import time
from datetime import UTC, datetime, timedelta

import pytest

from holdfast.operator import certificates
from tests.cluster.jobs import NAMESPACE, claim, crd_spec, spec_of, trainjob
from tests.cluster.test_other_ways import leads_one_of
from tests.cluster.trainings import Submitted

pytestmark = pytest.mark.timeout(1800)


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
        ({"env": [{"name": "HOLDFAST_KILL_WAIT", "value": "soon"}]}, None),
        ({"env": [{"name": "PROGRESS_UPDATE_FREQUENCY", "value": "0"}]}, "PROGRESS_UPDATE_FREQUENCY must be a whole"),
    ],
)
def test_a_block_that_is_not_accepted_is_refused_in_plain_words(operator, block, message):
    # By the webhook, and by the API server itself where no webhook looks.
    said = operator.refused(changed(**block))
    assert "is not accepted; it must be" in said or "is missing; it must be" in said or "does not lie on" in said, said
    if message is not None:  # of what only the training itself knows, a schema says nothing
        assert message in operator.refused(changed(**block), namespace="kube-system")


def test_a_bad_annotation_is_refused_too(operator):
    thing = trainjob("annotated")
    del thing["spec"]["checkpointing"]
    thing["metadata"]["annotations"] = {"holdfast.dev/checkpointing": '{"interval": "soon"}'}
    assert 'interval: \\"soon\\" is not accepted' in json.dumps(operator.refused(thing)).replace("\\\\", "\\")
    thing["metadata"]["annotations"] = {"holdfast.dev/checkpointing": '{"interval": "5m"}'}
    operator.apply(thing | {"spec": {**thing["spec"], "suspend": True}})
    words = ("annotate", "trainjob", "annotated", "--overwrite", 'holdfast.dev/checkpointing={"interval": "soon"}')
    said = operator.kubectl(*words, check=False)
    assert "cannot be changed after the job was created: make a new TrainJob" in said
    operator.kubectl("delete", "trainjob", "annotated", "--wait=false")


def applied_again(kube, kind, thing):
    """Apply a manifest that is there already, run it, and pause it, each by ``kubectl apply``; what came of it."""
    before = kube.get(kind, thing["metadata"]["name"])["spec"]
    for suspend in (True, False, True):
        written = {**thing, "spec": {**thing["spec"], "suspend": suspend}}
        kube.apply(written)
        after = kube.get(kind, thing["metadata"]["name"])["spec"]
        assert without_empty(after) == without_empty({**before, "suspend": suspend})
    return after


def without_empty(value):
    """What is written, without the empty parts that a controller writes too."""
    if isinstance(value, dict):
        return {key: kept for key, inner in value.items() if (kept := without_empty(inner)) not in ({}, [], None)}
    return [without_empty(inner) for inner in value] if isinstance(value, list) else value


def test_defaults_are_filled_in_and_the_block_cannot_be_changed_later(operator):
    thing = trainjob("fixed", storage={"persistentVolume": {"claimName": "nobody-has-it", "mountPath": "/c"}})
    thing["spec"] |= {"suspend": True}
    thing["spec"]["trainer"]["env"] = [{"name": "MINE", "value": "1"}]
    operator.apply(thing)
    block = operator.get("trainjob", "fixed")["spec"]["checkpointing"]
    env = applied_again(operator, "trainjob", thing)["trainer"]["env"]
    assert {"MINE", "HOLDFAST_ENABLED", "HOLDFAST_RUN_ID"} <= {variable["name"] for variable in env}
    assert (block["enabled"], block["maxCheckpoints"], block["resumeFromCheckpoint"]) == (True, 3, True)
    words = ("patch", "trainjob", "fixed", "--type=merge", "-p", '{"spec":{"checkpointing":{"maxCheckpoints":9}}}')
    assert "cannot be changed after the job was created" in operator.kubectl(*words, check=False)
    operator.kubectl("delete", "trainjob", "fixed")
    plain = trainjob("without")
    del plain["spec"]["checkpointing"]
    operator.apply({**plain, "spec": {**plain["spec"], "suspend": True}})
    words = ("patch", "trainjob", "without", "--type=merge", "-p", '{"spec":{"checkpointing":{"interval":"5m"}}}')
    assert "cannot be added to a TrainJob that is there already" in operator.kubectl(*words, check=False)
    operator.kubectl("annotate", "trainjob", "without", "mine=yes")
    operator.kubectl("delete", "trainjob", "without")


@pytest.fixture
def waiting(operator):
    """A TrainJob that does not start, with a claim that the operator makes."""
    volume = {"claimName": "made", "mountPath": "/checkpoints", "size": "1Gi"}
    thing = trainjob("waiting", storage={"persistentVolume": volume})
    operator.apply({**thing, "spec": {**thing["spec"], "suspend": True}})
    job = Submitted(operator, "waiting")
    operator.until(lambda: job.progress().get("phase") == "Suspended", message="the status says so")
    yield job
    job.remove()


def test_an_upgrade_that_replaces_the_crd_gets_the_fields_back_and_the_status_of_jobs_with_them(operator, waiting):
    base = "/spec/versions/0/schema/openAPIV3Schema/properties"
    paths = [f"{base}/spec/properties/checkpointing", f"{base}/status/properties/trainingProgress"]
    patch = json.dumps([{"op": "remove", "path": path} for path in paths])
    before = waiting.progress()
    words = ("patch", "crd", "trainjobs.trainer.kubeflow.org", "--type=json", "-p", patch, "-o", "json")
    assert "checkpointing" not in spec_of(json.loads(operator.kubectl(*words)))  # the operator may be quick
    operator.kubectl("annotate", "trainjob", "waiting", "written=anew")  # without what the API server does not know
    operator.until(lambda: "checkpointing" in crd_spec(operator), message="the field is back")
    operator.until(lambda: waiting.progress() == before, message="and the status is")
    assert waiting.events().count("Created") == 1


def test_a_claim_is_made_when_asked_for_and_outlives_the_job(operator, waiting):
    operator.until(lambda: operator.get("pvc", "made")["spec"]["resources"]["requests"]["storage"] == "1Gi")
    operator.until(lambda: {"Created", "ClaimCreated", "Suspended"} <= set(waiting.events()), message="Events")
    operator.kubectl("delete", "trainjob", "waiting", "--wait=true")
    assert "deletionTimestamp" not in operator.get("pvc", "made")["metadata"]
    operator.apply(trainjob("waiting") | {"spec": {**trainjob("waiting")["spec"], "suspend": True}})


def test_status_and_spec_are_apart(operator, waiting):
    before = waiting.progress()
    job = ("patch", "trainjob", "waiting", "--type=merge", "-p")
    operator.kubectl(*job, '{"status":{"trainingProgress":{"step":99}}}')
    assert waiting.progress() == before
    both = '{"spec":{"suspend":false},"status":{"trainingProgress":{"step":99}}}'
    operator.kubectl(*job, both, "--subresource=status")
    thing = operator.get("trainjob", "waiting")
    assert thing["spec"]["suspend"] is True
    assert thing["status"]["trainingProgress"]["step"] == 99
    wrong = '{"status":{"trainingProgress":{"step":"many"}}}'
    assert "step" in operator.kubectl(*job, wrong, "--subresource=status", check=False)
    assert operator.get("trainjob", "waiting")["status"]["trainingProgress"]["step"] == 99


def test_who_does_not_say_where_checkpoints_go_is_warned(operator):
    thing = trainjob("nowhere")
    del thing["spec"]["checkpointing"]["storage"]
    words = ("create", "--dry-run=server", "-f", "-")
    said = operator.kubectl(*words, stdin=json.dumps(thing), check=False)
    assert "Warning: checkpointing.storage is not set: checkpoints go where the training script puts them" in said
    assert "created (server dry run)" in said


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
    assert not may("patch", "trainjobs.trainer.kubeflow.org")
    assert not may("get", "pods")
    assert not may("patch", "leases.coordination.k8s.io", "-n", NAMESPACE)


def test_what_the_webhooks_add_to_a_plain_job_and_to_a_jobset(operator):
    pod = {
        "containers": [
            {"name": "main", "image": "localhost/host", "command": ["sleep", "1"], "env": [{"name": "A", "value": "1"}]}
        ],
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": 10,
        "tolerations": [{"key": "mine", "operator": "Exists"}],
    }
    block = {"storage": {"persistentVolume": {"claimName": "nobody-has-it", "mountPath": "/c"}}}
    annotations = {"holdfast.dev/checkpointing": json.dumps(block)}
    job = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"suspend": True, "template": {"spec": pod}}}
    plain = {**job, "metadata": {"name": "plain", "annotations": annotations}}
    operator.apply(plain)
    applied_again(operator, "job", plain)
    spec = operator.get("job", "plain")["spec"]
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["Ignore", "Ignore"]
    names = [variable["name"] for variable in spec["template"]["spec"]["containers"][0]["env"]]
    assert {"HOLDFAST_ENABLED", "CHECKPOINT_URI", "TRAINING_PROGRESS_FILE", "HOLDFAST_RUN_ID"} <= set(names)
    # JobSet fills in the mode when it creates one, and does not when the same one is applied again.
    template = {"spec": {"completionMode": "Indexed", "template": {"spec": pod}}}
    replicated = [{"name": "w", "replicas": 1, "template": template}]
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "spec": {"suspend": True, "replicatedJobs": replicated},
    }
    group = {**jobset, "metadata": {"name": "set", "annotations": annotations}}
    operator.apply(group)
    applied_again(operator, "jobset", group)
    policy = operator.get("jobset", "set")["spec"]["failurePolicy"]
    assert policy["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    operator.apply({**jobset, "metadata": {"name": "later"}})
    text = f"holdfast.dev/checkpointing={json.dumps(block)}"
    said = operator.kubectl("annotate", "jobset", "later", text, check=False)
    assert "cannot be added to a JobSet that is there already" in said
    otherwise = "holdfast.dev/checkpointing=false"
    for kind, name in (("Job", "plain"), ("JobSet", "set")):
        said = operator.kubectl("annotate", kind, name, otherwise, "--overwrite", check=False)
        assert f"cannot be changed after the job was created: make a new {kind}" in said
        operator.kubectl("annotate", kind, name, "mine=yes")
    operator.kubectl("delete", "job/plain", "jobset/set", "jobset/later", "--wait=false")


PRETENDS = """
import json, os, sys, time
data = {
    "torn": b'{"step": 5, "loss',
    "huge": b'{"step": 5, "loss": "' + b"x" * 100_000_000 + b'"}',
    "not json": b"<html><script>alert(1)</script></html>",
    "markup": b'{"step": 5, "estimatedTimeRemaining": "<script>alert(1)</script>"}',
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

    shown, found = operator.until(condition, message="the condition says so")
    assert shown["phase"] == "Running"
    assert found["reason"] == ("Stale" if kind == "stale" else "NotReadable")
    assert "step" not in shown
    assert "<" not in json.dumps(shown)
    operator.kubectl("delete", "trainjob", name, "--wait=false")


def test_a_certificate_that_ends_soon_is_renewed_and_the_webhooks_answer_all_the_while(operator):
    host = f"holdfast-operator.{NAMESPACE}.svc"
    secret = ("secret", "holdfast-operator-tls", "-n", NAMESPACE)
    served = {name: base64.b64decode(text) for name, text in operator.get(*secret)["data"].items()}
    now = certificates.Bundle(served["tls.crt"], served["tls.key"], served["ca.crt"])
    # Without the key of its authority: the next certificate needs a new one, which is harder.
    ends_soon = certificates.make(host, datetime.now(UTC), now, valid=timedelta(days=10))
    data = {"tls.crt": ends_soon.certificate, "tls.key": ends_soon.key, "ca.crt": ends_soon.authority, "ca.key": b""}
    texts = {name: base64.b64encode(value).decode() for name, value in data.items()}
    operator.kubectl("patch", *secret, "-p", json.dumps({"data": texts}))

    def told(certificate: bytes) -> bool:
        configuration = operator.get("mutatingwebhookconfiguration", "holdfast-operator")
        bundles = [base64.b64decode(webhook["clientConfig"]["caBundle"]) for webhook in configuration["webhooks"]]
        return all(certificate in bundle for bundle in bundles)

    operator.until(lambda: told(ends_soon.authority), message="the API server trusts the one that ends soon")
    operator.kubectl("rollout", "restart", "-n", NAMESPACE, "deployment/holdfast-operator")
    pods = ("get", "pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=operator", "-o", "name")

    def renewed() -> bool:
        # Not a moment in which the API server reaches somebody whom it does not trust.
        assert_refused_by_webhook()
        now = base64.b64decode(operator.get(*secret)["data"]["tls.crt"])
        served = [serves(name) for name in operator.kubectl(*pods).split()]
        return now != ends_soon.certificate and len(served) == 2 and all(one == now for one in served)

    failures: list[str] = []

    def assert_refused_by_webhook() -> None:
        said = operator.refused(changed(interval="soon"))
        if "is not accepted; it must be" not in said:
            failures.append(said)

    def serves(pod: str) -> bytes:
        code = "import ssl; print(ssl.get_server_certificate(('127.0.0.1', 9443)))"
        return operator.kubectl("exec", "-n", NAMESPACE, pod, "--", "python3", "-c", code).strip().encode() + b"\n"

    operator.until(renewed, message="both replicas serve a new certificate")
    assert failures == []


def test_a_leader_that_is_killed_is_followed_by_the_other_replica(operator):
    def holder() -> str:
        return operator.get("lease", "holdfast-operator", "-n", NAMESPACE)["spec"]["holderIdentity"]

    # After a rollout it may still be that of a pod that is gone.
    operator.until(lambda: leads_one_of(operator), message="a pod leads that stays")
    lease = holder()
    leader = lease.rsplit("-", 1)[0]
    operator.kubectl("delete", "pod", leader, "-n", NAMESPACE, "--grace-period=0", "--force")
    began = time.monotonic()
    operator.until(lambda: holder() != lease, message="another replica leads")
    assert time.monotonic() - began < 45
    assert "interval" in operator.refused(changed(interval="soon"))
