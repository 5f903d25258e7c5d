"""Which pod's progress counts, and where it is read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from holdfast.operator.reconcile import controller
from holdfast.operator.spec import parse
from tests.unit.operator.clusters import Containers, Files
from tests.unit.operator.objects import KEY, body, ended_pod, pod, step_told


def test_what_was_shown_survives_a_crd_that_lacks_the_field_for_a_while(follower):
    follower.cluster = files = Files()
    follower.saw_job("TrainJob", "ADDED", body())
    follower.saw_pod("ADDED", pod(running=True))
    files.files = {"gpt-node-0-0": {**step_told(8), "resumedFrom": "checkpoint-4"}}
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


@pytest.mark.parametrize("event", ["MODIFIED", "DELETED"])
@pytest.mark.parametrize("leads", [True, False], ids=["leader", "replica that leads next"])
def test_what_rank_0_has_left_is_shown_though_another_rank_still_runs_and_has_no_file(follower, files, event, leads):
    follower.leads = leads
    follower.saw_pod("ADDED", pod("a", running=True))
    follower.saw_pod("ADDED", pod("b", running=True, index="1"))
    follower.saw_pod(event, ended_pod("a", step_told(8)))
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert files.shown["step"] == 8


def test_what_the_rank_that_ended_last_has_left_counts(follower, files):
    for name, step, index in (("a", 7, "0"), ("b", 8, "1"), ("c", 6, "2")):
        follower.saw_pod("ADDED", ended_pod(name, step_told(step), index=index))
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert files.shown["step"] == 8


def test_what_a_pod_has_left_is_no_news_once_its_successor_has_told_more(follower, files):
    files.files = {"new": step_told(12)}
    follower.saw_pod("ADDED", pod("new", running=True))
    asyncio.run(follower._look(follower.jobs[KEY]))
    files.files = {}
    follower.saw_pod("ADDED", ended_pod("old", step_told(8)))
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert files.shown["step"] == 12
    assert files.shown["conditions"][1]["message"] == "no file in new"


def test_what_a_pod_has_left_does_not_hide_for_long_that_its_successor_tells_nothing(follower, files):
    follower.saw_pod("ADDED", ended_pod("old", step_told(8)))
    follower.saw_pod("ADDED", pod("new", running=True, made_s=60))
    for seen in ("True", "False"):
        asyncio.run(follower._look(follower.jobs[KEY]))
        assert files.shown["conditions"][1]["status"] == seen


FILE, LOG = "/workspace/training_progress.json", "/dev/termination-log"


def logging_pod(name: str, index: str) -> dict[str, Any]:
    one = pod(name, running=True, index=index)
    one["spec"]["containers"][0]["env"] = parse({}).variables()
    return one


def test_what_a_container_that_cannot_write_the_file_leaves_in_its_termination_log_is_shown(follower):
    log = json.dumps(step_told(8)).encode()
    follower.cluster = files = Containers({("a", LOG): log})
    follower.saw_job("TrainJob", "ADDED", body())
    follower.saw_pod("ADDED", logging_pod("a", "0"))
    follower.saw_pod("ADDED", logging_pod("b", "1"))
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert files.shown["step"] == 8
    assert files.asked == [("a", FILE), ("a", LOG)]  # rank 0 first, and nobody else then
    files.by_path["a", LOG] = json.dumps(step_told(9)).encode()
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert files.shown["step"] == 9
    assert files.asked[2:] == [("a", LOG)]  # where it was found before


def test_a_termination_log_with_nothing_in_it_leaves_the_word_to_the_file_that_is_missing(follower):
    follower.cluster = files = Containers({("a", LOG): b""})
    follower.saw_job("TrainJob", "ADDED", body())
    follower.saw_pod("ADDED", logging_pod("a", "0"))
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert files.shown["conditions"][1]["message"] == f"{FILE} in pod a cannot be read: No such file or directory"


def test_a_pod_that_does_not_answer_is_not_asked_again_for_a_minute_and_the_others_are(follower, clock):
    follower.cluster = files = Containers({("b", FILE): json.dumps(step_told(8)).encode()})
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
    files.silent, files.by_path = set(), {("a", FILE): json.dumps(step_told(9)).encode()}
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert files.shown["step"] == 9


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
