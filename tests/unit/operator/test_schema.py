"""The fields that the operator puts into the CRD of TrainJobs and takes out again."""

from __future__ import annotations

import json

import jsonpatch
import pytest

from holdfast.operator import schema
from holdfast.operator.spec import parse
from tests.unit.operator.crds import complaints, crd, patched
from tests.unit.operator.objects import FULL, values


def test_the_real_crd_is_the_same_byte_for_byte_after_the_fields_were_put_in_and_taken_out():
    before = crd("trainjobs.trainer.kubeflow.org")
    between = patched(before, schema.patch(before))
    after = patched(between, schema.unpatch(between))
    assert between != before
    assert json.dumps(after) == json.dumps(before)


def test_fields_that_are_there_are_not_put_in_again_and_those_that_are_not_are_not_taken_out():
    before = crd("trainjobs.trainer.kubeflow.org")
    assert schema.unpatch(before) == []
    between = patched(before, schema.patch(before))
    assert schema.patch(between) == []


def test_the_patch_adds_two_fields_and_the_columns_and_touches_nothing_else():
    before = crd("trainjobs.trainer.kubeflow.org")
    operations = schema.patch(before)
    base = "/spec/versions/0"
    fields = f"{base}/schema/openAPIV3Schema/properties"
    assert [(one["op"], one["path"]) for one in operations] == [
        ("test", "/metadata/resourceVersion"),
        ("add", f"{fields}/spec/properties/checkpointing"),
        ("add", f"{fields}/status/properties/trainingProgress"),
        ("add", f"{base}/additionalPrinterColumns"),
    ]


def test_somebody_quicker_makes_the_patch_fail_as_a_whole():
    before = crd("trainjobs.trainer.kubeflow.org")
    operations = schema.patch(before)
    before["metadata"]["resourceVersion"] = "8"
    with pytest.raises(jsonpatch.JsonPatchTestFailed):
        patched(before, operations)


def test_age_stays_the_last_column_and_upstreams_the_first():
    before = crd("trainjobs.trainer.kubeflow.org")
    columns = patched(before, schema.patch(before))["spec"]["versions"][0]["additionalPrinterColumns"]
    names = [column["name"] for column in columns]
    assert names == ["State", "Phase", "Step", "Progress", "ETA", "Checkpoint Age", "Recoveries", "Age"]


@pytest.mark.parametrize(
    "columns",
    [
        None,
        [],
        [{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}],
        [
            {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
            {"name": "Suspended", "type": "boolean", "jsonPath": ".spec.suspend"},
        ],
        [
            {"name": "Step", "type": "string", "jsonPath": ".status.upstreamStep"},
            {"name": "Phase", "type": "string", "jsonPath": ".status.conditions[-1:].type"},
        ],
    ],
)
def test_columns_that_another_version_of_the_crd_may_have_come_back_as_they_were(columns):
    before = crd("trainjobs.trainer.kubeflow.org")
    version = before["spec"]["versions"][0]
    version["additionalPrinterColumns"] = columns
    if columns is None:
        del version["additionalPrinterColumns"]
    between = patched(before, schema.patch(before))
    names = [column["name"] for column in between["spec"]["versions"][0]["additionalPrinterColumns"]]
    assert len(names) == len(set(names))
    assert schema.patch(between) == []
    after = patched(between, schema.unpatch(between))
    was, now = before["spec"]["versions"][0], after["spec"]["versions"][0]
    assert (now.get("additionalPrinterColumns") or []) == (was.get("additionalPrinterColumns") or [])


def test_fields_of_an_older_operator_are_replaced():
    before = crd("trainjobs.trainer.kubeflow.org")
    between = patched(before, schema.patch(before))
    fields = between["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    del fields["spec"]["properties"]["checkpointing"]["properties"]["interval"]
    columns = between["spec"]["versions"][0]["additionalPrinterColumns"]
    columns.insert(1, {"name": "Old", "type": "string", "jsonPath": ".status.trainingProgress.old"})
    assert patched(between, schema.patch(between)) == patched(before, schema.patch(before))


def test_what_the_schema_calls_whole_is_accepted_here_too():
    assert complaints(FULL, schema.CHECKPOINTING) == []
    parse(FULL)


def test_each_default_of_the_schema_is_what_an_absent_field_means():
    defaults = {
        name: known["default"] for name, known in schema.CHECKPOINTING["properties"].items() if "default" in known
    }
    assert {"enabled", "maxCheckpoints", "resumeFromCheckpoint", "gracePeriodSeconds"} <= set(defaults)
    told, silent = values(parse(defaults)), values(parse({}))
    assert {name: told[name] for name in silent} == silent
