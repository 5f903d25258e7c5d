"""What holds for TrainJobs, JobSets and Jobs alike."""

from __future__ import annotations

import copy
from typing import Any

import jsonpatch
import pytest
from hypothesis import given

from holdfast.operator.admission import jobset, trainjob
from holdfast.operator.admission import review as admission
from holdfast.operator.names import CHECKPOINTING, MANAGED
from holdfast.operator.spec import SpecError
from tests.unit.operator.objects import ASKS, is_within, job, job_set, merged, train_job
from tests.unit.operator.strategies import CHANGED, UNHURRIED


@UNHURRIED
@given(CHANGED)
def test_an_object_that_is_safe_is_not_changed_again(case):
    change, thing = case
    once = change(thing)
    assert change(once) == once


def test_a_variable_of_the_user_that_is_just_like_ours_keeps_its_place():
    env = [{"name": "HOLDFAST_ENABLED", "value": "1"}, {"name": "A", "value": ""}]
    once = trainjob.secured(train_job({}, trainer={"env": env}))
    assert once["spec"]["trainer"]["env"][:2] == env
    assert trainjob.secured(once) == once


@UNHURRIED
@given(CHANGED)
def test_what_the_user_wrote_stays_as_it_is(case):
    change, thing = case
    before = copy.deepcopy(thing)
    after = change(thing)
    assert thing == before, "the object itself was changed"
    assert is_within(before, after)


@UNHURRIED
@given(CHANGED)
def test_the_webhooks_patch_makes_of_the_object_what_was_wanted(case):
    change, thing = case
    after = change(thing)
    patch: dict[str, Any] = {}
    admission._differences(thing, after, patch)
    assert merged(thing, patch) == after
    assert jsonpatch.apply_patch(thing, admission._operations(thing, patch)) == after


@pytest.mark.parametrize(
    ("change", "thing"),
    [
        (trainjob.secured, train_job()),
        (trainjob.secured, train_job(None, trainer={"env": []})),
        (jobset.secured_jobset, job_set(None)),
        (jobset.secured_jobset, job_set({"other": "x"})),
        (jobset.secured_job, job(None)),
        (jobset.secured_job, job({MANAGED: "TrainJob"})),
    ],
)
def test_an_object_that_does_not_ask_is_left_alone(change, thing):
    before = copy.deepcopy(thing)
    assert change(thing) == before


@pytest.mark.parametrize(
    ("change", "thing"),
    [
        (trainjob.secured, train_job({}, trainer=None, runtimePatches=None)),
        (trainjob.secured, {"kind": "TrainJob", "metadata": {"annotations": {CHECKPOINTING: "true"}}, "spec": None}),
        (trainjob.secured, {"kind": "TrainJob", "metadata": {"annotations": {CHECKPOINTING: "true"}}}),
        (trainjob.secured, {"kind": "TrainJob", "metadata": {"annotations": None}, "spec": None}),
        (jobset.secured_jobset, {**job_set(ASKS), "spec": {**job_set(ASKS)["spec"], "failurePolicy": None}}),
        (jobset.secured_jobset, job_set(ASKS, podFailurePolicy=None, podReplacementPolicy=None)),
        (jobset.secured_job, job(ASKS, podFailurePolicy=None)),
        (jobset.secured_job, job(ASKS, template={"metadata": None, "spec": {"containers": None, "volumes": None}})),
        (jobset.secured_job, job(ASKS, template={"metadata": {"labels": None}, "spec": {"containers": []}})),
    ],
)
def test_a_field_that_is_null_is_as_good_as_absent(change, thing):
    after = change(thing)
    assert change(after) == after


@pytest.mark.parametrize("asks", ["maybe", "{", "interval: soon", "[]", ""])
def test_a_bad_annotation_is_refused_on_every_kind(asks):
    annotations = {CHECKPOINTING: asks}
    for change, thing in (
        (trainjob.secured, {**train_job(), "metadata": {"annotations": annotations}}),
        (jobset.secured_jobset, job_set(annotations)),
        (jobset.secured_job, job(annotations)),
    ):
        with pytest.raises(SpecError, match=CHECKPOINTING):
            change(thing)
