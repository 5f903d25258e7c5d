"""Finds the run that Ray Train's workers on this machine belong to."""

from __future__ import annotations

import time

from holdfast.adapters.ray.marker import markers
from holdfast.base.clock import Deadline
from holdfast.errors import ConfigError
from holdfast.launch.control import NotLiveError
from holdfast.launch.runs import RunPlace, place_of

_LOOK_S = 0.2


def run_of_workers(name: str | None, limit: Deadline) -> RunPlace:
    """The run of this name, or location, with live workers here; waits for one until ``limit``."""
    while True:
        found = {marker.location: marker for marker in markers() if name in (None, marker.name, marker.location)}
        if len(found) > 1:
            several = ", ".join(f"{marker.name!r} in {location}" for location, marker in sorted(found.items()))
            raise ConfigError(f"workers of several runs are alive here: {several}; name one of them")
        if found:
            return place_of(next(iter(found)))
        if limit.passed():
            which = "Ray Train worker" if name is None else f"Ray Train worker of {name!r}"
            raise NotLiveError(
                f"no {which} is alive on this machine under holdfast; is RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1 set where "
                f"the training was started?"
            )
        time.sleep(_LOOK_S)
