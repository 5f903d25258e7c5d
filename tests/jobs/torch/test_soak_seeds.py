"""Jobs of the soak with fixed seeds: several random interruptions, and the end is that of an undisturbed run.

``python -m tests.soak`` draws other seeds each time; one that fails there is added here.
"""

from __future__ import annotations

import pytest

from tests.soak import Tally, one_job

SEEDS = [713863309, 500823664, 453185756, 434733852, 167741802, 86952833]
"""Ranks that are killed at the last step of an epoch, on either side of the evaluation that follows it."""


@pytest.mark.core(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_of_the_soak_ends_with_the_same_bits(server, tmp_path, seed):
    one_job(server, seed, str(tmp_path), Tally())
