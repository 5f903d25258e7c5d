"""Settings: where a value comes from, and what happens to a wrong one."""

from __future__ import annotations

import signal

import pytest

from holdfast.config import Every, Settings, settings_table
from holdfast.errors import ConfigError


def test_an_argument_wins_over_the_environment_and_the_environment_over_the_default():
    environ = {"HOLDFAST_KEEP": "7"}
    assert Settings.load({}).keep == 3
    assert Settings.load(environ).keep == 7
    assert Settings.load(environ, keep=9).keep == 9


def test_our_own_variable_wins_over_the_contracts_one():
    environ = {"HOLDFAST_DIR": "/ours", "CHECKPOINT_URI": "s3://theirs"}
    assert Settings.load(environ).dir == "/ours"
    assert Settings.load({"CHECKPOINT_URI": "s3://theirs"}).dir == "s3://theirs"


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "True", "yes", "on"])
def test_truth_in_any_case(text):
    assert Settings.load({"HOLDFAST_ENABLED": text}).enabled is True


@pytest.mark.parametrize("text", ["0", "false", "FALSE", "no", "off"])
def test_untruth_in_any_case(text):
    assert Settings.load({"HOLDFAST_ENABLED": text}).enabled is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500 steps", Every(steps=500)),
        ("1 step", Every(steps=1)),
        ("2 epochs", Every(epochs=2)),
        ("5m", Every(seconds=300)),
        ("1h30m", Every(seconds=5400)),
        ("250", Every(steps=250)),
        ("never", Every()),
    ],
)
def test_how_often_to_save(text, expected):
    assert Settings.load({"HOLDFAST_SAVE_EVERY": text}).save_every == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"CHECKPOINT_STRATEGY": "epoch"}, Every(epochs=1)),
        ({"CHECKPOINT_STRATEGY": "epoch", "CHECKPOINT_INTERVAL": "2"}, Every(epochs=2)),
        ({"CHECKPOINT_STRATEGY": "steps", "CHECKPOINT_INTERVAL": "100"}, Every(steps=100)),
        ({"CHECKPOINT_STRATEGY": "time", "CHECKPOINT_INTERVAL": "5m"}, Every(seconds=300)),
        ({"CHECKPOINT_STRATEGY": "time", "CHECKPOINT_INTERVAL": "90"}, Every(seconds=90)),
    ],
)
def test_the_strategy_says_what_the_interval_counts(environ, expected):
    assert Settings.load(environ).save_every == expected


def test_both_ray_variables_and_the_progress_variables_are_in_the_table():
    variables = {variable for setting in settings_table().values() for variable in setting.env}
    contract = {
        "RAY_TRAIN_JIT_CHECKPOINT_ENABLED",
        "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT",
        "TRAINING_PROGRESS_FILE",
        "CHECKPOINT_ENABLED",
        "CHECKPOINT_URI",
        "CHECKPOINT_STRATEGY",
        "CHECKPOINT_SAVE_TYPE",
        "PROGRESS_UPDATE_FREQUENCY",
        "HOLDFAST_ENABLED",
        "HOLDFAST_DIR",
        "HOLDFAST_GRACE_PERIOD",
    }
    assert contract <= variables


def test_signals_by_name_and_number():
    assert Settings.load({"HOLDFAST_SIGNALS": "TERM,SIGUSR1,2"}).signals == (
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGINT,
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HOLDFAST_ENABLED", "maybe"),
        ("RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT", "soon"),
        ("HOLDFAST_KILL_WAIT", "-1"),
        ("HOLDFAST_GRACE_PERIOD", "nan"),
        ("HOLDFAST_KEEP", "0"),
        ("HOLDFAST_KEEP", "three"),
        ("CHECKPOINT_SAVE_TYPE", "partial"),
        ("CHECKPOINT_STRATEGY", "hourly"),
        ("HOLDFAST_SAVE_EVERY", "0 steps"),
        ("HOLDFAST_SAVE_EVERY", "often"),
        ("HOLDFAST_SIGNALS", "KILL"),
        ("HOLDFAST_SIGNALS", "SEGV"),
        ("HOLDFAST_SIGNALS", "TERMINATE"),
        ("HOLDFAST_SIGNALS", "TERM,,INT"),
        ("HOLDFAST_SIGNALS", "99999"),
        ("HOLDFAST_CLOUD", "ibm"),
        ("PROGRESS_UPDATE_FREQUENCY", "0"),
    ],
)
def test_a_wrong_value_is_refused_with_the_variable_the_value_and_what_is_accepted(variable, value):
    with pytest.raises(ConfigError) as refused:
        Settings.load({variable: value})
    assert variable in str(refused.value)
    assert repr(value) in str(refused.value)
    assert "must be" in str(refused.value)


def test_an_unknown_setting_is_named():
    with pytest.raises(ConfigError, match="keeep"):
        Settings.load({}, keeep=3)


def test_an_empty_variable_is_as_good_as_none():
    assert Settings.load({"HOLDFAST_KEEP": ""}).keep == 3
