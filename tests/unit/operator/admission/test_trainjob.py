"""What the operator makes of a TrainJob."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.operator import schema
from holdfast.operator.admission import jobset, pods, trainjob
from holdfast.operator.admission import review as admission
from holdfast.operator.names import CHECKPOINTING, MANAGER
from holdfast.operator.spec import SpecError
from tests.unit.operator.crds import complaints, crd, patched
from tests.unit.operator.objects import FROM_TRAINJOB, FULL, PUSH, job_set, merged, train_job
from tests.unit.operator.strategies import UNHURRIED, train_jobs


@UNHURRIED
@given(train_jobs())
def test_a_trainjob_uses_only_fields_that_the_real_crd_knows(thing):
    known = crd("trainjobs.trainer.kubeflow.org")
    known = patched(known, schema.patch(known))["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    after = trainjob.secured(thing)
    assert complaints(after["spec"], known["properties"]["spec"]) == []


def node_patch(thing: dict[str, Any]) -> dict[str, Any]:
    patches = [one for one in trainjob.secured(thing)["spec"]["runtimePatches"] if one["manager"] == MANAGER]
    assert len(patches) == 1
    replicated = patches[0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert [one["name"] for one in replicated] == ["node"]
    return replicated[0]["template"]["spec"]["template"]["spec"]


def test_a_runtime_patch_names_no_list_that_would_replace_one_of_the_runtime():
    # Upstream applies it as a strategic merge patch: tolerations are replaced by that, volumes and mounts are merged.
    assert "tolerations" not in node_patch(train_job(FULL))


def test_the_tolerations_of_the_runtime_stay_beside_ours_in_a_jobset_of_a_trainjob():
    thing = job_set(FROM_TRAINJOB)
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists"}
    pod = thing["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["tolerations"] = [gpu]
    after = jobset.secured_jobset(thing)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert after["tolerations"][0] == gpu
    assert {one["key"]: one.get("tolerationSeconds") for one in after["tolerations"][1:]} == {
        "node.kubernetes.io/not-ready": 30,
        "node.kubernetes.io/unreachable": 30,
    }


def test_claims_and_mounts_of_a_trainjob_come_by_our_runtime_patch():
    pod = node_patch(train_job(FULL))
    assert set(pod) == {"volumes", "containers"}
    assert [one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"]] == ["first", "second"]
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert [mounts[one["name"]] for one in pod["volumes"]] == ["/first", "/second"]
    assert "env" not in pod["containers"][0]


def test_a_patch_that_an_older_operator_left_is_replaced_and_those_of_others_stay():
    others = [{"manager": "kueue"}, {"manager": "mine"}]
    thing = train_job(FULL, runtimePatches=[others[0], {"manager": MANAGER}, others[1]])
    patches = trainjob.secured(thing)["spec"]["runtimePatches"]
    assert patches[:2] == others
    assert [one["manager"] for one in patches[2:]] == [MANAGER]


@pytest.mark.parametrize(("of_the_runtime", "grace"), [(None, 90), (30, 90), (300, 300)])
def test_secret_and_grace_period_of_a_trainjob_reach_the_pods_through_its_jobset(of_the_runtime, grace):
    patches = trainjob.secured(train_job(FULL))["spec"]["runtimePatches"]
    annotations = patches[0]["trainingRuntimeSpec"]["template"]["metadata"]["annotations"]
    thing = job_set(annotations)
    before = thing["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    if of_the_runtime is not None:
        before["terminationGracePeriodSeconds"] = of_the_runtime
    after = jobset.secured_jobset(thing)
    pod = after["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert pod["terminationGracePeriodSeconds"] == grace


def test_what_was_asked_for_is_known_when_somebody_has_dropped_the_block():
    after = trainjob.secured(train_job(FULL))
    del after["spec"]["checkpointing"]
    assert trainjob.asked_by(after) == trainjob.asked_by(train_job(FULL))
    again = trainjob.secured(after)
    assert again["spec"]["runtimePatches"] == after["spec"]["runtimePatches"]


def test_a_copy_of_a_trainjob_with_another_location_has_the_variables_of_the_other_location():
    copied = trainjob.secured(train_job({"storage": {"uri": "s3://old/x"}}, trainer={"env": [{"name": "MINE"}]}))
    copied["spec"]["checkpointing"]["storage"]["uri"] = "s3://new/x"
    env = trainjob.secured(copied)["spec"]["trainer"]["env"]
    assert [one["value"] for one in env if one["name"] == "CHECKPOINT_URI"] == ["s3://new/x"]
    assert {"name": "MINE"} in env


def test_a_trainjob_that_is_there_already_cannot_ask_for_it_any_more():
    plain, asks = train_job(None), trainjob.secured(train_job(FULL))
    with pytest.raises(SpecError, match="cannot be added to a TrainJob that is there already"):
        trainjob.check_update(plain, train_job(FULL))
    dropped = copy.deepcopy(asks)
    del dropped["spec"]["checkpointing"]
    for old, new in ((asks, asks), (asks, dropped), (dropped, asks), (plain, plain)):
        trainjob.check_update(old, new)


def test_where_pods_tell_their_progress_they_get_an_address_and_a_token_for_this_use_alone():
    after = trainjob.secured(train_job(FULL), PUSH)
    names = {variable["name"]: variable.get("value") for variable in after["spec"]["trainer"]["env"]}
    assert names["HOLDFAST_PROGRESS_URL"] == PUSH["HOLDFAST_PROGRESS_URL"]
    patch = after["spec"]["runtimePatches"][-1]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    pod = patch["template"]["spec"]["template"]["spec"]
    (token,) = [one for one in pod["volumes"] if "projected" in one]
    (source,) = token["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == "holdfast.dev"
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == token["name"]]
    assert names["HOLDFAST_PROGRESS_TOKEN_FILE"] == f"{mount['mountPath']}/{source['serviceAccountToken']['path']}"


@UNHURRIED
@given(train_jobs(), st.booleans(), st.sampled_from([pods.ASKED, PUSH]), st.sampled_from([pods.ASKED, PUSH]))
def test_who_applies_the_same_trainjob_again_changes_nothing_but_what_he_wrote_otherwise(thing, suspend, then, now):
    safe = trainjob.secured(thing, then)
    # kubectl replaces lists as a whole, and leaves alone what the manifest does not name.
    applied = merged(safe, {**thing, "spec": {**thing["spec"], "suspend": suspend}})
    again = admission._changed(trainjob.secured, applied, safe, lambda: now)
    assert again == merged(safe, {"spec": {"suspend": suspend}})
    # Server-side, all that was added goes, since it belongs to whoever applied first.
    again = admission._changed(trainjob.secured, thing, safe, lambda: now)
    assert again == safe


def test_the_patches_of_others_keep_their_place_and_ours_comes_back_into_its_own():
    safe = trainjob.secured(train_job(FULL))
    ours = safe["spec"]["runtimePatches"][0]
    old = merged(safe, {"spec": {"runtimePatches": [{"manager": "a"}, ours, {"manager": "kueue"}]}})
    new = merged(old, {"spec": {"runtimePatches": [{"manager": "kueue", "time": 2}, {"manager": "b"}]}})
    patches = trainjob.kept(old, new)["spec"]["runtimePatches"]
    assert patches == [ours, {"manager": "kueue", "time": 2}, {"manager": "b"}]


def test_a_trainjob_that_was_made_without_the_webhook_is_left_as_it_is():
    plain = train_job(FULL, trainer={"env": [{"name": "A"}]})
    assert trainjob.kept(plain, train_job(FULL)) == train_job(FULL)


def test_the_annotation_of_a_trainjob_cannot_be_changed_later():
    plain = {key: value for key, value in train_job({}).items() if key != "spec"} | {"spec": {}}
    one, other = (
        trainjob.secured({**plain, "metadata": {**plain["metadata"], "annotations": {CHECKPOINTING: text}}})
        for text in ('{"interval": "5m"}', '{"interval": "soon"}'.replace("soon", "9m"))
    )
    changed = {**one, "metadata": other["metadata"]}
    with pytest.raises(SpecError, match="cannot be changed after the job was created: make a new TrainJob"):
        trainjob.check_update(one, changed)
    trainjob.check_update(one, {**one, "metadata": plain["metadata"]})  # our own patch still has it
    trainjob.check_update({**one, "metadata": plain["metadata"]}, one)
    trainjob.check_update(one, one)
