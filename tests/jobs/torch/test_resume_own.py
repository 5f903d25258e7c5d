"""Told to begin anew and not to go on from the checkpoints of others, a job still goes on from its own."""

from __future__ import annotations

import os

import pytest

from tests.jobs.torch import drill
from tests.jobs.torch.checks import uninterrupted
from tests.kit.checks import assert_whole


@pytest.fixture
def location(request, tmp_path):
    """Where the checkpoints go, and the variables that it takes."""
    if getattr(request, "param", "folder") == "folder":
        return str(tmp_path / "run"), {}
    uri, variables = request.getfixturevalue("s3_uri"), request.getfixturevalue("s3_variables")
    return uri, {**variables, "XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def job(server, location, tmp_path):
    """One start of a job with an id."""
    uri, environ = location

    def start(run_id, *, resume="own", **more):
        settings = {"dir": uri, "run_id": run_id, "resume": resume}
        return server.run(drill.Spec(str(tmp_path / "run"), 1, settings=settings, env=environ, **more))

    return start


STOP = [{"rank": 0, "step": 9, "phase": "backward"}]


@pytest.mark.parametrize("location", ["folder", "object store"], indirect=True)
def test_a_restart_goes_on_from_what_this_job_saved_and_another_job_does_not(server, job, location):
    uri, _ = location
    assert job("one", faults=STOP).codes == [143]
    newest = assert_whole(uri)
    resumed = job("one")
    assert resumed.results[0]["first"] == newest.step, resumed.log
    assert resumed.digest == uninterrupted(server, drill.Spec("", 1)).digest
    other = job("another")
    if "://" in uri:  # nothing can be moved there, and nothing is lost
        assert other.codes != [0]
        assert f"HOLDFAST_RESUME='own', but {uri} holds" in other.log
        assert "give another location" in other.log
        return
    assert other.results[0]["first"] == 0, other.log
    assert any(name.startswith("previous-") for name in os.listdir(uri))
    assert assert_whole(uri).manifest.run == "another"


def test_what_others_saved_meanwhile_is_set_aside_and_its_own_is_kept(job, location):
    uri, _ = location
    job("one", faults=STOP)
    own = assert_whole(uri)
    job("another", resume="auto", faults=[{"rank": 0, "step": 20, "phase": "backward"}])
    assert assert_whole(uri).manifest.run == "another"
    again = job("one")
    assert again.results[0]["first"] == own.step, again.log


def test_never_begins_anew_each_time_whatever_the_id(job):
    job("one", faults=STOP)
    assert job("one", resume="never").results[0]["first"] == 0


def test_its_own_can_only_be_known_by_an_id(job):
    refused = job(None)
    assert refused.codes != [0]
    assert "HOLDFAST_RESUME='own' needs HOLDFAST_RUN_ID" in refused.log
