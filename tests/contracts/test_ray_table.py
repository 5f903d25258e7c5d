"""Ray Train: whatever name is missing, nothing is touched; training that cannot be protected says so, or is refused."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray.train

from holdfast.adapters import registry
from holdfast.adapters.ray.patches import RAY, TABLES
from holdfast.errors import HoldfastError
from tests.contracts.ray_scenario import GONE, total_of
from tests.contracts.tables import alone, differences, snapshot, warnings_of_holdfast, without

HERE = Path(__file__).parent
ON = {"RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "1", "HOLDFAST_ENABLED": "1"}


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ON.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_TRAIN_CALLBACKS", raising=False)


def tells(text: str, target: str) -> bool:
    """Whether the text names the missing target, the installed version and the tested range."""
    _, _, rest = text.partition(f"ray {RAY.version()} lacks ")
    missing, _, tested = rest.partition("; tested with ")
    missed = target.removesuffix(".__init__")
    named = any(one == target or one.startswith(f"{missed}.") for one in missing.split(", "))
    return named and tested.startswith(f"ray {RAY.oldest} to {RAY.newest}")


def each_name_missing() -> Any:
    before = snapshot(TABLES)
    told = {}
    for target in RAY.required:
        with warnings_of_holdfast() as heard, without(target):
            registry.install("ray", ray.train)
        told[target] = [heard, differences(before, snapshot(TABLES)), os.environ.get("RAY_TRAIN_CALLBACKS")]
    return told


def test_whichever_name_is_missing_nothing_is_touched_and_one_warning_says_what_is_gone() -> None:
    told = alone(each_name_missing)
    assert set(told) == set(RAY.required)
    for target, (heard, changed, callbacks) in told.items():
        assert len(heard) == 1, target
        assert tells(heard[0], target), heard
        assert changed == [], target
        assert callbacks is None, target


def applied_and_undone() -> Any:
    before, signature = snapshot(TABLES), str(inspect.signature(ray.train.RunConfig))
    registry.install("ray", ray.train)
    registry.install("ray", ray.train)
    inside = differences(before, snapshot(TABLES))
    same = signature == str(inspect.signature(ray.train.RunConfig))
    RAY.undo()
    return inside, same, differences(before, snapshot(TABLES)), hasattr(ray.train, "JITCheckpointConfig")


def test_applied_and_taken_back_everything_is_as_before() -> None:
    inside, same, left, there = alone(applied_and_undone)
    assert inside == ["ray.train.v2.api.config:RunConfig.__init__", "ray.train:JITCheckpointConfig"]
    assert same
    assert left == []
    assert not there


def test_a_callback_that_is_named_by_hand_says_what_ray_lacks() -> None:
    from holdfast.adapters.ray.callback import JITCheckpointCallback

    with without(GONE), pytest.raises(HoldfastError) as error:
        JITCheckpointCallback()
    assert tells(str(error.value), GONE)


def scenario(folder: Path, way: str) -> dict[str, Any]:
    ours = ("HOLDFAST_", "RAY_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.contracts.ray_scenario", str(folder), way],
        env={
            **environ,
            "PYTHONPATH": str(HERE.parents[1]),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.slow
@pytest.mark.core(0)
def test_without_a_name_it_trains_as_without_holdfast_and_nothing_is_saved(tmp_path: Path) -> None:
    told = scenario(tmp_path, "1")
    assert told["total"] == total_of(5)
    assert told["callbacks"] is None
    (warning,) = told["warnings"]
    assert tells(warning, GONE)
    assert (tmp_path / "run").exists()
    assert not (tmp_path / "run/holdfast").exists()


def test_with_require_it_is_refused_before_a_worker_is_started(tmp_path: Path) -> None:
    told = scenario(tmp_path, "require")
    assert tells(told["refused"], GONE)
    assert "HOLDFAST_ENABLED=require" in told["refused"]
    assert told["callbacks"] is None
    assert list(tmp_path.iterdir()) == []
