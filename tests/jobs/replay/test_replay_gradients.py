"""Scripts that look at gradients, or make them in ways of their own: a replay leads backward through all modules."""

from __future__ import annotations

import pytest

from tests.jobs.replay import drill
from tests.jobs.replay.checks import check, uninterrupted


@pytest.fixture(scope="module")
def plain():
    """Runs plain PyTorch scripts; see drill.py."""
    server = drill.Server()
    yield server
    server.close()


@pytest.mark.core(2)
@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("clamped", "step 13"),
        ("norms", "step 9"),
        ("fused", "step 8"),
        ("fused_rnn", "step 8"),
        ("penalty", "step 7"),
        ("features", "step 6"),
        ("hooked", "step 6"),
        ("leftover", "step 6"),
        ("recomputed", "step 6"),
        ("reentrant", "step 6"),
        ("scripted", "step 6"),
        ("traced", "step 6"),
        ("functional", "step 6"),
    ],
)
def test_a_script_that_looks_at_gradients_ends_with_the_same_bits(plain, tmp_path, kind, place):
    check(plain, drill.Spec(str(tmp_path / "run"), "plain_gradients", faults=[{"at": place}], options=[kind]))


@pytest.mark.core
@pytest.mark.parametrize("kind", ["module", "data", "bare", "foreach", "functional"])
def test_training_without_an_optimizer_is_reported_in_its_second_step(plain, tmp_path, kind):
    spec = drill.Spec(str(tmp_path / "run"), "plain_byhand", options=[kind])
    outcome = plain.run(spec)
    assert outcome.codes == [0], outcome.log
    assert outcome.printed == uninterrupted(plain, spec)
    assert outcome.log.count("this script trains without a torch.optim.Optimizer that steps") == 1


def test_backward_passes_that_train_nothing_are_left_alone(plain, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), "plain_byhand", env={"HOLDFAST_ENABLED": "require"}, options=["innocent"])
    outcome = plain.run(spec)
    assert outcome.codes == [0], outcome.log
    assert outcome.printed == uninterrupted(plain, spec)
    assert not outcome.log.strip()
