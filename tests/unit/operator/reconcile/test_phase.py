"""The phase of a job, concluded from the job and its pods."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast.operator.reconcile import status
from tests.unit.operator.objects import NOW, pod, told


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
