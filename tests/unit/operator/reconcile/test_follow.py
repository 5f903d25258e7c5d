"""Which jobs and pods are followed, and until when."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import Any

import pytest
from kubernetes_asyncio.client.exceptions import ApiException

from holdfast.operator.cluster import PodReadError
from holdfast.operator.names import CHECKPOINTING, MANAGED
from holdfast.operator.reconcile import status
from holdfast.operator.reconcile.controller import Controller
from tests.unit.operator.clusters import due
from tests.unit.operator.objects import ASKS, KEY, NOW, body, ended_pod, job, job_set, pod, step_told, told


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
    follower.saw_pod("ADDED", ended_pod("old", step_told(8)))
    asyncio.run(follower._look(follower.jobs[KEY]))
    assert shown[0]["phase"] == "Pending"
    assert "step" not in shown[0]


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
