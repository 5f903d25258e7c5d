"""What the operator makes of other people's objects, and what it concludes from them: no cluster takes part."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import functools
import json
import lzma
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import jsonpatch
import pytest
import yaml
from cryptography import x509
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.leaderelection.electionconfig import Config
from kubernetes_asyncio.leaderelection.leaderelection import LeaderElection

from holdfast.config import parse_every
from holdfast.operator import app, certificates, schema
from holdfast.operator.admission import jobset, pods, ray, trainjob
from holdfast.operator.admission import review as admission
from holdfast.operator.cluster import FileNotReadError, PodReadError, PodSilentError
from holdfast.operator.names import CHECKPOINTING, INJECTED, MANAGED, MANAGER, PROGRESS, RAY_ENABLED, RAY_KILL_WAIT
from holdfast.operator.reconcile import controller, status
from holdfast.operator.reconcile.controller import Controller
from holdfast.operator.spec import Checkpointing, SpecError, from_annotations, parse
from holdfast.progress import parse_progress
from tests.kit import ROOT

ADDONS = ROOT.parent / "shared/kube/addons"
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100)
NOW = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)


@functools.cache
def crds() -> dict[str, dict[str, Any]]:
    """The real ones, by name."""
    if not ADDONS.is_dir():
        pytest.skip(f"needs the CRDs of the real controllers in {ADDONS}")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = {}
    for name in ("trainer", "jobset", "kuberay"):
        with lzma.open(ADDONS / f"{name}.yaml.xz") as file:
            for one in yaml.load_all(file, loader):
                if one and one["kind"] == "CustomResourceDefinition":
                    found[one["metadata"]["name"]] = {
                        **one,
                        "metadata": {**one["metadata"], "resourceVersion": "7"},
                    }
    return found


def crd(name: str) -> dict[str, Any]:
    return copy.deepcopy(crds()[name])


def schema_of(name: str) -> dict[str, Any]:
    return crds()[name]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def complaints(thing: Any, known: dict[str, Any], where: str = "") -> list[str]:
    """What the API server would prune from or refuse in a custom resource."""
    if known.get("x-kubernetes-preserve-unknown-fields") or known.get("x-kubernetes-int-or-string"):
        return []
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": int | float}
    if not isinstance(thing, types[known["type"]]) or (known["type"] == "integer" and isinstance(thing, bool)):
        return [f"{where}: {thing!r} is no {known['type']}"]
    found = []
    if "enum" in known and thing not in known["enum"]:
        found.append(f"{where}: {thing!r} is not one of {known['enum']}")
    if isinstance(thing, str):
        if not known.get("minLength", 0) <= len(thing) <= known.get("maxLength", len(thing)):
            found.append(f"{where}: {thing!r} has {len(thing)} characters")
        if "pattern" in known and not re.search(known["pattern"], thing):
            found.append(f"{where}: {thing!r} does not match {known['pattern']}")
    if isinstance(thing, int) and not known.get("minimum", thing) <= thing <= known.get("maximum", thing):
        found.append(f"{where}: {thing} is out of range")
    if isinstance(thing, dict):
        found += [f"{where}.{name} is missing" for name in known.get("required", []) if name not in thing]
        for name, value in thing.items():
            inner = known.get("properties", {}).get(name) or known.get("additionalProperties")
            if inner is None and not (known.get("properties") is None and "additionalProperties" not in known):
                found.append(f"{where}.{name} is not known")
            elif inner is not None:
                found += complaints(value, inner, f"{where}.{name}")
    if isinstance(thing, list):
        for index, value in enumerate(thing):
            found += complaints(value, known["items"], f"{where}[{index}]")
        keys = known.get("x-kubernetes-list-map-keys")
        if keys:
            names = [tuple(str(value.get(key)) for key in keys) for value in thing]
            found += [f"{where}: {name} is there twice" for name in {*names} if names.count(name) > 1]
    return found


def merged(before: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(before) if isinstance(before, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def is_within(theirs: Any, ours: Any) -> bool:
    """Whether all that is in ``theirs`` is in ``ours`` too; lists in the same order, perhaps with more between."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return all(key in ours and is_within(value, ours[key]) for key, value in theirs.items())
    if isinstance(theirs, list) and isinstance(ours, list):
        rest = iter(ours)
        return all(any(is_within(one, other) for other in rest) for one in theirs)
    return bool(theirs == ours)


# ---------------------------------------------------------------------- the block

FULL: dict[str, Any] = {
    "enabled": True,
    "interval": "5m",
    "maxCheckpoints": 3,
    "resumeFromCheckpoint": True,
    "gracePeriodSeconds": 90,
    "storage": {
        "uri": "s3://bucket/prefix",
        "accessMode": "ReadWriteMany",
        "persistentVolume": {"claimName": "first", "mountPath": "/first", "size": "10Gi", "storageClassName": "fast"},
        "secretRef": {"name": "keys"},
        "fallback": {"persistentVolume": {"claimName": "second", "mountPath": "/second"}},
    },
    "env": [
        {"name": "CHECKPOINT_STRATEGY", "value": "epoch"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
    ],
}
PLACE = {"claimName": "first", "mountPath": "/first"}


def block(path: str, value: Any) -> dict[str, Any]:
    """A whole block with one field set: ``storage.uri``."""
    whole = copy.deepcopy(FULL)
    *folders, name = path.split(".")
    inner = whole
    for folder in folders:
        inner = inner[folder]
    inner[name] = value
    return whole


def values(asked: Checkpointing | None) -> dict[str, str]:
    assert asked is not None
    return {one["name"]: one.get("value", "") for one in asked.variables()}


NOT_OBJECTS = [False, True, 0, 1, 1.5, "", "x", [], ["x"]]
NOT_NAMES = ["", "A", "a_b", "a b", "-a", "a-", ".a", "a.", "a..b", "a.-b", "a/b", "a\n", "ä", "a" * 254, 5, True, []]
NOT_PATHS = [
    "",
    "x",
    "./x",
    "/",
    "//",
    "///",
    "/a:b",
    "/a/../b",
    "/..",
    "/a\nb",
    "/a\x00",
    "/" + "a" * 1024,
    5,
    True,
    [],
]
NOT_COUNTS = ["3", 1.5, True, False, [], {}, "", -1, 2**31, 10**30, float("nan"), float("inf")]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("enabled", value) for value in ("true", "yes", 1, 0, "", [], {})),
        *(("resumeFromCheckpoint", value) for value in ("auto", 1, "", [])),
        *(
            ("interval", value)
            for value in (
                "",
                " ",
                "soon",
                "5x",
                "-5m",
                "0",
                "0s",
                "0 steps",
                "5 minutes",
                "nan",
                "inf",
                "1e400",
                "1h30",
            )
        ),
        *(("interval", value) for value in (0, -1, 1.5, True, [], {}, "1" * 33, 10**40, "5m\x00")),
        *(("maxCheckpoints", value) for value in (*NOT_COUNTS, 0)),
        *(("gracePeriodSeconds", value) for value in (*NOT_COUNTS, 0, 4)),
        *(("storage", value) for value in NOT_OBJECTS),
        *(("storage.persistentVolume", value) for value in NOT_OBJECTS),
        *(("storage.secretRef", value) for value in NOT_OBJECTS),
        *(("storage.fallback", value) for value in NOT_OBJECTS),
        *(("storage.fallback.persistentVolume", value) for value in NOT_OBJECTS),
        *(("storage.persistentVolume.claimName", value) for value in NOT_NAMES),
        *(("storage.persistentVolume.storageClassName", value) for value in NOT_NAMES),
        *(("storage.fallback.persistentVolume.claimName", value) for value in NOT_NAMES),
        *(("storage.secretRef.name", value) for value in NOT_NAMES),
        *(("storage.persistentVolume.mountPath", value) for value in NOT_PATHS),
        *(("storage.fallback.persistentVolume.mountPath", value) for value in (*NOT_PATHS, "/first", "/first/")),
        *(
            ("storage.persistentVolume.size", value)
            for value in ("", "big", "10 Gi", "-1Gi", "0", "0Gi", "0.0", "10GB", "1e3", 10, 1.5, True, "9" * 400)
        ),
        *(("storage.accessMode", value) for value in ("", "ReadOnlyMany", "rwo", "readwriteonce", 1, True, [])),
        *(("storage.uri", value) for value in ("", "bucket/prefix", "./x", "s3:/bucket", "s3://", "s3:///x", "s3")),
        *(("storage.uri", value) for value in ("ftp://host/x", "file:///x", "http://x", "hdfs://x", "S3://bucket")),
        *(("storage.uri", value) for value in ("s3://bucket/a b", "s3://bucket/\n", "/x/../y", "s3://" + "a" * 1024)),
        *(("storage.uri", value) for value in (5, True, [], {}, "/elsewhere", "/firstandmore")),
        *(("env", value) for value in (False, True, 0, 1, "", "A=b", {}, {"A": "b"})),
    ],
)
def test_a_bad_value_is_refused_with_the_field_the_value_and_what_is_accepted(path, value):
    with pytest.raises(SpecError) as refused:
        parse(block(path, value))
    message = str(refused.value)
    assert f"spec.checkpointing.{path}: " in message
    assert "must be" in message or "accepted is" in message
    shown = value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, dict | list) or (isinstance(value, int) and abs(value) >= 2**64):
        shown = type(value).__name__
    said = message.partition(f"{path}: ")[2]
    assert said.strip("\"'").startswith((shown[:100].rstrip("/"), json.dumps(shown)[1:-1][:100])) or shown == ""
    assert len(message) < 500


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ("A=b", "env[1]"),
        (None, "env[1]"),
        ({}, "env[1].name"),
        ({"value": "x"}, "env[1].name"),
        ({"name": ""}, "env[1].name"),
        ({"name": 5}, "env[1].name"),
        ({"name": "1A"}, "env[1].name"),
        ({"name": "A B"}, "env[1].name"),
        ({"name": "A="}, "env[1].name"),
        ({"name": "A\n"}, "env[1].name"),
        ({"name": "A", "value": 5}, "env[1].value"),
        ({"name": "A", "value": True}, "env[1].value"),
        ({"name": "A", "value": {}}, "env[1].value"),
        ({"name": "A", "valueFrom": "secret"}, "env[1].valueFrom"),
        ({"name": "A", "valueFrom": []}, "env[1].valueFrom"),
        ({"name": "A", "value": "x", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}, "env[1].valueFrom"),
        ({"name": "A", "valve": "x"}, "env[1].valve"),
        ({"name": "CHECKPOINT_STRATEGY", "value": "often"}, "env[1] CHECKPOINT_STRATEGY"),
        ({"name": "CHECKPOINT_STRATEGY", "value": ""}, "env[1] CHECKPOINT_STRATEGY"),
        ({"name": "CHECKPOINT_SAVE_TYPE", "value": "half"}, "env[1] CHECKPOINT_SAVE_TYPE"),
        ({"name": "PROGRESS_UPDATE_FREQUENCY", "value": "0"}, "env[1] PROGRESS_UPDATE_FREQUENCY"),
        ({"name": "PROGRESS_UPDATE_FREQUENCY", "value": "5\n"}, "env[1] PROGRESS_UPDATE_FREQUENCY"),
        ({"name": "TRAINING_PROGRESS_FILE", "value": "progress.json"}, "env[1] TRAINING_PROGRESS_FILE"),
    ],
)
def test_a_bad_variable_is_refused_with_its_place_in_the_list(item, field):
    with pytest.raises(SpecError, match=re.escape(f"spec.checkpointing.{field}: ")):
        parse({"env": [{"name": "GOOD", "value": "x"}, item]})


@pytest.mark.parametrize(
    "path",
    ["Interval", "storage.url", "storage.persistentVolume.claim", "storage.secretRef.key", "storage.fallback.uri"],
)
def test_a_field_that_is_not_known_is_refused_with_those_that_are(path):
    with pytest.raises(
        SpecError, match=rf"spec\.checkpointing\.{re.escape(path)}: is not known; accepted are [a-zA-Z]"
    ):
        parse(block(path, "x"))


@pytest.mark.parametrize("missing", ["claimName", "mountPath"])
def test_a_claim_needs_a_name_and_a_mount_path(missing):
    volume = {key: value for key, value in PLACE.items() if key != missing}
    with pytest.raises(SpecError, match=rf"storage\.persistentVolume\.{missing}: is missing; it must be"):
        parse({"storage": {"persistentVolume": volume}})


@pytest.mark.parametrize("uri", ["s3://AKIA:hunter2@bucket/x", "s3://AKIA:hun/ter2@bucket", "ftp://me:hunter2@host"])
def test_credentials_in_a_uri_are_refused_and_not_repeated(uri):
    with pytest.raises(SpecError, match=r"storage\.uri") as refused:
        parse({"storage": {"uri": uri}})
    assert "ter2" not in str(refused.value)
    assert "AKIA" not in str(refused.value)


def test_credentials_in_a_block_that_is_no_yaml_are_not_repeated():
    with pytest.raises(SpecError) as refused:
        from_annotations({CHECKPOINTING: "storage: {uri: s3://AKIA:hunter2@bucket"})
    assert "hunter2" not in str(refused.value)
    with pytest.raises(SpecError) as refused:
        from_annotations({CHECKPOINTING: "env: [{name: AWS_SECRET_ACCESS_KEY, value: hunter2"})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "interval", ["30s", "5m", "1h30m", "2d", "0.5h", "500", "500 steps", "1 step", "1 epoch", "2epochs", 250]
)
def test_an_interval_that_is_accepted_is_understood_by_the_training(interval):
    given_to = values(parse({"interval": interval}))["CHECKPOINT_INTERVAL"]
    assert parse_every(given_to) == parse_every(interval)


def _crd_interval() -> str:
    rule = schema.CHECKPOINTING["properties"]["interval"]["x-kubernetes-validations"][0]["rule"]
    return re.fullmatch(r"self\.matches\('(.*)'\)", rule)[1].replace("\\\\", "\\")  # type: ignore[index]


@UNHURRIED
@given(st.from_regex(re.compile(_crd_interval(), re.ASCII), fullmatch=True))
@example("1h30m")
@example("1.5d2s")
def test_an_interval_that_the_api_server_accepts_is_accepted_here_unless_it_is_nothing(text):
    text = text.rstrip("\n")
    if not 1 <= len(text) <= 32 or not re.search("[1-9]", text):
        return
    try:
        parse_every(text)
    except ValueError:  # more than a thousand million seconds
        with pytest.raises(SpecError, match="interval"):
            parse({"interval": text})
    else:
        assert parse({"interval": text}).interval == text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PATHS = [
    *FULL,
    *(f"storage.{name}" for name in FULL["storage"]),
    *(f"storage.persistentVolume.{name}" for name in FULL["storage"]["persistentVolume"]),
    "storage.secretRef.name",
    "storage.fallback.persistentVolume",
]


@UNHURRIED
@given(st.sampled_from(PATHS), JSON_VALUES)
def test_whatever_stands_in_a_field_it_is_accepted_or_refused_with_the_fields_name(path, value):
    try:
        asked = parse(block(path, value))
    except SpecError as error:
        refusal = str(error)
    else:
        refusal = "spec.checkpointing."
        json.dumps(asked.variables())
    assert "spec.checkpointing." in refusal


@UNHURRIED
@given(st.text(max_size=60) | JSON_VALUES.map(json.dumps) | JSON_VALUES.map(yaml.safe_dump))
@example("{")
@example("[")
@example("&a [*a]")
@example("!!int ''")
@example("!!bool maybe")
@example("!!timestamp x")
@example("!!python/object/apply:os.system [id]")
@example("? [a]\n: b")
@example("interval: 2026-01-01")
@example("maxCheckpoints: 0x" + "f" * 5000)
@example("gracePeriodSeconds: " + "9" * 5000)
@example('{"maxCheckpoints": ' + "9" * 5000 + "}")
@example('{"a":' * 100_000)
@example("[" * 100_000)
@example("- " * 5_000)
@example("\x00")
@example("\ud800")
def test_whatever_stands_in_the_annotation_it_is_accepted_or_refused_in_words(text):
    refusal = CHECKPOINTING
    try:
        from_annotations({CHECKPOINTING: text})
    except SpecError as error:
        refusal = str(error)
    assert CHECKPOINTING in refusal


def test_a_few_lines_of_aliases_do_not_become_a_thousand_million_values():
    lines = ["a0: &a0 {x: y}", *(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}" for n in range(1, 40))]
    text = "env:\n- name: A\n  valueFrom:\n" + "".join(f"    {line}\n" for line in lines)
    with pytest.raises(SpecError, match="aliases"):
        from_annotations({CHECKPOINTING: text})


def test_the_block_that_a_refusal_recommends_is_accepted():
    with pytest.raises(SpecError) as refused:
        from_annotations({CHECKPOINTING: "{"})
    recommended = re.search(r"such as (\{.*\})", str(refused.value))
    assert recommended is not None
    assert from_annotations({CHECKPOINTING: recommended[1]}) is not None


@pytest.mark.parametrize(
    "write", [json.dumps, yaml.safe_dump, lambda whole: yaml.safe_dump(whole, default_flow_style=True)]
)
def test_the_annotation_says_the_same_as_the_field(write):
    assert from_annotations({CHECKPOINTING: write(FULL)}) == parse(FULL)


@pytest.mark.parametrize(("text", "enabled"), [("true", True), ("True", True), (" false ", False), ("{}", True)])
def test_the_annotation_may_be_a_plain_switch(text, enabled):
    asked = from_annotations({CHECKPOINTING: text})
    assert asked is not None
    assert asked.enabled is enabled


def test_an_object_without_the_annotation_asks_for_nothing():
    assert from_annotations({"other": "true"}) is None


def test_the_users_own_variable_wins_over_the_one_made_from_a_field_and_is_there_once():
    asked = parse({"interval": "5m", "env": [{"name": "CHECKPOINT_INTERVAL", "value": "9m"}]})
    assert [one for one in asked.variables() if one["name"] == "CHECKPOINT_INTERVAL"] == [
        {"name": "CHECKPOINT_INTERVAL", "value": "9m"}
    ]


def test_what_is_switched_off_still_tells_its_progress_and_saves_nowhere():
    told = values(parse({**FULL, "enabled": False}))
    assert told["CHECKPOINT_ENABLED"] == "false"
    assert told["TRAINING_PROGRESS_FILE"] == "/workspace/training_progress.json"
    assert not {"CHECKPOINT_URI", "CHECKPOINT_FALLBACK_URI", "CHECKPOINT_RESUME"} & set(told)


@pytest.mark.parametrize(
    ("storage", "first", "second"),
    [
        ({"uri": "s3://b/p"}, "s3://b/p", None),
        ({"persistentVolume": PLACE}, "/first", None),
        ({"persistentVolume": {**PLACE, "mountPath": "/first/"}, "uri": "/first/run"}, "/first/run", None),
        ({"uri": "s3://b/p", "persistentVolume": PLACE}, "s3://b/p", "/first"),
        ({"uri": "/first", "persistentVolume": PLACE}, "/first", None),
        (FULL["storage"], "s3://bucket/prefix", "/second"),
        ({"persistentVolume": PLACE, "fallback": FULL["storage"]["fallback"]}, "/first", "/second"),
    ],
)
def test_where_checkpoints_go_first_and_when_that_is_out_of_reach(storage, first, second):
    told = values(parse({"storage": storage}))
    assert told.get("CHECKPOINT_URI") == first
    assert told.get("CHECKPOINT_FALLBACK_URI") == second


# ---------------------------------------------------------------------- the CRD


def patched(thing: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    return jsonpatch.apply_patch(thing, operations)


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


# ---------------------------------------------------------------------- TrainJob, JobSet, Job

RUNTIME = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed"}


def train_job(asks: Any = None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "gpt", "namespace": "default"},
        "spec": {"runtimeRef": dict(RUNTIME), **({} if asks is None else {"checkpointing": asks}), **spec},
    }


def pod_template(**more: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "node", "image": "x"}], **more}}


def job_set(
    annotations: dict[str, str] | None, *, names: tuple[str, ...] = ("node",), **template: Any
) -> dict[str, Any]:
    jobs = [{"name": name, "template": {"spec": {"template": pod_template(), **template}}} for name in names]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "gpt", "namespace": "default", "annotations": annotations},
        "spec": {"replicatedJobs": copy.deepcopy(jobs)},
    }


def job(annotations: dict[str, str] | None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "gpt", "namespace": "default", "annotations": annotations},
        "spec": {"template": pod_template(), **copy.deepcopy(spec)},
    }


ASKS = {CHECKPOINTING: json.dumps(FULL)}
FROM_TRAINJOB = {MANAGED: "TrainJob", CHECKPOINTING: json.dumps({"storage": {"secretRef": {"name": "keys"}}})}

NAMES = st.sampled_from(["A", "B", "HOLDFAST_ENABLED", "CHECKPOINT_URI", "TRAINING_PROGRESS_FILE", "HOLDFAST_RUN_ID"])
VARIABLE = st.one_of(
    st.fixed_dictionaries({"name": NAMES, "value": st.sampled_from(["", "1", "0"])}),
    st.fixed_dictionaries({"name": NAMES, "valueFrom": st.just({"secretKeyRef": {"name": "s", "key": "k"}})}),
    st.fixed_dictionaries({"name": NAMES}),
)
ENV = st.lists(VARIABLE, max_size=4, unique_by=lambda one: one["name"])
TOLERATIONS = st.lists(
    st.sampled_from(
        [
            {"key": "nvidia.com/gpu", "operator": "Exists"},
            {"operator": "Exists"},
            {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"},
        ]
    ),
    max_size=3,
)
RULES = st.lists(
    st.sampled_from(
        [
            {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}},
            {"action": "Ignore", "onPodConditions": [{"type": "ConfigIssue", "status": "True"}]},
        ]
    ),
    max_size=2,
)


@st.composite
def pod_templates(draw: st.DrawFn) -> dict[str, Any]:
    container: dict[str, Any] = {"name": draw(st.sampled_from(["node", "train"])), "image": "x"}
    if env := draw(ENV):
        container["env"] = env
    if draw(st.booleans()):
        container["volumeMounts"] = [{"name": "data", "mountPath": draw(st.sampled_from(["/data", "/first"]))}]
    pod: dict[str, Any] = {"containers": [container, {"name": "side", "image": "y"}]}
    if draw(st.booleans()):
        pod["volumes"] = [{"name": "data", "emptyDir": {}}]
    if tolerations := draw(TOLERATIONS):
        pod["tolerations"] = tolerations
    if draw(st.booleans()):
        pod["terminationGracePeriodSeconds"] = draw(st.sampled_from([120, 600]))
    template: dict[str, Any] = {"spec": pod}
    if draw(st.booleans()):
        template["metadata"] = {"labels": {"team": "x"}}
    return template


@st.composite
def train_jobs(draw: st.DrawFn) -> dict[str, Any]:
    spec: dict[str, Any] = {}
    if draw(st.booleans()):
        spec["trainer"] = {"numNodes": 2, "env": draw(ENV)}
    if draw(st.booleans()):
        spec["runtimePatches"] = [{"manager": "mine", "trainingRuntimeSpec": {"template": {}}}]
    asks = {key: value for key, value in FULL.items() if draw(st.booleans())}
    return train_job(asks, **spec)


@st.composite
def job_sets(draw: st.DrawFn) -> dict[str, Any]:
    thing = job_set(draw(st.sampled_from([ASKS, FROM_TRAINJOB])), names=("node", "other"))
    for one in thing["spec"]["replicatedJobs"]:
        one["template"]["spec"]["template"] = draw(pod_templates())
        if rules := draw(RULES):
            one["template"]["spec"]["podFailurePolicy"] = {"rules": rules}
    if draw(st.booleans()):
        mine = {"name": "mine", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}
        thing["spec"]["failurePolicy"] = {"maxRestarts": draw(st.integers(0, 9)), "rules": [mine]}
    return thing


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    thing = job(ASKS, backoffLimit=draw(st.integers(0, 6)))
    thing["spec"]["template"] = draw(pod_templates())
    if rules := draw(RULES):
        thing["spec"]["podFailurePolicy"] = {"rules": rules}
    return thing


CHANGED = st.one_of(
    train_jobs().map(lambda thing: (trainjob.secured, thing)),
    job_sets().map(lambda thing: (jobset.secured_jobset, thing)),
    jobs().map(lambda thing: (jobset.secured_job, thing)),
)


@UNHURRIED
@given(CHANGED)
def test_an_object_that_is_safe_is_not_changed_again(case):
    change, thing = case
    once = change(thing)
    assert change(once) == once


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


@UNHURRIED
@given(train_jobs())
def test_a_trainjob_uses_only_fields_that_the_real_crd_knows(thing):
    known = crd("trainjobs.trainer.kubeflow.org")
    known = patched(known, schema.patch(known))["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    after = trainjob.secured(thing)
    assert complaints(after["spec"], known["properties"]["spec"]) == []


@UNHURRIED
@given(job_sets())
def test_a_jobset_uses_only_fields_that_the_real_crd_knows(thing):
    after = jobset.secured_jobset(thing)
    assert complaints(after["spec"], schema_of("jobsets.jobset.x-k8s.io")["properties"]["spec"]) == []


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


def test_a_trainjob_that_is_there_already_cannot_ask_for_it_any_more():
    plain, asks = train_job(None), trainjob.secured(train_job(FULL))
    with pytest.raises(SpecError, match="cannot be added to a TrainJob that is there already"):
        trainjob.check_update(plain, train_job(FULL))
    dropped = copy.deepcopy(asks)
    del dropped["spec"]["checkpointing"]
    for old, new in ((asks, asks), (asks, dropped), (dropped, asks), (plain, plain)):
        trainjob.check_update(old, new)


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


def test_watching_begins_anew_when_a_kind_of_job_was_installed(monkeypatch):
    looks = [{"Job"}, {"Job"}, {"Job", "JobSet"}, OSError(), {"Job"}, {"Job", "JobSet", "TrainJob"}] + 2 * [
        {"Job", "JobSet"}
    ]

    class Cluster:
        async def served(self, _: Any) -> set[str]:
            look = looks.pop(0)
            if isinstance(look, OSError):
                raise look
            return look

    monkeypatch.setattr(app, "KINDS_LOOK_S", 0.0)
    assert asyncio.run(app._until_installed(Cluster())) == "JobSet"  # type: ignore[arg-type]
    assert looks == [{"Job", "JobSet"}]


def test_a_watcher_that_fails_is_noticed(monkeypatch):
    async def fails(stop_flag: Any, **_: Any) -> None:
        asyncio.get_running_loop().run_in_executor(None, stop_flag.wait)  # as kopf does
        raise OSError("no route")

    monkeypatch.setattr(app.kopf, "operator", fails)

    async def watch() -> None:
        async with asyncio.timeout(20):
            await app._watch_jobs(_Unreachable(), None)  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match="jobs are not watched any more") as raised:
        asyncio.run(watch())
    assert "no route" in str(raised.value.__cause__)


class _Unreachable:
    async def served(self, _: Any) -> set[str]:
        raise OSError


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


PUSH = {"HOLDFAST_PROGRESS_URL": "https://operator:9444/progress", "HOLDFAST_PROGRESS_CA": "PEM"}


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


def _updated(change: Any, new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    return admission._changed(change, new, old, lambda: pods.ASKED)


def test_a_jobset_that_was_made_without_the_webhook_can_be_suspended():
    made = job_set(FROM_TRAINJOB)
    suspended = {**made, "spec": {**made["spec"], "suspend": True}}
    assert _updated(jobset.secured_jobset, suspended, made) == suspended
    safe = jobset.secured_jobset(made)
    again = _updated(jobset.secured_jobset, suspended, safe)  # as Kubeflow Trainer writes it, without what was added
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
        _updated(jobset.secured_job, asks, job({}))
    assert _updated(jobset.secured_job, asks, asks) == asks
    with pytest.raises(SpecError, match="cannot be changed after the job was created: make a new Job"):
        _updated(jobset.secured_job, asks, job({CHECKPOINTING: "false"}))


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


@pytest.mark.parametrize(
    ("block", "where", "fallback"),
    [
        (
            {"storage": {"uri": "s3://b/x"}, "persistentVolume": {"claimName": "c"}},
            "s3://b/x",
            "/mnt/holdfast-fallback",
        ),
        ({"persistentVolume": {"claimName": "c", "mountPath": "/c"}}, "/c", None),
        ({"storage": {"uri": "s3://b/x", "persistentVolume": {"claimName": "c", "mountPath": "/c"}}}, "s3://b/x", "/c"),
        (
            {"storage": {"uri": "s3://b/x", "fallback": {"persistentVolume": {"claimName": "c"}}}},
            "s3://b/x",
            "/mnt/holdfast-fallback",
        ),
    ],
)
def test_a_fallback_needs_no_more_than_the_name_of_a_claim(block, where, fallback):
    asked = parse(block)
    given = {one["name"]: one.get("value") for one in asked.variables()}
    assert (given["CHECKPOINT_URI"], given.get("CHECKPOINT_FALLBACK_URI")) == (where, fallback)
    assert [volume.claim for volume in asked.volumes] == ["c"]
    assert complaints(block, schema.CHECKPOINTING) == []


def test_two_fallbacks_are_one_too_many():
    claim = {"persistentVolume": {"claimName": "c"}}
    with pytest.raises(SpecError, match=r"persistentVolume: is a second fallback beside spec.checkpointing.storage"):
        parse({**claim, "storage": {"uri": "s3://b/x", "fallback": claim}})


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


@pytest.mark.parametrize("answer", [OSError("no route"), TimeoutError(), ApiException(status=503), ApiException()])
def test_an_api_server_that_is_away_ends_no_replica(answer):
    class Away:
        async def read_namespaced_lease(self, *_: Any) -> Any:
            raise answer

    lock = app._Lock("lease", "here", "me", object())
    lock.api_instance = Away()
    config = Config(lock, 15, 10, 2, onstarted_leading=lambda: None, onstopped_leading=None)
    assert asyncio.run(LeaderElection(config).try_acquire_or_renew()) is False


def test_what_a_pod_tells_is_read_in_its_turn_and_nobody_execs():
    clock = iter(range(1000, 2000))
    followed = Controller(None, execs=False, clock=lambda: float(next(clock)))
    body = {**train_job({"storage": {"uri": "s3://b/x"}}), "kind": "TrainJob"}
    body["metadata"] = {"namespace": "default", "name": "job", "uid": "j"}
    followed.saw_job("TrainJob", "ADDED", body)
    labels = {MANAGED: "TrainJob", "jobset.sigs.k8s.io/jobset-name": "job"}
    pod = {"metadata": {"uid": "p", "namespace": "default", "name": "pod", "labels": labels}}
    pod |= {"spec": {"containers": [{"name": "node"}]}}
    pod["status"] = {"containerStatuses": [{"name": "node", "state": {"running": {}}}]}
    followed.saw_pod("ADDED", pod)
    assert not followed.saw_push("stranger", b"{}")
    (job,) = followed.jobs.values()
    assert asyncio.run(followed._read(job, [pod], set(), job.asked)) == (None, None, None)
    assert followed.saw_push("p", b'{"step": 7}')
    progress, problem, source = asyncio.run(followed._read(job, [pod], set(), job.asked))
    assert (progress, problem, source) == ({"step": 7}, None, pod)
    followed.saw_push("p", b"<html>")
    progress, problem, _ = asyncio.run(followed._read(job, [pod], set(), job.asked))
    assert progress is None
    assert "pod is not accepted" in problem


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


# ---------------------------------------------------------------------- Ray

ROOTS = {"RayCluster": None, "RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}
CRD_OF = {"RayCluster": "rayclusters.ray.io", "RayJob": "rayjobs.ray.io", "RayService": "rayservices.ray.io"}


def ray_thing(kind: str, annotations: dict[str, str] | None, *pod_templates: dict[str, Any]) -> dict[str, Any]:
    head, *workers = pod_templates or (pod_template(), pod_template())
    cluster = {
        "headGroupSpec": {"rayStartParams": {}, "template": head},
        "workerGroupSpecs": [
            {"groupName": "w", "minReplicas": 1, "maxReplicas": 1, "rayStartParams": {}, "template": one}
            for one in workers
        ],
    }
    root = ROOTS[kind]
    return copy.deepcopy(
        {
            "apiVersion": "ray.io/v1",
            "kind": kind,
            "metadata": {"name": "ray", "namespace": "default", "annotations": annotations},
            "spec": cluster if root is None else {root: cluster},
        }
    )


def ray_env(template: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value") for one in template["spec"]["containers"][0].get("env") or []}


RAY_NAMES = st.sampled_from(
    ["A", "B", ray.ENABLED_VARIABLE, ray.KILL_WAIT_VARIABLE, ray.DRAIN_VARIABLE, "HOLDFAST_GRACE_PERIOD"]
)
RAY_VARIABLE = st.one_of(
    st.fixed_dictionaries({"name": RAY_NAMES, "value": st.sampled_from(["", "true", "50", "5.0"])}),
    st.fixed_dictionaries({"name": RAY_NAMES, "valueFrom": st.just({"secretKeyRef": {"name": "s", "key": "k"}})}),
    st.fixed_dictionaries({"name": RAY_NAMES}),
)


@st.composite
def ray_templates(draw: st.DrawFn) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "ray", "image": "x"}
    if env := draw(st.lists(RAY_VARIABLE, max_size=4, unique_by=lambda one: one["name"])):
        container["env"] = env
    template: dict[str, Any] = {"spec": {"containers": [container, {"name": "side", "image": "y"}]}}
    if draw(st.booleans()):
        template["spec"]["terminationGracePeriodSeconds"] = draw(st.sampled_from([0, 5, 30, 60, 65, 600]))
    metadata = draw(st.sampled_from([None, {"labels": {"a": "b"}}, {"annotations": {"a": "b"}}]))
    if metadata is not None:
        template["metadata"] = copy.deepcopy(metadata)
    return template


RAY_ANNOTATIONS = st.fixed_dictionaries(
    {},
    optional={
        RAY_ENABLED: st.sampled_from(["true", "false", "1", "0", "True"]),
        RAY_KILL_WAIT: st.sampled_from(["0", "5.0", "2.5", "300"]),
        "other": st.just("x"),
    },
)


@st.composite
def ray_things(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(ROOTS)))
    return ray_thing(kind, draw(RAY_ANNOTATIONS), *draw(st.lists(ray_templates(), min_size=1, max_size=3)))


@UNHURRIED
@given(ray_things())
def test_a_ray_object_that_is_safe_is_not_changed_again(thing):
    once = ray.secured(thing)
    assert ray.secured(once) == once


@UNHURRIED
@given(ray_things())
def test_what_the_user_wrote_into_a_ray_object_stays_but_for_a_longer_grace_period(thing):
    before = copy.deepcopy(thing)
    after = ray.secured(thing)
    assert thing == before
    for old, new in zip(ray.templates(before), ray.templates(after), strict=True):
        wanted = old["spec"].pop("terminationGracePeriodSeconds", 0)
        assert new["spec"].get("terminationGracePeriodSeconds", 0) >= wanted
    assert is_within(before, after)


@UNHURRIED
@given(ray_things(), RAY_ANNOTATIONS)
def test_other_annotations_make_of_a_safe_ray_object_what_they_make_of_the_original(thing, annotations):
    other = {**thing, "metadata": {**thing["metadata"], "annotations": annotations}}
    safe = ray.secured(thing)
    changed = {**safe, "metadata": other["metadata"]}
    assert ray.secured(changed) == ray.secured(other)


@UNHURRIED
@given(ray_things())
def test_the_webhooks_patch_makes_of_a_ray_object_what_was_wanted_and_takes_it_back(thing):
    after = ray.secured(thing)
    released = {**after, "metadata": {"name": "ray"}}
    for one, other in ((thing, after), (released, ray.secured(released))):
        patch: dict[str, Any] = {}
        admission._differences(one, other, patch)
        assert merged(one, patch) == other
        assert jsonpatch.apply_patch(one, admission._operations(one, patch)) == other


@settings(UNHURRIED, max_examples=30)
@given(ray_things())
def test_a_ray_object_uses_only_fields_that_the_real_crd_knows(thing):
    known = schema_of(CRD_OF[thing["kind"]])["properties"]["spec"]
    assert complaints(ray.secured(thing)["spec"], known) == []


class RayObject(RuleBasedStateMachine):
    """A RayCluster that its owner changes again and again, each time through the webhook; beside it the manifest."""

    def __init__(self) -> None:
        super().__init__()
        self.manifest = ray_thing("RayCluster", {}, pod_template())
        self.stored = ray.secured(self.manifest)

    def _edit(self, change: Any) -> None:
        for thing in (self.manifest, self.stored):
            change(thing)
        self.stored = ray.secured(self.stored)

    @staticmethod
    def _container(thing: dict[str, Any]) -> dict[str, Any]:
        return thing["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]

    @rule(annotations=RAY_ANNOTATIONS)
    def annotate(self, annotations):
        self._edit(lambda thing: thing["metadata"].update(annotations=annotations))

    @rule(variable=RAY_VARIABLE)
    def add_a_variable(self, variable):
        def change(thing: dict[str, Any]) -> None:
            container = self._container(thing)
            others = [one for one in container.get("env", []) if one["name"] != variable["name"]]
            container["env"] = [*others, dict(variable)]

        # One that says the very same as ours cannot be told from ours.
        ours = ray_env(self.stored["spec"]["headGroupSpec"]["template"])
        if "value" not in variable or ours.get(variable["name"]) != variable["value"]:
            self._edit(change)

    @rule(image=st.sampled_from(["x", "y"]))
    def change_the_image(self, image):
        self._edit(lambda thing: self._container(thing).update(image=image))

    @rule(name=st.sampled_from(["A", "B"]))
    def remove_a_variable(self, name):
        def change(thing: dict[str, Any]) -> None:
            container = self._container(thing)
            container["env"] = [one for one in container.get("env", []) if one["name"] != name]
            if not container["env"]:
                del container["env"]

        self._edit(change)

    @invariant()
    def taking_the_annotations_away_gives_the_manifest(self):
        released = copy.deepcopy(self.stored)
        plain = copy.deepcopy(self.manifest)
        released["metadata"]["annotations"] = plain["metadata"]["annotations"] = {}
        assert ray.secured(released) == plain

    @invariant()
    def what_is_stored_is_what_the_manifest_would_become(self):
        def normal(thing: dict[str, Any]) -> dict[str, Any]:
            env = self._container(thing).get("env")
            if env:
                env.sort(key=lambda one: one["name"])
            return thing

        stored, fresh = copy.deepcopy(self.stored), ray.secured(self.manifest)
        for thing in (stored, fresh):
            thing["spec"]["headGroupSpec"]["template"].get("metadata", {}).get("annotations", {}).pop(INJECTED, None)
        assert normal(stored) == normal(fresh)


def test_a_ray_object_that_is_annotated_and_changed_is_the_original_once_the_annotations_are_gone():
    run_state_machine_as_test(RayObject, settings=settings(UNHURRIED, max_examples=60, stateful_step_count=12))


def test_a_variable_from_a_secret_survives_the_second_look():
    secret = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    template = pod_template()
    template["spec"]["containers"][0]["env"] = [secret, {"name": "EMPTY"}]
    thing = ray_thing("RayCluster", {RAY_ENABLED: "true"}, template)
    twice = ray.secured(ray.secured(thing))
    assert twice["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"][:2] == [secret, {"name": "EMPTY"}]


@pytest.mark.parametrize("kind", sorted(ROOTS))
def test_the_two_annotations_become_the_two_variables_in_head_and_workers(kind):
    thing = ray_thing(kind, {RAY_ENABLED: "true", RAY_KILL_WAIT: "5.0"})
    found = list(ray.templates(ray.secured(thing)))
    assert len(found) == 2
    for template in found:
        env = ray_env(template)
        assert env["RAY_TRAIN_JIT_CHECKPOINT_ENABLED"] == "true"
        assert env["RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT"] == "5.0"
        assert int(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) < template["spec"]["terminationGracePeriodSeconds"]


def test_the_kill_wait_alone_becomes_its_variable_and_switches_nothing_on():
    thing = ray_thing("RayCluster", {RAY_KILL_WAIT: "2.5"})
    for template in ray.templates(ray.secured(thing)):
        assert ray_env(template) == {ray.KILL_WAIT_VARIABLE: "2.5"}
        assert "terminationGracePeriodSeconds" not in template["spec"]


def test_the_users_own_value_of_a_variable_wins():
    template = pod_template()
    template["spec"]["containers"][0]["env"] = [{"name": ray.ENABLED_VARIABLE, "value": "false"}]
    after = ray.secured(ray_thing("RayCluster", {RAY_ENABLED: "true"}, template))
    env = after["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    assert [one["value"] for one in env if one["name"] == ray.ENABLED_VARIABLE] == ["false"]


@pytest.mark.parametrize("value", ["soon", "", "-1", "nan", "inf", "-inf", "1e9", "5s", "5,0", "0x5", "true"])
@pytest.mark.parametrize("enabled", [None, "true", "false"])
def test_a_bad_kill_wait_is_refused_even_where_it_is_not_used(value, enabled):
    annotations = {RAY_KILL_WAIT: value, **({} if enabled is None else {RAY_ENABLED: enabled})}
    with pytest.raises(SpecError, match=re.escape(f"{RAY_KILL_WAIT}: {value!r} is not accepted; it must be a number")):
        ray.secured(ray_thing("RayCluster", annotations))


@pytest.mark.parametrize("value", ["", "maybe", "2", "tru", "enabled", "null"])
def test_a_bad_switch_is_refused(value):
    with pytest.raises(SpecError, match=re.escape(f'{RAY_ENABLED}: {value!r} is not accepted; it must be "true"')):
        ray.secured(ray_thing("RayJob", {RAY_ENABLED: value}))


@pytest.mark.parametrize(
    "text",
    ["", "x", "null", "5", "[]", '"x"', '{"env": 5}', '{"env": [1]}', '{"grace": 5}', '{"grace": [1]}', "[" * 100_000],
)
def test_a_note_of_what_was_put_in_that_is_not_ours_is_dropped_and_breaks_nothing(text):
    template = {"metadata": {"annotations": {INJECTED: text}}, **pod_template()}
    assert ray.secured(ray_thing("RayCluster", None, template)) == ray_thing("RayCluster", None, pod_template())


@pytest.mark.parametrize(
    "template",
    [
        {"metadata": None, **pod_template()},
        {"metadata": {"annotations": None}, **pod_template()},
        {"spec": None},
        {"spec": {"containers": None}},
        {},
        None,
    ],
)
def test_a_part_of_a_ray_object_that_is_null_breaks_nothing(template):
    thing = ray_thing("RayCluster", {RAY_ENABLED: "true"}, template)  # type: ignore[arg-type]
    once = ray.secured(thing)
    assert ray.secured(once) == once
    ray.warnings(once)


def test_a_hook_that_stops_ray_is_warned_of_where_the_save_is_switched_on():
    template = pod_template()
    hook = {"preStop": {"exec": {"command": ["/bin/sh", "-c", "ray stop"]}}}
    template["spec"]["containers"][0]["lifecycle"] = hook
    [warning] = ray.warnings(ray_thing("RayCluster", {RAY_ENABLED: "true"}, template))
    assert "preStop" in warning
    for switched in (None, {RAY_ENABLED: "false"}):
        assert ray.warnings(ray_thing("RayCluster", switched, template)) == []


# ---------------------------------------------------------------------- the patch of a webhook

TREES = st.recursive(
    st.booleans() | st.integers(2, 9) | st.text(max_size=3) | st.lists(st.integers(2, 9), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc/~"), inner, min_size=1, max_size=3),
    max_leaves=10,
)
OBJECTS = st.dictionaries(st.sampled_from("abc/~"), TREES, max_size=4)


@settings(UNHURRIED, max_examples=300)
@given(OBJECTS, OBJECTS)
def test_the_differences_merged_into_one_object_give_the_other(before, after):
    patch: dict[str, Any] = {}
    admission._differences(before, after, patch)
    assert merged(before, patch) == after


@settings(UNHURRIED, max_examples=300)
@given(OBJECTS, OBJECTS)
def test_a_status_that_replaces_another_leaves_nothing_of_it(before, after):
    assert merged(before, controller._replacing(before, after)) == after


def test_the_next_certificate_is_trusted_by_whoever_trusts_the_first():
    first = certificates.make("a.b.svc", NOW)
    second = certificates.make("a.b.svc", NOW + timedelta(days=300), first)
    assert second.authority == first.authority
    assert second.certificate != first.certificate
    authority = x509.load_pem_x509_certificate(first.authority)
    x509.load_pem_x509_certificate(second.certificate).verify_directly_issued_by(authority)


@pytest.mark.parametrize("days", [0, 3500])
def test_an_authority_that_ends_or_has_lost_its_key_is_followed_by_another_and_trusted_for_a_while(days):
    first = certificates.make("a.b.svc", NOW)
    known = first if days else certificates.Bundle(first.certificate, first.key, first.authority)
    second = certificates.make("a.b.svc", NOW + timedelta(days=days), known)
    newest, older = x509.load_pem_x509_certificates(second.authority)
    assert older == x509.load_pem_x509_certificate(first.authority)
    x509.load_pem_x509_certificate(second.certificate).verify_directly_issued_by(newest)


def test_no_difference_is_no_patch():
    patch: dict[str, Any] = {}
    thing = train_job(FULL)
    admission._differences(thing, copy.deepcopy(thing), patch)
    assert patch == {}


# ---------------------------------------------------------------------- what is concluded from a job and its pods


def pod(
    name: str = "gpt-node-0-0",
    *,
    exit_code: int | None = None,
    running: bool = False,
    reason: str = "Error",
    deleted: bool = False,
    disrupted: bool = False,
    made_s: float = 0,
    ended_s: float = 100,
    index: str | None = "0",
    kind: str = "TrainJob",
    **more: Any,
) -> dict[str, Any]:
    def at(seconds: float) -> str:
        return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")

    state: dict[str, Any] = {"waiting": {}}
    phase = "Pending"
    if running:
        state, phase = {"running": {"startedAt": at(made_s)}}, "Running"
    if exit_code is not None:
        state = {"terminated": {"exitCode": exit_code, "reason": reason, "finishedAt": at(ended_s)}}
        phase = "Failed" if exit_code else "Succeeded"
    labels = {
        MANAGED: kind,
        "jobset.sigs.k8s.io/jobset-name": "gpt",
        "batch.kubernetes.io/job-name": "gpt" if kind == "Job" else "gpt-node-0",
        **({} if index is None else {"batch.kubernetes.io/job-completion-index": index}),
    }
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "labels": labels,
            "creationTimestamp": at(made_s),
            **({"deletionTimestamp": at(ended_s)} if deleted else {}),
        },
        "spec": {"containers": [{"name": "node"}], "nodeName": "one"},
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": "node", "state": state}],
            "conditions": [{"type": "DisruptionTarget", "status": "True"}] if disrupted else [],
        },
        **more,
    }


def told(name: str, reason: str = "", message: str = "") -> dict[str, Any]:
    condition = {"type": name, "status": "True", "reason": reason, "message": message}
    return {"spec": {}, "status": {"conditions": [condition]}}


@pytest.mark.parametrize(
    ("thing", "pods", "before", "phase"),
    [
        ({}, [], None, "Pending"),
        ({}, [pod()], None, "Pending"),
        ({}, [pod(running=True)], "Pending", "Running"),
        ({}, [pod(running=True), pod("b", running=True, deleted=True, index="1")], "Running", "Preempted"),
        ({}, [pod(exit_code=143)], "Running", "Preempted"),
        ({}, [pod(exit_code=1, disrupted=True)], "Running", "Preempted"),
        ({}, [pod(exit_code=137, reason="OOMKilled")], "Running", "Restarting"),
        ({}, [pod(exit_code=137, reason="OOMKilled", deleted=True)], "Running", "Restarting"),
        ({}, [pod(exit_code=1)], "Running", "Restarting"),
        ({}, [pod(exit_code=1), pod("b", running=True, deleted=True, index="1")], "Running", "Restarting"),
        ({}, [pod(exit_code=137), pod("b", exit_code=143, index="1")], "Running", "Preempted"),
        ({}, [], "Preempted", "Preempted"),
        ({}, [pod()], "Restarting", "Restarting"),
        ({"spec": {"suspend": True}}, [pod(running=True, deleted=True)], "Running", "Suspended"),
        ({"spec": {"suspend": False}}, [], "Suspended", "Pending"),
        (told("Complete"), [pod(exit_code=0)], "Running", "Complete"),
        (told("Completed"), [], "Running", "Complete"),
        (told("Failed", "BackoffLimitExceeded", "six"), [pod(running=True)], "Running", "Failed"),
        ({"status": {"conditions": None}}, [], None, "Pending"),
        ({"status": {"conditions": [{"type": "Failed", "status": "False"}]}}, [pod(running=True)], None, "Running"),
    ],
)
def test_the_phase_of_a_job(thing, pods, before, phase):
    assert status.phase_of(thing, pods, before)[0] == phase


@pytest.mark.parametrize("pods", [[pod(exit_code=0)], [pod(exit_code=0), pod("b", exit_code=0, index="1")]])
def test_a_job_whose_pods_have_just_succeeded_is_not_called_preempted(pods):
    assert status.phase_of({}, pods, "Running") == ("Running", "")


@pytest.mark.parametrize("index", ["0", None])
def test_a_job_runs_again_once_a_new_pod_runs_in_the_place_of_the_one_that_was_preempted(index):
    old = pod("old", exit_code=143, disrupted=True, index=index, kind="Job")
    new = pod("new", running=True, made_s=101, index=index, kind="Job")
    assert status.phase_of({}, [old, new], "Preempted") == ("Running", "")


def stuck(name: str = "b", *, waiting: Any = None, scheduled: Any = None, age_s: float = 3600, **more: Any):
    """A pod that cannot start, as the kubelet or the scheduler says."""
    one = pod(name, index="1", **more)
    made = datetime.now(UTC) - timedelta(seconds=age_s)
    one["metadata"]["creationTimestamp"] = made.strftime("%Y-%m-%dT%H:%M:%SZ")
    if waiting is not None:
        one["status"]["containerStatuses"][0]["state"] = {"waiting": waiting}
    if scheduled is not None:
        one["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", **scheduled}]
        del one["status"]["containerStatuses"]
    return one


PULL = {"reason": "ErrImagePull", "message": 'failed to pull "x:1":\n not found <here>'}
NO_SECRET = {"reason": "CreateContainerConfigError", "message": 'secret "keys" not found'}
NO_CLAIM = {"reason": "Unschedulable", "message": '0/2 nodes: persistentvolumeclaim "c" not found'}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"waiting": PULL}, 'pod b cannot start: ImagePullBackOff: failed to pull "x:1": not found (here)'),
        ({"waiting": NO_SECRET}, 'pod b cannot start: CreateContainerConfigError: secret "keys" not found'),
        (
            {"scheduled": NO_CLAIM},
            'pod b cannot start: Unschedulable: 0/2 nodes: persistentvolumeclaim "c" not found',
        ),
        ({"waiting": {"reason": "ContainerCreating"}}, ""),
        ({"waiting": {}}, ""),
        ({"scheduled": NO_CLAIM, "age_s": 5}, ""),
        ({"scheduled": NO_CLAIM, "deleted": True}, "its pods were stopped"),
    ],
)
def test_why_a_pod_cannot_start_is_said_once_it_is_no_matter_of_a_moment(given, said):
    one = stuck(**given)
    before = "Running" if "stopped" in said else None
    phase, reason = status.phase_of({}, [one], before)
    assert (phase, reason) == ("Preempted" if before else "Pending", said)
    if not before:
        assert status.phase_of({}, [one], "Preempted") == ("Preempted", said)


def test_that_pods_cannot_start_is_one_event_for_each_cause():
    shown: dict[str, Any] = {}
    events: list[str] = []
    for one in (stuck(scheduled=NO_CLAIM), stuck("c", scheduled={**NO_CLAIM, "message": "0/3"}), stuck(waiting=PULL)):
        phase, reason = status.phase_of({}, [one], shown.get("phase"))
        shown, happened = status.combined(shown, phase, reason, None, None, None, NOW)
        assert shown["conditions"][0]["message"] == reason
        events += [each.message for each in happened if each.reason == "CannotStart"]
    assert [text.partition(":")[2].split()[0] for text in events] == ["Unschedulable:", "ImagePullBackOff:"]
    assert events[0].startswith("Pod b cannot start: ")


def test_a_job_is_not_called_running_while_it_waits_for_some_of_its_pods():
    there = pod("a", running=True)
    assert status.phase_of({}, [there, pod("b", index="1")], None) == ("Pending", "1 of 2 pods run")
    said = '1 of 2 pods run; pod b cannot start: Unschedulable: 0/2 nodes: persistentvolumeclaim "c" not found'
    assert status.phase_of({}, [there, stuck(scheduled=NO_CLAIM)], "Preempted") == ("Preempted", said)
    # It trains all the same, since one of them tells its progress, or it did before.
    assert status.phase_of({}, [there, stuck(scheduled=NO_CLAIM)], "Preempted", tells=True) == ("Running", said)
    assert status.phase_of({}, [there, stuck(scheduled=NO_CLAIM)], "Running") == ("Running", said)


def test_a_job_runs_while_the_last_of_its_pods_does():
    pods = [pod("a", exit_code=0), pod("b", running=True, index="1")]
    for before in (None, "Pending", "Running", "Preempted"):
        assert status.phase_of({}, pods, before) == ("Running", "")


def test_a_rank_that_has_left_while_the_others_still_run_makes_the_job_preempted():
    pods = [pod("a", exit_code=143), pod("b", running=True, index="1")]
    assert status.phase_of({}, pods, "Running")[0] == "Preempted"


def test_why_a_job_failed_is_said_in_upstreams_words():
    assert status.phase_of(told("Failed", "MaxRestarts", "jobset failed"), [], "Running") == (
        "Failed",
        "MaxRestarts: jobset failed",
    )


PROGRESS_NOW: dict[str, Any] = {
    "epoch": 2,
    "step": 150,
    "totalSteps": 300,
    "loss": "0.4523",
    "percentComplete": "50.0",
    "estimatedTimeRemaining": "1h 45m",
    "lastUpdateTime": "2026-11-15T12:00:00Z",
    "resumedFrom": "checkpoint-100",
    "checkpointing": {"enabled": True, "latestCheckpoint": "/c/checkpoint-150", "checkpointsCreated": 3},
}


def look(before: dict[str, Any], phase: str, progress: dict[str, Any] | None, source: Any = None, problem: Any = None):
    return status.combined(before, phase, "", progress, problem, source, NOW)


def test_looking_again_at_what_has_not_changed_says_nothing():
    first, happened = look({}, "Running", PROGRESS_NOW, pod(running=True))
    assert [one.reason for one in happened] == ["Created", "Running", "Resumed", "CheckpointCommitted"]
    assert look(first, "Running", PROGRESS_NOW, pod(running=True)) == (first, [])


@pytest.mark.parametrize("phase", ["Pending", "Suspended", "Running"])
def test_that_a_job_was_created_is_told_however_it_was_seen_first(phase):
    shown, happened = look({}, phase, None)
    assert [one.reason for one in happened] == (["Created"] if phase == "Pending" else ["Created", phase])
    assert look(shown, phase, None) == (shown, [])


@pytest.mark.parametrize("phase", ["Pending", "Preempted", "Restarting", "Suspended", "Complete", "Failed"])
def test_how_long_it_will_take_is_said_of_a_job_that_runs_and_of_no_other(phase):
    running, _ = look({}, "Running", PROGRESS_NOW, pod(running=True))
    assert running["estimatedTimeRemaining"] == "1h 45m"
    for progress in (None, PROGRESS_NOW):
        after, _ = look(running, phase, progress, pod(running=True))
        assert "estimatedTimeRemaining" not in after
        assert after["step"] == 150


def test_a_restarted_controller_says_nothing_twice():
    first, _ = look({}, "Running", PROGRESS_NOW, pod(running=True))
    stored = merged({}, json.loads(json.dumps(first)))
    assert look(stored, "Running", PROGRESS_NOW, pod(running=True)) == (first, [])


def test_each_new_pod_that_went_on_from_a_checkpoint_is_one_recovery():
    first, _ = look({}, "Running", {**PROGRESS_NOW, "resumedFrom": None}, pod("a", running=True))
    assert first["recoveries"] == 0
    second, _ = look(first, "Preempted", None)
    third, happened = look(second, "Running", PROGRESS_NOW, pod("b", running=True))
    assert third["recoveries"] == 1
    assert "Resumed from checkpoint-100" in [one.message for one in happened]


def test_ranks_that_share_one_file_are_one_recovery_whoever_is_read():
    began, written = pod("a", running=True, made_s=-60), {**PROGRESS_NOW, "lastUpdateTime": "2026-11-15T12:00:00Z"}
    first, _ = look({}, "Running", written, began)
    assert first["recoveries"] == 1
    for name in ("b", "a", "b"):
        first, happened = look(first, "Running", written, pod(name, running=True, made_s=-58, index=str(name == "b")))
        assert (first["recoveries"], happened) == (1, [])
    # Another rank's last word came when this one had begun already.
    since = {**written, "resumedFrom": "checkpoint-150"}
    assert look(first, "Running", since, pod("c", running=True, made_s=-2))[0]["recoveries"] == 2
    again, _ = look(
        first, "Running", {**written, "lastUpdateTime": "2026-11-15T12:00:09Z"}, pod("c", running=True, made_s=5)
    )
    assert again["recoveries"] == 2


def _beside(one: dict[str, Any], **state: Any) -> dict[str, Any]:
    """With a container beside the one that trains."""
    one["spec"]["containers"] = [{"name": "node"}, {"name": "logs"}]
    one["status"]["containerStatuses"].append({"name": "logs", "state": state})
    return one


def test_what_a_container_beside_the_training_does_says_nothing_of_the_job():
    ended = {"terminated": {"exitCode": 1, "finishedAt": "2026-11-15T12:00:00Z"}}
    assert status.phase_of({}, [_beside(pod(running=True), **ended)], "Running") == ("Running", "")
    proxy = _beside(pod(exit_code=1, kind="Job"), running={"startedAt": "2026-11-15T11:00:00Z"})
    proxy["spec"]["containers"] = [{"name": "logs"}, {"name": "main", "env": [{"name": "HOLDFAST_ENABLED"}]}]
    proxy["status"]["containerStatuses"][0]["name"] = "main"
    assert status.phase_of({}, [proxy], "Running") == ("Restarting", "a container ended with exit code 1")
    still = _beside(pod(exit_code=1), running={"startedAt": "2026-11-15T11:00:00Z"})
    assert status.phase_of({}, [still], "Running") == ("Restarting", "a container ended with exit code 1")


def test_what_the_new_attempt_does_not_know_is_not_left_over_from_the_old_one():
    first, _ = look({}, "Running", PROGRESS_NOW, pod("a", running=True))
    second, _ = look(first, "Running", {"step": 0}, pod("b", running=True))
    assert not {"loss", "totalSteps", "checkpointing", "estimatedTimeRemaining"} & set(second)


def test_a_file_that_cannot_be_read_changes_nothing_but_a_condition():
    first, _ = look({}, "Running", PROGRESS_NOW, pod(running=True))
    second, happened = look(first, "Running", None, None, "the file is torn")
    assert happened == []
    assert {**second, "conditions": None} == {**first, "conditions": None}
    [readable] = [one for one in second["conditions"] if one["type"] == "ProgressReadable"]
    assert (readable["status"], readable["message"]) == ("False", "the file is torn")


@pytest.mark.parametrize(
    ("written", "container_began_s"),
    [("2026-11-15T11:00:00Z", -7200), ("2026-11-15T11:59:30Z", -10), ("2020-01-01T00:00:00Z", 0)],
)
def test_a_file_that_was_not_written_for_long_or_by_an_earlier_container_changes_nothing_but_a_condition(
    written, container_began_s
):
    first, _ = look({}, "Running", {**PROGRESS_NOW, "step": 100, "resumedFrom": None}, pod("a", running=True))
    old = {**PROGRESS_NOW, "lastUpdateTime": written}
    after, happened = look(first, "Running", old, pod("b", running=True, made_s=container_began_s))
    assert {**after, "conditions": None} == {**first, "conditions": None}
    assert happened == []
    assert [one["reason"] for one in after["conditions"] if one["type"] == "ProgressReadable"] == ["Stale"]


def test_only_a_new_job_is_called_created():
    waiting = [look(before, "Pending", None)[1] for before in ({}, {"phase": "Suspended"})]
    assert [one.reason for happened in waiting for one in happened] == ["Created", "Waiting"]


NUMBER_TEXT = st.from_regex(r"\A[+-]?([0-9]{1,20}(\.[0-9]{0,5})?([eE][+-]?[0-9]{1,4})?|inf|nan)\Z")
FILES = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("epoch", "totalEpochs", "step", "totalSteps"), st.integers(0, 2**63 - 1)),
        **dict.fromkeys(("loss", "accuracy", "learningRate", "percentComplete"), NUMBER_TEXT),
        "estimatedTimeRemaining": st.text(max_size=64) | st.from_regex(r"\A[0-9]{1,40}[dhms] ?[0-9]{1,20}m\Z"),
        "lastUpdateTime": st.sampled_from(
            ["2026-11-15T11:59:30Z", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59Z"]
        ),
        "resumedFrom": st.none() | st.text(max_size=20),
        "checkpointing": st.fixed_dictionaries(
            {}, optional={"enabled": st.booleans(), "latestCheckpoint": st.text(max_size=30)}
        ),
    },
)


@settings(UNHURRIED, max_examples=300)
@given(FILES)
@example({"percentComplete": "inf"})
@example({"percentComplete": "-1e999"})
@example({"percentComplete": "nan"})
@example({"estimatedTimeRemaining": "9" * 60 + "d"})
@example({"loss": "1" * 64, "lastUpdateTime": "2026-11-15T11:59:30+01:00"})
def test_every_progress_file_that_is_accepted_makes_a_status_that_the_crd_accepts(file):
    try:
        progress = parse_progress(json.dumps(file).encode())
    except ValueError:
        return
    after, _ = look({}, "Running", progress, pod(running=True))
    shown = {key: value for key, value in after.items() if value is not None}
    assert complaints(shown, schema.TRAINING_PROGRESS) == []
    upstream = schema_of("trainjobs.trainer.kubeflow.org")["properties"]["status"]["properties"]["trainerStatus"]
    assert complaints(status.trainer_status(progress), upstream) == []


def test_upstreams_status_says_the_same():
    assert status.trainer_status(PROGRESS_NOW) == {
        "lastUpdatedTime": "2026-11-15T12:00:00Z",
        "progressPercentage": 50,
        "estimatedRemainingSeconds": 6300,
        "metrics": [
            {"name": "loss", "value": "0.4523"},
            {"name": "step", "value": "150"},
            {"name": "epoch", "value": "2"},
        ],
    }


# ---------------------------------------------------------------------- when a job is looked at


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def follower(clock):
    """Nothing is looked at here: only when it would be."""
    made = Controller(None, clock=clock)  # type: ignore[arg-type]
    made.leads = True
    return made


KEY = ("TrainJob", "default", "gpt")


def body(**more: Any) -> dict[str, Any]:
    thing = train_job({"interval": "5m"})
    thing["metadata"] |= {"uid": "uid-gpt", "generation": 1}
    return {**thing, **more}


def due(follower: Controller) -> Any:
    """The next job whose time has come."""

    async def ask() -> Any:
        follower._woken = asyncio.Event()  # of this event loop
        try:
            return await asyncio.wait_for(follower._next(), 0.05)
        except TimeoutError:
            return None

    return asyncio.run(ask())


def test_a_new_job_is_looked_at_half_a_second_later_and_once(follower, clock):
    follower.saw_job("TrainJob", "ADDED", body())
    follower.saw_job("TrainJob", "MODIFIED", body())
    clock.now += 0.4
    assert due(follower) is None
    clock.now += 0.2
    assert due(follower) is follower.jobs[KEY]
    assert due(follower) is None


def test_a_burst_of_events_does_not_put_off_the_look(follower, clock):
    follower.saw_job("TrainJob", "ADDED", body())
    for number in range(10):
        clock.now += 0.3
        follower.saw_pod("ADDED", pod(f"p{number}", running=True))
    assert due(follower) is follower.jobs[KEY]
    assert due(follower) is None


def test_an_event_during_a_look_that_takes_long_is_not_put_off_to_the_next_poll(follower, clock):
    follower.saw_job("TrainJob", "ADDED", body())
    clock.now += 1
    job = due(follower)
    job.busy = True
    follower.saw_pod("ADDED", pod(running=True))
    clock.now += 5  # all workers are at work: nobody asks for the next job
    job.busy = False
    follower._schedule(job, 60.0)
    assert due(follower) is job


def test_a_job_that_is_being_looked_at_is_not_given_to_a_second_worker(follower, clock):
    follower.saw_job("TrainJob", "ADDED", body())
    clock.now += 1
    job = due(follower)
    job.busy = True
    follower.saw_pod("ADDED", pod(running=True))
    clock.now += 1
    assert due(follower) is None
    job.busy = False
    clock.now += 1
    assert due(follower) is job


def test_an_earlier_time_wins_over_a_later_one_and_the_later_one_is_forgotten(follower, clock):
    follower.saw_job("TrainJob", "ADDED", body())
    clock.now += 1
    job = due(follower)
    follower._schedule(job, 60.0)
    follower._schedule(job, 15.0)
    follower._schedule(job, 30.0)
    clock.now += 15.5
    assert due(follower) is job
    clock.now += 100
    assert due(follower) is None


def test_what_the_controller_wrote_itself_is_no_reason_for_a_look(follower, clock):
    follower.saw_job("TrainJob", "ADDED", body())
    clock.now += 1
    due(follower)
    written = body(status={"trainingProgress": {"step": 5}, "trainerStatus": {}})
    written["metadata"]["annotations"] = {PROGRESS: "{}"}
    follower.saw_job("TrainJob", "MODIFIED", written)
    clock.now += 1
    assert due(follower) is None


@pytest.mark.parametrize(
    "change", [{"spec": {**body()["spec"], "suspend": True}}, told("Failed") | {"spec": body()["spec"]}]
)
def test_what_others_wrote_is(follower, clock, change):
    follower.saw_job("TrainJob", "ADDED", body())
    clock.now += 1
    due(follower)
    follower.saw_job("TrainJob", "MODIFIED", body(**change))
    clock.now += 1
    assert due(follower) is follower.jobs[KEY]


def test_a_replica_that_does_not_lead_keeps_one_entry_for_a_job_whatever_happens(follower, clock):
    follower.leads = False
    follower.saw_job("TrainJob", "ADDED", body())
    for number in range(100):
        clock.now += 20
        follower.saw_pod("ADDED", pod(f"p{number}", running=True))
        follower.saw_pod("DELETED", pod(f"p{number}", exit_code=143))
    assert len(follower._queue) == 1
    assert follower.jobs[KEY].pods == {}


def test_how_a_pod_ended_is_kept_until_the_leader_has_looked(follower):
    follower.saw_job("TrainJob", "ADDED", body())
    follower.saw_pod("ADDED", pod(running=True))
    follower.saw_pod("DELETED", pod(exit_code=143))
    assert len(follower.jobs[KEY].pods) == len(follower.jobs[KEY].gone) == 1


def test_a_job_that_was_deleted_is_forgotten_with_its_last_pod(follower, clock):
    follower.saw_job("TrainJob", "ADDED", body())
    follower.saw_pod("ADDED", pod(running=True))
    follower.saw_job("TrainJob", "DELETED", body())
    follower.saw_pod("MODIFIED", pod(running=True, deleted=True))
    follower.saw_pod("DELETED", pod(exit_code=143, deleted=True))
    assert follower.jobs == {}
    clock.now += 100
    assert due(follower) is None


@pytest.mark.parametrize("late", ["ADDED", "DELETED"])
def test_a_job_of_the_same_name_is_followed_whichever_is_heard_of_first_its_birth_or_the_others_end(follower, late):
    old, new = body(), body()
    new["metadata"] = {**new["metadata"], "uid": "uid-new"}
    follower.saw_job("TrainJob", "ADDED", old)
    follower.jobs[KEY].claims_made = True
    events = [("DELETED", old), ("ADDED", new)]
    for event, thing in reversed(events) if late == "DELETED" else events:
        follower.saw_job("TrainJob", event, thing)
    assert follower.jobs[KEY].body["metadata"]["uid"] == "uid-new"
    assert not follower.jobs[KEY].claims_made
    follower.saw_job("TrainJob", "DELETED", new)
    assert KEY not in follower.jobs


@pytest.mark.parametrize("has_pods", [False, True])
def test_a_job_that_was_deleted_while_nobody_watched_is_forgotten(follower, clock, has_pods):
    class Cluster:
        async def event(self, *_: Any) -> None: ...

        async def read_file(self, *_: Any) -> bytes:
            raise PodReadError("gone")

        async def patch_status(self, *_: Any) -> None:
            raise ApiException(status=404, reason="Not Found")

    follower.cluster = Cluster()
    follower.saw_job("TrainJob", "ADDED", body())
    if has_pods:
        follower.saw_pod("ADDED", pod(running=True))
    clock.now += 1

    async def work() -> None:
        follower._woken = asyncio.Event()  # of this event loop
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(follower._work(), 0.05)

    asyncio.run(work())
    assert follower.jobs[KEY].body is not None  # once may be a mistake
    clock.now += 60
    asyncio.run(work())
    assert [job.body for job in follower.jobs.values()] == [None] * has_pods
    follower.saw_job("TrainJob", "MODIFIED", body())
    assert follower.jobs[KEY].body is not None


def test_pods_that_are_seen_before_their_job_are_not_forgotten(follower, clock):
    follower.saw_pod("ADDED", pod(running=True))
    follower.saw_job("TrainJob", "ADDED", body())
    assert list(follower.jobs[KEY].pods) == ["uid-gpt-node-0-0"]


def test_a_bad_annotation_that_nobody_refused_does_not_hide_how_the_job_goes_on(follower):
    meta = {"name": "gpt", "namespace": "default", "uid": "u", "annotations": ASKS}
    follower.saw_job("Job", "ADDED", {**job(ASKS), "metadata": meta})
    bad = {**job(ASKS), **told("Failed"), "metadata": {**meta, "annotations": {CHECKPOINTING: '{"interval": "soon"}'}}}
    follower.saw_job("Job", "MODIFIED", bad)
    known = follower.jobs[("Job", "default", "gpt")]
    assert status.phase_of(known.body, [], "Running")[0] == "Failed"
    assert known.asked is not None


def test_what_was_shown_survives_a_crd_that_lacks_the_field_for_a_while(follower):
    follower.cluster = files = _Files()
    follower.saw_job("TrainJob", "ADDED", body())
    follower.saw_pod("ADDED", pod(running=True))
    files.files = {"gpt-node-0-0": {**_told(8), "resumedFrom": "checkpoint-4"}}
    look_at = follower.jobs[KEY]
    asyncio.run(follower._look(look_at))
    assert (files.shown["recoveries"], files.shown["step"]) == (1, 8)
    files.shown = {}
    follower.saw_job("TrainJob", "MODIFIED", body())  # as it is read then
    asyncio.run(follower._look(look_at))
    assert files.shown == {}  # nothing is new
    follower.show_again()
    asyncio.run(follower._look(look_at))
    assert (files.shown["recoveries"], files.shown["step"]) == (1, 8)


def test_a_job_that_does_not_ask_any_more_is_not_followed(follower):
    asking = {**job(ASKS), "metadata": {"name": "gpt", "namespace": "default", "annotations": ASKS}}
    follower.saw_job("Job", "ADDED", asking)
    assert follower.jobs[("Job", "default", "gpt")].body is not None
    follower.saw_job("Job", "MODIFIED", {**asking, "metadata": {"name": "gpt", "namespace": "default"}})
    assert follower.jobs[("Job", "default", "gpt")].body is None


@pytest.mark.parametrize("owner", ["TrainJob", "JobSet"])
def test_what_a_job_that_is_followed_has_made_is_not_followed_too(follower, owner):
    thing = job_set(ASKS)
    thing["metadata"]["ownerReferences"] = [{"kind": owner, "name": "gpt"}]
    follower.saw_job("JobSet", "ADDED", thing)
    assert follower.jobs == {}


def test_a_job_whose_block_is_not_accepted_does_not_stop_the_others(follower):
    follower.saw_job("TrainJob", "ADDED", {**body(), "spec": {"checkpointing": {"interval": "soon"}}})
    follower.saw_job("TrainJob", "ADDED", body())
    assert list(follower.jobs) == [KEY]


def test_pods_of_others_are_not_ours(follower):
    for labels in (None, {}, {"app": "x"}, {MANAGED: "claim"}, {MANAGED: "TrainJob"}, {MANAGED: "RayJob"}):
        stranger = pod()
        stranger["metadata"]["labels"] = labels
        follower.saw_pod("ADDED", stranger)
    assert follower.jobs == {}


def test_a_claim_that_is_refused_is_told_once_and_keeps_nobody_from_looking_at_the_job(follower):
    said: list[str] = []

    class Refuses:
        async def make_claim(self, *_: Any) -> bool:
            raise ApiException(status=403, reason="Forbidden")

        async def event(self, _thing: Any, _kind: str, reason: str, message: str, *_: Any) -> None:
            said.append(f"{reason}: {message}")

        async def patch_status(self, *arguments: Any) -> None:
            said.append(arguments[-1]["trainingProgress"]["phase"])

    volume = {"claimName": "new", "mountPath": "/new", "size": "1Gi"}
    asks = train_job({"storage": {"persistentVolume": volume}})
    follower.cluster = Refuses()
    follower.saw_job("TrainJob", "ADDED", {**asks, "metadata": body()["metadata"]})
    for _ in range(2):
        asyncio.run(follower._look(follower.jobs[KEY]))
    claims = [one for one in said if one.startswith("ClaimFailed")]
    assert claims == ["ClaimFailed: Cannot make the claim new: 403 Forbidden"]
    assert "Pending" in said


def test_a_jobset_that_was_made_without_the_webhook_is_told_of(follower):
    said: list[str] = []

    class Cluster:
        async def event(self, _thing: Any, _kind: str, reason: str, *_: Any) -> None:
            said.append(reason)

        async def patch_status(self, *_: Any) -> None: ...

    follower.cluster = Cluster()
    follower.saw_job("TrainJob", "ADDED", body())
    made = job_set({})
    made["metadata"]["ownerReferences"] = [{"kind": "TrainJob"}]
    for thing in (
        jobset.secured_jobset({**made, "metadata": {**made["metadata"], "annotations": FROM_TRAINJOB}}),
        made,
        made,
    ):
        follower.saw_job("JobSet", "ADDED", thing)
        asyncio.run(follower._look(follower.jobs[KEY]))
        said.append("looked")
    assert said == ["Created", "looked", "NotProtected", "looked", "looked"]


@pytest.mark.parametrize("made_by", ["webhook", "nobody"])
def test_it_is_told_of_whichever_is_seen_first_with_what_to_delete(follower, made_by):
    said: list[str] = []

    class Cluster:
        async def event(self, _thing: Any, _kind: str, reason: str, message: str, *_: Any) -> None:
            said.append(f"{reason} {message}")

        async def patch_status(self, *_: Any) -> None: ...

    follower.cluster = Cluster()
    made = job_set({})
    made["metadata"]["ownerReferences"] = [{"kind": "TrainJob"}]
    follower.saw_job("JobSet", "ADDED", made)
    thing = body()
    follower.saw_job("TrainJob", "ADDED", trainjob.secured(thing) if made_by == "webhook" else thing)
    asyncio.run(follower._look(follower.jobs[KEY]))
    (told_of,) = [one for one in said if one.startswith("NotProtected")]
    what = "JobSet" if made_by == "webhook" else "TrainJob"
    assert f"not reached when the {what} was made" in told_of
    assert f"Delete the {what}" in told_of


def test_pods_of_an_earlier_job_of_the_same_name_say_nothing_of_this_one(follower):
    shown: list[dict[str, Any]] = []

    class Cluster:
        async def event(self, *_: Any) -> None: ...

        async def patch_status(self, *arguments: Any) -> None:
            shown.append(arguments[-1]["trainingProgress"])

    follower.cluster = Cluster()
    thing = body()
    thing["metadata"]["creationTimestamp"] = (NOW + timedelta(seconds=200)).strftime("%Y-%m-%dT%H:%M:%SZ")
    follower.saw_job("TrainJob", "ADDED", thing)
    follower.saw_pod("ADDED", _ended("old", _told(8)))
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert shown[0]["phase"] == "Pending"
    assert "step" not in shown[0]


def test_an_event_has_one_name_however_often_it_is_told():
    names: list[str] = []

    class Cluster:
        async def event(self, *arguments: Any) -> None:
            names.append(arguments[-1])

    controller = Controller(Cluster())  # type: ignore[arg-type]
    saved = status.Happened("Normal", "CheckpointCommitted", "Checkpoint committed: x")
    for before in ({"step": 1}, {"step": 1}, {"step": 2}):
        asyncio.run(controller._tell(body(), saved, before))
    assert names[0] == names[1] != names[2]


def test_pods_that_vanished_while_nobody_watched_are_seen_to_be_gone_at_the_next_list(clock):
    class Lists:
        async def pods(self):
            yield "LISTED", {"items": [pod("a", running=True), pod("b", running=True, index="1")]}
            yield "LISTED", {"items": [pod("b", running=True, index="1")]}
            raise asyncio.CancelledError

    follower = Controller(Lists(), clock=clock)  # type: ignore[arg-type]
    follower.leads = True
    follower.saw_job("TrainJob", "ADDED", body())
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(follower.watch_pods())
    assert follower.jobs[KEY].gone == {"uid-a"}


def test_what_an_operator_with_other_values_showed_counts_until_there_is_something_newer():
    status, annotation = {"step": 1, "recoveries": 0}, {"step": 2, "recoveries": 0}
    thing = {"metadata": {"annotations": {}}, "status": {"trainingProgress": status}}
    assert controller.shown(thing, in_status=True) == controller.shown(thing, in_status=False) == status
    thing["metadata"]["annotations"][PROGRESS] = json.dumps(annotation)
    assert controller.shown(thing, in_status=True) == status
    assert controller.shown(thing, in_status=False) == annotation


def test_what_was_shown_is_found_again_in_the_annotation():
    after, _ = look({}, "Running", PROGRESS_NOW, pod(running=True))
    thing = job(ASKS)
    thing["metadata"]["annotations"] = {PROGRESS: json.dumps(after)}
    assert controller.shown(thing, in_status=False) == after


class _Files:
    """A cluster whose pods have these files."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Any]] = {}
        self.shown: dict[str, Any] = {}

    async def read_file(self, _namespace: str, pod: str, *_: str) -> bytes:
        if pod not in self.files:
            raise PodReadError(f"no file in {pod}")
        return json.dumps(self.files[pod]).encode()

    async def event(self, *_: Any) -> None: ...

    async def patch_status(self, *arguments: Any) -> None:
        self.shown |= arguments[-1]["trainingProgress"]


def _told(step: int) -> dict[str, Any]:
    """A minute ago, and each step a second after the one before it."""
    at = datetime.now(UTC) + timedelta(seconds=step - 60)
    return {"step": step, "lastUpdateTime": at.isoformat()}


def _ended(name: str, progress: dict[str, Any], **more: Any) -> dict[str, Any]:
    """As the kubelet shows a pod whose container has left this."""
    one = pod(name, exit_code=143, **more)
    one["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = json.dumps(progress)
    return one


@pytest.fixture
def files(follower):
    follower.cluster = _Files()
    follower.saw_job("TrainJob", "ADDED", body())
    return follower.cluster


@pytest.mark.parametrize("event", ["MODIFIED", "DELETED"])
@pytest.mark.parametrize("leads", [True, False], ids=["leader", "replica that leads next"])
def test_what_rank_0_has_left_is_shown_though_another_rank_still_runs_and_has_no_file(follower, files, event, leads):
    follower.leads = leads
    follower.saw_pod("ADDED", pod("a", running=True))
    follower.saw_pod("ADDED", pod("b", running=True, index="1"))
    follower.saw_pod(event, _ended("a", _told(8)))
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert files.shown["step"] == 8


def test_what_the_rank_that_ended_last_has_left_counts(follower, files):
    for name, step, index in (("a", 7, "0"), ("b", 8, "1"), ("c", 6, "2")):
        follower.saw_pod("ADDED", _ended(name, _told(step), index=index))
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert files.shown["step"] == 8


def test_what_a_pod_has_left_is_no_news_once_its_successor_has_told_more(follower, files):
    files.files = {"new": _told(12)}
    follower.saw_pod("ADDED", pod("new", running=True))
    asyncio.run(follower._look(follower.jobs[KEY]))
    files.files = {}
    follower.saw_pod("ADDED", _ended("old", _told(8)))
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert files.shown["step"] == 12
    assert files.shown["conditions"][1]["message"] == "no file in new"


def test_what_a_pod_has_left_does_not_hide_for_long_that_its_successor_tells_nothing(follower, files):
    follower.saw_pod("ADDED", _ended("old", _told(8)))
    follower.saw_pod("ADDED", pod("new", running=True, made_s=60))
    for seen in ("True", "False"):
        asyncio.run(follower._look(follower.jobs[KEY]))
        assert files.shown["conditions"][1]["status"] == seen


class _Containers(_Files):
    """A cluster whose pods have files by path, or do not answer."""

    def __init__(self, files: dict[tuple[str, str], bytes]) -> None:
        super().__init__()
        self.by_path = files
        self.silent: set[str] = set()
        self.asked: list[tuple[str, str]] = []

    async def read_file(self, _namespace: str, pod: str, _container: str, path: str = "") -> bytes:
        self.asked.append((pod, path))
        if pod in self.silent:
            raise PodSilentError(f"exec into pod {pod} failed: no answer within 10 s")
        if (pod, path) not in self.by_path:
            raise FileNotReadError(f"{path} in pod {pod} cannot be read: No such file or directory")
        return self.by_path[pod, path]


FILE, LOG = "/workspace/training_progress.json", "/dev/termination-log"


def logging_pod(name: str, index: str) -> dict[str, Any]:
    one = pod(name, running=True, index=index)
    one["spec"]["containers"][0]["env"] = parse({}).variables()
    return one


def test_what_a_container_that_cannot_write_the_file_leaves_in_its_termination_log_is_shown(follower):
    log = json.dumps(_told(8)).encode()
    follower.cluster = files = _Containers({("a", LOG): log})
    follower.saw_job("TrainJob", "ADDED", body())
    follower.saw_pod("ADDED", logging_pod("a", "0"))
    follower.saw_pod("ADDED", logging_pod("b", "1"))
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert files.shown["step"] == 8
    assert files.asked == [("a", FILE), ("a", LOG)]  # rank 0 first, and nobody else then
    files.by_path["a", LOG] = json.dumps(_told(9)).encode()
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert files.shown["step"] == 9
    assert files.asked[2:] == [("a", LOG)]  # where it was found before


def test_a_termination_log_with_nothing_in_it_leaves_the_word_to_the_file_that_is_missing(follower):
    follower.cluster = files = _Containers({("a", LOG): b""})
    follower.saw_job("TrainJob", "ADDED", body())
    follower.saw_pod("ADDED", logging_pod("a", "0"))
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert files.shown["conditions"][1]["message"] == f"{FILE} in pod a cannot be read: No such file or directory"


def test_a_pod_that_does_not_answer_is_not_asked_again_for_a_minute_and_the_others_are(follower, clock):
    follower.cluster = files = _Containers({("b", FILE): json.dumps(_told(8)).encode()})
    files.silent = {"a"}
    follower.saw_job("TrainJob", "ADDED", body())
    follower.saw_pod("ADDED", logging_pod("a", "0"))
    for _ in range(2):
        asyncio.run(follower._look(follower.jobs[KEY]))
        assert files.shown["conditions"][1]["message"] == "exec into pod a failed: no answer within 10 s"
    assert files.asked == [("a", FILE)]
    follower.saw_pod("ADDED", logging_pod("b", "1"))
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert files.shown["step"] == 8
    assert files.asked[1:] == [("b", FILE)]
    clock.now += 61
    files.silent, files.by_path = set(), {("a", FILE): json.dumps(_told(9)).encode()}
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert files.shown["step"] == 9


def test_what_an_operator_with_other_values_showed_in_the_status_is_taken_out_once(clock):
    patches: list[Any] = []
    annotations: dict[str, str] = {}

    class Cluster:
        async def event(self, *_: Any) -> None: ...

        async def annotate(self, _path: str, _thing: Any, more: dict[str, str]) -> None:
            annotations.update(more)

        async def patch_status(self, *arguments: Any) -> None:
            patches.append(arguments[-1])

    follower = Controller(Cluster(), touch_crd=False, clock=clock)  # type: ignore[arg-type]
    shown, _ = look({}, "Complete", PROGRESS_NOW)
    remaining = {"trainerStatus": {"estimatedRemainingSeconds": 60, "progressPercentage": 100}}
    thing = {**body(), "status": {**told("Complete")["status"], "trainingProgress": shown, **remaining}}
    follower.saw_job("TrainJob", "ADDED", thing)
    for _ in range(2):
        asyncio.run(follower._look(follower.jobs[KEY]))
    assert len(patches) == 1
    assert patches[0]["trainingProgress"] is None
    assert patches[0]["trainerStatus"]["estimatedRemainingSeconds"] is None
    assert json.loads(annotations[PROGRESS])["step"] == 150


def test_rank_0_is_asked_first_and_of_two_in_its_place_the_newer():
    pods = [pod("c", index="10"), pod("b", index="2"), pod("old", made_s=0), pod("new", made_s=60)]
    assert [one["metadata"]["name"] for one in sorted(pods, key=controller._order)] == ["new", "old", "b", "c"]


@pytest.mark.parametrize(
    ("env", "file"),
    [
        ([], "/workspace/training_progress.json"),
        ([{"name": "TRAINING_PROGRESS_FILE", "value": "/a"}], "/a"),
        ([{"name": "TRAINING_PROGRESS_FILE", "value": "/a"}, {"name": "HOLDFAST_PROGRESS_FILE", "value": "/b"}], "/b"),
        ([{"name": "TRAINING_PROGRESS_FILE", "valueFrom": {}}], "/workspace/training_progress.json"),
    ],
)
def test_the_file_is_read_that_the_training_writes(env, file):
    one = pod(running=True)
    one["spec"]["containers"][0]["env"] = env
    assert controller._file(one, parse({})) == file


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "null", "[]", "5", '"x"', "[" * 100_000),
        *('{"recoveries": "x"}', '{"recoveries": null}', '{"checkpointing": 5}', '{"checkpointing": null}'),
        *('{"conditions": 5}', '{"conditions": null}', '{"conditions": [5]}', '{"conditions": [{"type": "Running"}]}'),
    ],
    ids=lambda text: text[:40],
)
def test_an_annotation_with_the_progress_that_is_not_ours_is_as_good_as_none(text):
    thing = job(ASKS)
    thing["metadata"]["annotations"] = {PROGRESS: text}
    assert controller.shown(thing, in_status=False) == {}
