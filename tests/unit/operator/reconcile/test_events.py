"""What is told in events."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kubernetes_asyncio.client.exceptions import ApiException

from holdfast.operator.admission import jobset, trainjob
from holdfast.operator.reconcile import status
from holdfast.operator.reconcile.controller import Controller
from tests.unit.operator.objects import FROM_TRAINJOB, KEY, body, job_set, train_job


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
