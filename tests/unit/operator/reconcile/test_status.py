"""The status and the events that follow from what is seen of a job."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.operator import schema
from holdfast.operator.names import PROGRESS
from holdfast.operator.reconcile import controller, status
from holdfast.operator.reconcile.controller import Controller
from holdfast.progress import parse_progress
from tests.unit.operator.crds import complaints, schema_of
from tests.unit.operator.objects import ASKS, KEY, PROGRESS_NOW, body, job, look, merged, pod, told
from tests.unit.operator.strategies import OBJECTS, UNHURRIED


@settings(UNHURRIED, max_examples=300)
@given(OBJECTS, OBJECTS)
def test_a_status_that_replaces_another_leaves_nothing_of_it(before, after):
    assert merged(before, controller._replacing(before, after)) == after


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
