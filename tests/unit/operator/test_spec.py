"""The checkpointing block: what is accepted, what it means, and in which words it is refused."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.config import parse_every
from holdfast.operator import schema
from holdfast.operator.names import CHECKPOINTING
from holdfast.operator.spec import SpecError, from_annotations, parse
from tests.unit.operator.crds import complaints
from tests.unit.operator.objects import FULL, PLACE, values
from tests.unit.operator.strategies import UNHURRIED


def block(path: str, value: Any) -> dict[str, Any]:
    """A whole block with one field set: ``storage.uri``."""
    whole = copy.deepcopy(FULL)
    *folders, name = path.split(".")
    inner = whole
    for folder in folders:
        inner = inner[folder]
    inner[name] = value
    return whole


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
