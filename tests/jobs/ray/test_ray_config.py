"""What the driver decides before a worker is started: on or off, with which settings, or a clear error."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import warnings

import pytest

ray = pytest.importorskip("ray")

import ray.train  # noqa: E402, F811

import holdfast.adapters.ray.callback as adapter  # noqa: E402
from holdfast.adapters.ray.drain import DrainSource  # noqa: E402
from holdfast.errors import ConfigError, HoldfastError  # noqa: E402
from holdfast.notice import Notice  # noqa: E402
from holdfast.ray import JITCheckpointCallback, JITCheckpointConfig, RunConfig  # noqa: E402

ENABLED, WAIT = "RAY_TRAIN_JIT_CHECKPOINT_ENABLED", "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENABLED, WAIT, "HOLDFAST_ENABLED", "HOLDFAST_KILL_WAIT", "HOLDFAST_DIR"):
        monkeypatch.delenv(name, raising=False)


def config(**fields: object) -> JITCheckpointConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return JITCheckpointConfig(**fields)


@pytest.mark.parametrize(
    ("environ", "enabled", "expected"),
    [
        ({}, None, True),
        ({}, False, False),
        ({}, True, True),
        ({ENABLED: "TRUE"}, False, True),
        ({ENABLED: "0"}, True, False),
        ({"HOLDFAST_ENABLED": "1"}, False, True),
        ({"HOLDFAST_ENABLED": "1", ENABLED: "false"}, True, False),
        ({"HOLDFAST_ENABLED": "0", ENABLED: "1"}, True, False),
    ],
)
def test_a_variable_that_is_set_wins_over_the_config(
    environ: dict[str, str], enabled: bool | None, expected: bool
) -> None:
    given = None if enabled is None else config(enabled=enabled)
    assert adapter.is_enabled(environ, given) is expected


def test_the_config_is_deprecated_but_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(DeprecationWarning, match=ENABLED):
        given = JITCheckpointConfig(enabled=True, kill_wait=5.0)
    run_config = ray.train.RunConfig(name="x", jit_checkpoint_config=given)
    (callback,) = run_config.callbacks
    assert isinstance(callback, JITCheckpointCallback)
    assert callback.variables == {"HOLDFAST_KILL_WAIT": "5.0"}
    assert pickle.loads(pickle.dumps(run_config)).callbacks[0].variables == callback.variables
    monkeypatch.setenv(WAIT, "7.5")
    (callback,) = RunConfig(jit_checkpoint_config=given).callbacks
    assert callback.variables == {WAIT: "7.5"}
    assert RunConfig(jit_checkpoint_config=config()).callbacks == []
    assert RunConfig is ray.train.RunConfig is ray.train.v2.api.config.RunConfig
    assert ray.train.JITCheckpointConfig is JITCheckpointConfig


DOCUMENTED = """
from ray.train import RunConfig
from ray.train._internal.jit_checkpoint_config import JITCheckpointConfig

config = JITCheckpointConfig(enabled=True, kill_wait=5.0)
print(config, len(RunConfig(jit_checkpoint_config=config).callbacks))
"""


@pytest.mark.parametrize(("enabled", "callbacks"), [("0", 0), ("", 1)])
def test_the_config_is_found_where_documents_import_it_from(enabled: str, callbacks: int) -> None:
    environ = {**os.environ, "HOLDFAST_ENABLED": enabled, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", DOCUMENTED], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout == f"JITCheckpointConfig(enabled=True, kill_wait=5.0) {callbacks}\n", done.stderr


def test_the_defaults_are_those_of_the_contract() -> None:
    assert (config().enabled, config().kill_wait) == (False, 3.0)


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [(ENABLED, "maybe", "1/true"), (WAIT, "soon", "seconds"), (WAIT, "-1", "0 seconds or more")],
)
def test_a_wrong_variable_is_an_error_on_the_driver_that_names_it(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, accepted: str
) -> None:
    """Through Ray's own way of building callbacks, which turns a ValueError into another message."""
    from ray.train.v2._internal.callbacks.env_callback import _initialize_env_callbacks

    monkeypatch.setenv("RAY_TRAIN_CALLBACKS", "holdfast.adapters.ray.callback.JITCheckpointCallback")
    monkeypatch.setenv(name, value)
    with pytest.raises(HoldfastError, match=f"{name}='{value}' .*{accepted}"):
        _initialize_env_callbacks()


def test_a_wrong_config_is_an_error_that_names_the_field() -> None:
    with pytest.raises(ConfigError, match=r"kill_wait=-2.0 is not accepted"):
        config(kill_wait=-2.0)
    with pytest.raises(ConfigError, match="jit_checkpoint_config=True is not accepted; it must be a JITCheckpoint"):
        RunConfig(jit_checkpoint_config=True)


def test_an_older_ray_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.57.1")
    with pytest.raises(HoldfastError, match=r"need Ray 2.58 or newer, and this is Ray 2.57.1"):
        JITCheckpointCallback()
    monkeypatch.setenv(ENABLED, "0")
    assert JITCheckpointCallback().variables is None
    monkeypatch.delenv(ENABLED)
    monkeypatch.setattr(ray, "__version__", "2.60.0")
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "0")
    with pytest.raises(HoldfastError, match="RAY_TRAIN_V2_ENABLED=0"):
        JITCheckpointCallback()


def test_relative_paths_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_DIR", "runs/a")
    monkeypatch.setenv("HOLDFAST_FALLBACK_DIR", "s3://bucket/a")
    variables = JITCheckpointCallback().variables
    assert variables == {"HOLDFAST_DIR": str(tmp_path / "runs/a"), "HOLDFAST_FALLBACK_DIR": "s3://bucket/a"}


def heard(source: DrainSource) -> Notice:
    notices: list[Notice] = []
    there = threading.Event()

    def deliver(notice: Notice) -> None:
        notices.append(notice)
        there.set()

    source.start(deliver)
    assert there.wait(20.0)
    source.stop()
    assert len(notices) == 1
    return notices[0]


def test_a_drain_is_one_notice_with_rays_deadline() -> None:
    deadline_ms = int((time.time() + 60.0) * 1000)
    notice = heard(DrainSource(lambda: deadline_ms, lambda: None, poll_s=0.01))
    assert (notice.source, notice.detail) == ("ray", "drain of the Ray node")
    assert notice.grace_s is not None
    assert 30.0 < notice.grace_s <= 60.0


def test_a_drain_without_a_deadline_leaves_it_to_the_settings() -> None:
    assert heard(DrainSource(lambda: 0, lambda: None, poll_s=0.01)).grace_s is None


def test_what_ray_train_has_heard_is_a_notice_too() -> None:
    assert heard(DrainSource(lambda: None, lambda: 0, poll_s=0.01)).detail == "preemption of Ray Train workers"


def test_a_head_node_that_does_not_answer_for_a_while_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([ConnectionError("gone"), ConnectionError("gone"), None, 0])

    def ask() -> int | None:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert heard(DrainSource(ask, lambda: None, poll_s=0.01)).detail == "drain of the Ray node"
    assert [record.message for record in caplog.records].count(
        "Ray does not tell whether this node is drained (gone); asking again"
    ) == 1
