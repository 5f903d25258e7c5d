"""The variables that a job's containers get, and those with which the training would not start."""

from __future__ import annotations

import json
import re

import pytest

from holdfast.operator.admission import jobset, trainjob
from holdfast.operator.names import CHECKPOINTING
from holdfast.operator.spec import SpecError
from tests.unit.operator.objects import job, job_set, train_job

INTERVAL = "spec.checkpointing.interval"


@pytest.mark.parametrize(
    ("interval", "env", "said"),
    [
        (
            "5m",
            {"CHECKPOINT_STRATEGY": "steps"},
            f"CHECKPOINT_STRATEGY: 'steps' needs {INTERVAL}, a number of steps such as '500', and not '5m', which is "
            f"enough without CHECKPOINT_STRATEGY",
        ),
        (
            "500 steps",
            {"CHECKPOINT_STRATEGY": "time"},
            f"CHECKPOINT_STRATEGY: 'time' needs {INTERVAL}, a duration such as '5m', and not '500 steps'",
        ),
        (None, {"CHECKPOINT_STRATEGY": "steps"}, f"CHECKPOINT_STRATEGY: 'steps' needs {INTERVAL}, a number of steps"),
        (None, {"CHECKPOINT_STRATEGY": "time"}, f"CHECKPOINT_STRATEGY: 'time' needs {INTERVAL}, a duration such"),
        (None, {"HOLDFAST_KILL_WAIT": "soon"}, "HOLDFAST_KILL_WAIT: 'soon' is not accepted; it must be a number of"),
        (None, {"CHECKPOINT_MAX_CHECKPOINTS": "0"}, "CHECKPOINT_MAX_CHECKPOINTS: '0' is not accepted; it must be"),
        (None, {"CHECKPOINT_ENABLED": "maybe"}, "CHECKPOINT_ENABLED: 'maybe' is not accepted; it must be 1/true"),
        (None, {"HOLDFAST_PROGRESS_URL": "https://me:hunter2@host"}, "'https://***@host' is not accepted"),
    ],
)
def test_variables_with_which_the_training_would_not_start_are_refused_in_its_own_words(interval, env, said):
    block = {"env": [{"name": name, "value": value} for name, value in env.items()]}
    block |= {} if interval is None else {"interval": interval}
    with pytest.raises(SpecError) as refused:
        trainjob.secured(train_job(block))
    assert str(refused.value).startswith("spec.checkpointing.env[0] ")
    assert said in str(refused.value)
    for secure, thing in ((jobset.secured_job, job), (jobset.secured_jobset, job_set)):
        with pytest.raises(SpecError, match=re.escape(f"annotation {CHECKPOINTING}.env[0] ")):
            secure(thing({CHECKPOINTING: json.dumps(block)}))


def test_a_variable_that_the_job_has_beside_the_block_is_looked_at_too():
    with pytest.raises(SpecError, match="variable HOLDFAST_KILL_WAIT: 'soon' is not accepted"):
        trainjob.secured(train_job({}, trainer={"env": [{"name": "HOLDFAST_KILL_WAIT", "value": "soon"}]}))


@pytest.mark.parametrize(
    "block",
    [
        {"interval": 500, "env": [{"name": "CHECKPOINT_STRATEGY", "value": "steps"}]},
        {"interval": "300", "env": [{"name": "CHECKPOINT_STRATEGY", "value": "time"}]},
        {"interval": "5m", "env": [{"name": "CHECKPOINT_STRATEGY", "value": "epoch"}]},
        {"interval": "500", "enabled": False, "env": [{"name": "CHECKPOINT_STRATEGY", "value": "steps"}]},
        {"env": [{"name": "HOLDFAST_KILL_WAIT", "value": "$(SECONDS)"}]},
        {"env": [{"name": "HOLDFAST_KILL_WAIT", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
        {
            "env": [
                {"name": "CHECKPOINT_INTERVAL", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
                {"name": "CHECKPOINT_STRATEGY", "value": "steps"},
            ]
        },
        {"env": [{"name": "HOLDFAST_ENABLED", "value": "0"}, {"name": "HOLDFAST_KILL_WAIT", "value": "soon"}]},
        {"resumeFromCheckpoint": False},
    ],
)
def test_variables_that_the_training_takes_or_that_only_the_pod_will_know_are_accepted(block):
    trainjob.secured(train_job(block))
    jobset.secured_job(job({CHECKPOINTING: json.dumps(block)}))


@pytest.mark.parametrize(
    ("kind", "by_name", "by_uid"),
    [
        ("TrainJob", "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/jobset-uid"),
        ("JobSet", "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/jobset-uid"),
        ("Job", "batch.kubernetes.io/job-name", "batch.kubernetes.io/controller-uid"),
    ],
)
@pytest.mark.parametrize("resume", [True, False])
def test_a_job_that_is_not_to_resume_from_others_has_an_id_of_its_own_by_which_its_restarts_resume(
    kind, by_name, by_uid, resume
):
    block = {"resumeFromCheckpoint": resume}
    annotated = {CHECKPOINTING: json.dumps(block)}
    if kind == "TrainJob":
        env = trainjob.secured(train_job(block))["spec"]["trainer"]["env"]
    elif kind == "JobSet":
        (made,) = jobset.secured_jobset(job_set(annotated))["spec"]["replicatedJobs"]
        env = made["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
    else:
        env = jobset.secured_job(job(annotated))["spec"]["template"]["spec"]["containers"][0]["env"]
    found = {one["name"]: one.get("value") or one["valueFrom"]["fieldRef"]["fieldPath"] for one in env}
    assert found["CHECKPOINT_RESUME"] == ("auto" if resume else "own")
    assert found["HOLDFAST_RUN_ID"] == f"metadata.labels['{by_name if resume else by_uid}']"
