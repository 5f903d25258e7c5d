"""The same promises where the checkpoints go to an object store: a real S3 server on loopback."""

from __future__ import annotations

import pytest

from tests.jobs.torch import drill
from tests.jobs.torch.checks import uninterrupted
from tests.kit.checks import assert_whole


@pytest.fixture
def spec(s3_uri, s3_variables, tmp_path):
    environment = {**s3_variables, "XDG_STATE_HOME": str(tmp_path / "state")}

    def make(world, **more):
        settings = {"dir": s3_uri, "grace_period": 20.0, **more.pop("settings", {})}
        return drill.Spec(str(tmp_path / "run"), world, settings=settings, env=environment, **more)

    return make


@pytest.mark.parametrize("world", [1, 2])
def test_sigterm_loses_nothing_and_resume_is_exact(server, spec, s3_uri, world):
    faults = [{"rank": world - 1, "step": 9, "phase": "backward"}]
    outcome = server.run(spec(world, save_every="4 steps", faults=faults))
    assert set(outcome.codes) == {143}, outcome.log
    newest = assert_whole(s3_uri)
    assert newest.step >= 9
    resumed = server.run(spec(world))
    assert resumed.codes == [0] * world, resumed.log
    assert resumed.results[0]["first"] == newest.step
    assert resumed.digest == uninterrupted(server, spec(world)).digest


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_rescued(server, spec, s3_uri, rank):
    faults = [{"rank": rank, "step": 9, "phase": "forward", "action": "KILL"}]
    outcome = server.run(spec(2, faults=faults))
    assert outcome.codes[rank] == -9
    newest = assert_whole(s3_uri)
    assert (newest.step, newest.manifest.inexact) == (8, ())
    resumed = server.run(spec(2))
    assert resumed.codes == [0, 0], resumed.log
    assert resumed.digest == uninterrupted(server, spec(2)).digest


def test_incremental_saves_refer_to_what_is_there_and_retention_keeps_it(server, spec, s3_uri):
    shape = {"frozen": True, "save_every": "10 steps", "settings": {"save_type": "incremental", "keep": 2}}
    server.run(spec(1, faults=[{"rank": 0, "step": 45, "phase": "forward"}], **shape))
    newest = assert_whole(s3_uri)
    frozen = next(entry for entry in newest.manifest.files if entry.path.startswith("model-00001"))
    assert frozen.ref == f"checkpoint-10/{frozen.path}"
    resumed = server.run(spec(1, **shape))
    assert resumed.codes == [0], resumed.log
    assert resumed.digest == uninterrupted(server, spec(1, frozen=True)).digest


def test_sharded_state_is_fetched_and_resharded(server, spec, s3_uri):
    outcome = server.run(spec(2, fsdp=True, faults=[{"rank": 1, "step": 9, "phase": "forward"}]))
    assert outcome.codes == [143, 143], outcome.log
    assert assert_whole(s3_uri).step >= 9, outcome.log
    resumed = server.run(spec(1, fsdp=True))
    assert resumed.codes == [0], resumed.log
    assert resumed.results[0]["first"] >= 9
