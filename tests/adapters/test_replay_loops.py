"""Unchanged scripts, stopped anywhere: no completed step is lost, and started again they end with the same bits."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import replay_drill as drill
from checks import assert_whole, last_completed_when_noticed

_known: dict[str, list[list[str]]] = {}


@pytest.fixture(scope="session")
def plain():
    """Runs plain PyTorch scripts; see replay_drill.py."""
    server = drill.Server()
    yield server
    server.close()


def uninterrupted(server: drill.Server, spec: drill.Spec) -> list[list[str]]:
    """What the script prints by itself, with holdfast off; run once for each kind."""
    key = repr((spec.script, spec.world, spec.env, spec.options))
    if key not in _known:
        folder = tempfile.mkdtemp(prefix="holdfast-plain-")
        outcome = server.run(spec.plain(dir=f"{folder}/run", env={**spec.env, "HOLDFAST_ENABLED": "0"}))
        assert outcome.codes == [0] * spec.world, outcome.log
        _known[key] = outcome.printed
    return _known[key]


def check(server: drill.Server, spec: drill.Spec, limit_s: float = 120.0) -> drill.Outcome:
    """Interrupt, look at what is left, start again without faults, and compare all that was printed."""
    expected = uninterrupted(server, spec.plain())
    first = server.run(spec, limit_s)
    assert set(first.codes) == {143}, first.log
    newest = assert_whole(spec.dir)
    assert newest.step >= last_completed_when_noticed(spec.dir), first.log
    assert not newest.manifest.inexact
    for before, now in zip(expected, first.printed, strict=True):
        assert before[: len(now)] == now
    global LAST
    again = LAST = server.run(spec.plain(), limit_s)
    assert again.codes == [0] * spec.world, again.log
    assert again.printed == expected, again.log
    assert assert_whole(spec.dir).manifest.complete
    return again


CASES = {
    "mnist": ("plain_mnist", ["epoch 2 batch 4", "backward 1", "optimizer 17", "after-optimizer 30", "test 1 batch 1",
                              "epoch 1 mean", "test 2 loss", "after-optimizer 39", "backward 39"]),
    "tricks": ("plain_tricks", ["step 7", "backward 30", "epoch 1", "after-optimizer 32"]),
    "getbatch": ("plain_getbatch", ["iteration 14 loss", "backward 9", "optimizer 7", "estimate 3", "after-optimizer 2"]),
    "gan": ("plain_gan", ["step 11", "backward 14", "epoch 1", "after-optimizer 9"]),
    "plateau": ("plain_plateau", ["epoch 4 batch 3", "epoch 5 loss", "backward 50"]),
    "accelerate": ("plain_accelerate", ["step 15", "evaluation 2", "backward 46"]),
}


@pytest.mark.parametrize(
    ("script", "place"),
    [pytest.param(script, place, id=f"{name}-{place}") for name, (script, places) in CASES.items() for place in places],
)
def test_one_process_that_is_stopped_anywhere_ends_with_the_same_bits(plain, tmp_path, script, place):
    check(plain, drill.Spec(str(tmp_path / "run"), script, faults=[{"at": place}]))
