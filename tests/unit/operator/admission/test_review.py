"""What the API server is told by a webhook: a patch, a warning or words of refusal."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
from typing import Any

import jsonpatch
import pytest
from hypothesis import given, settings

from holdfast.operator.admission import review as admission
from holdfast.operator.admission import trainjob
from holdfast.operator.names import CHECKPOINTING, RAY_ENABLED
from tests.unit.operator.objects import FULL, job, job_set, merged, train_job
from tests.unit.operator.strategies import OBJECTS, UNHURRIED


def answered(webhook: str, new: dict[str, Any], old: Any = None, open_for: Any = (), **more: Any) -> dict[str, Any]:
    """What the API server is told."""
    review = {"request": {"uid": "r", "object": new, "oldObject": old, **more}}
    answer = asyncio.run(admission.Reviews(open_for=frozenset(open_for))(review, webhook=webhook, headers={}))
    assert (answer["kind"], answer["response"]["uid"]) == ("AdmissionReview", "r")
    return answer["response"]


def test_the_answer_to_a_review_is_a_patch_a_warning_or_words_of_refusal():
    thing = train_job({"interval": "5m"})
    response = answered("trainjob-create", thing, dryRun=True)
    assert (response["allowed"], response["patchType"]) == (True, "JSONPatch")
    assert jsonpatch.apply_patch(thing, json.loads(base64.b64decode(response["patch"]))) == trainjob.secured(thing)
    assert "storage is not set" in response["warnings"][0]
    assert answered("trainjob-update", thing, thing) == {"uid": "r", "allowed": True}
    refused = answered("trainjob-create", train_job({"interval": "soon"}))
    assert (refused["allowed"], refused["status"]["code"]) == (False, 400)
    assert 'interval: "soon" is not accepted' in refused["status"]["message"]
    assert not answered("elsewhere", thing)["allowed"]


@pytest.mark.parametrize(
    ("thing", "webhook", "count"),
    [
        (lambda asks: train_job(asks, trainer={"numNodes": 2}), "trainjob-create", 2),
        (lambda asks: job({CHECKPOINTING: json.dumps(asks)}, parallelism=3), "job-create", 3),
        (lambda asks: job_set({CHECKPOINTING: json.dumps(asks)}, names=("a", "b")), "jobset-create", 2),
        (lambda asks: train_job(asks, trainer={"numNodes": 1}), "trainjob-create", None),
        (train_job, "trainjob-create", None),
    ],
)
def test_who_has_a_claim_for_one_node_made_for_several_pods_is_warned(thing, webhook, count):
    storage = {"persistentVolume": {"claimName": "c", "mountPath": "/c", "size": "1Gi"}}
    said = (
        f"checkpointing.storage.accessMode is ReadWriteOnce, but the claim c is for {count} pods: those on another "
        f"node than the first cannot start; ReadWriteMany is for several nodes"
    )
    warned = answered(webhook, thing({"storage": storage}))
    assert warned["allowed"]
    assert warned.get("warnings", []) == ([said] if count else [])
    assert "warnings" not in answered(webhook, thing({"storage": {**storage, "accessMode": "ReadWriteMany"}}))
    del storage["persistentVolume"]["size"]  # a claim that is there already has a mode of its own
    assert "warnings" not in answered(webhook, thing({"storage": storage}))


def test_who_annotates_a_rayjob_that_runs_on_a_cluster_which_is_there_is_told_what_to_annotate():
    thing = {
        "kind": "RayJob",
        "metadata": {"name": "x", "annotations": {RAY_ENABLED: "true"}},
        "spec": {"clusterSelector": {"ray.io/cluster": "mine"}},
    }
    (warning,) = answered("rayjob-create", thing)["warnings"]
    assert "spec.clusterSelector" in warning
    assert "annotate the RayCluster" in warning
    del thing["metadata"]["annotations"]
    assert "warnings" not in answered("rayjob-create", thing)


@pytest.mark.parametrize("opens", [False, True])
def test_an_object_that_nobody_can_make_sense_of_is_refused_or_let_through_in_words(opens, caplog):
    response = answered(
        "trainjob-create", train_job(FULL, trainer={"env": "x"}), open_for=["trainjobs"] if opens else []
    )
    assert response["allowed"] == opens
    assert "patch" not in response
    said = response["warnings"][0] if opens else response["status"]["message"]
    assert "cannot make sense of this TrainJob" in said
    assert ("it is not made safe" in said) == opens
    assert "cannot be looked at" in caplog.text


@pytest.mark.parametrize(
    ("block", "warns"),
    [
        ({}, True),
        ({"enabled": False}, False),
        ({"storage": {"uri": "s3://b/x"}}, False),
        ({"persistentVolume": {"claimName": "c"}}, False),
        ({"env": [{"name": "HOLDFAST_DIR", "value": "/mine"}]}, False),
    ],
)
def test_who_does_not_say_where_checkpoints_go_is_warned(block, warns):
    found = admission._lost_with_the_pod(train_job(block))
    assert (found is not None and "storage is not set" in found) == warns
    assert (admission._lost_with_the_pod(job({CHECKPOINTING: json.dumps(block)})) is not None) == warns


@settings(UNHURRIED, max_examples=300)
@given(OBJECTS, OBJECTS)
def test_the_differences_merged_into_one_object_give_the_other(before, after):
    patch: dict[str, Any] = {}
    admission._differences(before, after, patch)
    assert merged(before, patch) == after


def test_no_difference_is_no_patch():
    patch: dict[str, Any] = {}
    thing = train_job(FULL)
    admission._differences(thing, copy.deepcopy(thing), patch)
    assert patch == {}
