"""What the operator makes of a JobSet or a Job."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.operator.admission import jobset, pods
from holdfast.operator.admission import review as admission
from holdfast.operator.names import CHECKPOINTING, MANAGED
from holdfast.operator.spec import SpecError
from tests.unit.operator.crds import complaints, schema_of
from tests.unit.operator.objects import ASKS, FROM_TRAINJOB, FULL, PUSH, job, job_set, merged, updated
from tests.unit.operator.strategies import UNHURRIED, job_sets, jobs


@UNHURRIED
@given(job_sets())
def test_a_jobset_uses_only_fields_that_the_real_crd_knows(thing):
    after = jobset.secured_jobset(thing)
    assert complaints(after["spec"], schema_of("jobsets.jobset.x-k8s.io")["properties"]["spec"]) == []


def test_a_jobset_that_runs_already_cannot_ask_for_it_any_more():
    plain = {"kind": "JobSet", "metadata": {"name": "set"}}
    asks = {"kind": "JobSet", "metadata": {"name": "set", "annotations": {CHECKPOINTING: "true"}}}
    with pytest.raises(SpecError, match="cannot be added to a JobSet that is there already"):
        jobset.check_update(plain, asks)
    otherwise = {"kind": "JobSet", "metadata": {"name": "set", "annotations": {CHECKPOINTING: "false"}}}
    with pytest.raises(SpecError, match="cannot be changed after the job was created: make a new JobSet"):
        jobset.check_update(asks, otherwise)
    jobset.check_update(asks, asks)
    jobset.check_update(plain, plain)
    managed = {"metadata": {"annotations": {CHECKPOINTING: "true", MANAGED: "TrainJob"}}}
    jobset.check_update(plain, managed)


def test_a_jobset_that_was_made_without_the_webhook_can_be_suspended():
    made = job_set(FROM_TRAINJOB)
    suspended = {**made, "spec": {**made["spec"], "suspend": True}}
    assert updated(jobset.secured_jobset, suspended, made) == suspended
    safe = jobset.secured_jobset(made)
    again = updated(jobset.secured_jobset, suspended, safe)  # as Kubeflow Trainer writes it, without what was added
    assert again["spec"]["replicatedJobs"] == safe["spec"]["replicatedJobs"]


@pytest.mark.parametrize("then", [pods.ASKED, PUSH], ids=["by exec", "by push"])
@pytest.mark.parametrize("now", [pods.ASKED, PUSH], ids=["by exec", "by push"])
def test_a_jobset_stays_as_it_is_whatever_the_operator_is_told_since(then, now):
    made = job_set(FROM_TRAINJOB)
    made["metadata"]["annotations"][CHECKPOINTING] = json.dumps(FULL)
    launcher = copy.deepcopy(made["spec"]["replicatedJobs"][0]) | {"name": "launcher"}
    launcher["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    made["spec"]["replicatedJobs"].append(launcher)
    safe = jobset.secured_jobset(made, then)
    written = {**made, "spec": {**made["spec"], "suspend": True}}  # as Kubeflow Trainer does, without what was added
    again = admission._changed(jobset.secured_jobset, written, safe, lambda: now)
    assert again["spec"]["replicatedJobs"] == safe["spec"]["replicatedJobs"]


@UNHURRIED
@given(
    job_sets()
    .filter(lambda thing: MANAGED not in thing["metadata"]["annotations"])
    .map(lambda thing: (jobset.secured_jobset, thing))
    | jobs().map(lambda thing: (jobset.secured_job, thing)),
    st.booleans(),
    st.sampled_from([pods.ASKED, PUSH]),
    st.sampled_from([pods.ASKED, PUSH]),
)
def test_who_applies_the_same_job_or_jobset_again_changes_nothing_but_what_he_wrote_otherwise(case, suspend, then, now):
    change, thing = case
    safe = change(thing, then)
    for applied in (merged(safe, thing), thing):
        applied = merged(applied, {"spec": {"suspend": suspend}})
        again = admission._changed(change, applied, safe, lambda: now)
        assert again == merged(safe, {"spec": {"suspend": suspend}})


def test_a_job_that_is_there_cannot_ask_for_something_else():
    asks = job(ASKS) | {"kind": "Job"}
    with pytest.raises(SpecError, match="cannot be added to a Job that is there already"):
        updated(jobset.secured_job, asks, job({}))
    assert updated(jobset.secured_job, asks, asks) == asks
    with pytest.raises(SpecError, match="cannot be changed after the job was created: make a new Job"):
        updated(jobset.secured_job, asks, job({CHECKPOINTING: "false"}))


def test_a_launcher_that_trains_has_the_claim_too():
    made = job_set(FROM_TRAINJOB)
    made["metadata"]["annotations"][CHECKPOINTING] = json.dumps(FULL)
    (node,) = made["spec"]["replicatedJobs"]
    launcher = copy.deepcopy(node) | {"name": "launcher"}
    launcher["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    made["spec"]["replicatedJobs"] = [launcher, node]
    for replicated in jobset.secured_jobset(made)["spec"]["replicatedJobs"]:
        pod = replicated["template"]["spec"]["template"]["spec"]
        assert [one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"]] == ["first", "second"]
        (container,) = [one for one in pod["containers"] if one["name"] == "node"]
        assert [one["mountPath"] for one in container["volumeMounts"]] == ["/first", "/second"]


def test_only_what_trains_in_a_jobset_of_a_trainjob_is_changed():
    thing = job_set(FROM_TRAINJOB, names=("dataset-initializer", "node"))
    after = jobset.secured_jobset(thing)
    assert after["spec"]["replicatedJobs"][0] == thing["spec"]["replicatedJobs"][0]
    assert after["spec"]["failurePolicy"]["rules"][0]["targetReplicatedJobs"] == ["node"]


def test_a_preemption_is_told_from_a_crash_before_the_users_own_rules_are_asked():
    mine = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0]}}
    for thing, change in (
        (job_set(ASKS, podFailurePolicy={"rules": [mine]}), jobset.secured_jobset),
        (job(ASKS, podFailurePolicy={"rules": [mine]}), jobset.secured_job),
    ):
        spec = change(thing)["spec"]
        spec = spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec
        rules = spec["podFailurePolicy"]["rules"]
        assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        assert rules[1]["onExitCodes"] == {"operator": "In", "values": [143]}
        assert rules[2:] == [mine]


def test_the_pod_replacement_policy_that_the_api_server_has_set_gives_way_to_the_one_it_accepts():
    # Refused otherwise: "podReplacementPolicy: Unsupported value" beside any pod failure policy but with Failed.
    assert jobset.secured_job(job(ASKS, podReplacementPolicy="TerminatingOrFailed"))["spec"][
        "podReplacementPolicy"
    ] == ("Failed")
    after = jobset.secured_jobset(job_set(ASKS, podReplacementPolicy="TerminatingOrFailed"))
    assert after["spec"]["replicatedJobs"][0]["template"]["spec"]["podReplacementPolicy"] == "Failed"


def test_a_job_that_a_jobset_made_is_left_to_the_jobset():
    thing = job(ASKS)
    thing["metadata"]["ownerReferences"] = [{"kind": "JobSet", "name": "gpt"}]
    assert jobset.secured_job(thing) == thing
