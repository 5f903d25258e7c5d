"""When a job is looked at."""

from __future__ import annotations

import pytest

from holdfast.operator.names import PROGRESS
from tests.unit.operator.clusters import due
from tests.unit.operator.objects import KEY, body, pod, told


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
