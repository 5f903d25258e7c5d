"""A Trainer whose model is spread over the ranks. accelerate's own saves are made together, and committed at once."""

from __future__ import annotations

import pytest

from tests.jobs.transformers import drill
from tests.jobs.transformers.checks import (
    EVALUATE,
    assert_same,
    fault,
    interrupt_and_resume,
    steps_in,
    without_holdfast,
)
from tests.kit.checks import assert_whole

SCRIPT = str(drill.SCRIPTS / "transformers_fsdp.py")


@pytest.fixture
def server() -> drill.Server:
    return drill.shared()


def sharded(kind: str, **more) -> dict:
    config = {"fsdp_version": 2, "state_dict_type": kind, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
    return {"fsdp": "full_shard", "fsdp_config": config, "max_steps": 12, **more}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_sigterm_to_one_rank(server, tmp_path, kind):
    args = sharded(kind, save_strategy="steps", save_steps=3)
    spec = drill.Spec(str(tmp_path / "run"), world=2, script=SCRIPT, args=args, faults=[fault("forward", 8, 1)])
    interrupt_and_resume(server, spec)
    assert 6 in steps_in(spec.dir)


@pytest.mark.slow
def test_a_notice_in_an_evaluation_is_followed_after_it(server, tmp_path):
    args = sharded("SHARDED_STATE_DICT", **EVALUATE)
    spec = drill.Spec(str(tmp_path / "run"), world=2, script=SCRIPT, args=args, faults=[fault("evaluation", 6)])
    interrupt_and_resume(server, spec)


@pytest.mark.slow
def test_a_dead_ranks_shards_are_gone_and_the_last_periodic_save_is_used(server, tmp_path):
    args = sharded("SHARDED_STATE_DICT", save_strategy="steps", save_steps=3)
    faults = [fault("forward", 8, 1, action="KILL")]
    spec = drill.Spec(str(tmp_path / "run"), world=2, script=SCRIPT, args=args, faults=faults)
    outcome = server.run(spec)
    assert outcome.codes[1] == -9
    assert outcome.codes[0] in (1, 143), outcome.log
    assert assert_whole(spec.dir).step == 6
    assert_same(server.run(spec.plain()), without_holdfast(server, spec))


@pytest.mark.slow
def test_transformers_alone_goes_on_from_it(server, tmp_path):
    args = sharded("SHARDED_STATE_DICT")
    spec = drill.Spec(str(tmp_path / "run"), world=2, script=SCRIPT, args=args, faults=[fault("forward", 5, 1)])
    server.run(spec)
    resumed = server.run(spec.plain(env={"HOLDFAST_ENABLED": "0"}, options=["--resume", "last"]))
    assert resumed.codes == [0, 0], resumed.log
    assert resumed.result["digest"] == without_holdfast(server, spec).result["digest"]
