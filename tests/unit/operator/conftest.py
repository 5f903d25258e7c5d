"""A controller that is called step by step."""

from __future__ import annotations

import pytest

from holdfast.operator.reconcile.controller import Controller
from tests.unit.operator.clusters import Clock, Files
from tests.unit.operator.objects import body


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def follower(clock):
    """Nothing is looked at here: only when it would be."""
    made = Controller(None, clock=clock)  # type: ignore[arg-type]
    made.leads = True
    return made


@pytest.fixture
def files(follower):
    follower.cluster = Files()
    follower.saw_job("TrainJob", "ADDED", body())
    return follower.cluster
