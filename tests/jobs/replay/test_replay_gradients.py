"""Scripts that look at gradients, or make them in ways of their own: a replay leads backward through all modules."""

from __future__ import annotations

import pytest

from tests.jobs.replay import drill
from tests.jobs.replay.checks import check


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
