"""Keras, tf-keras and TensorFlow: patched all or nothing; a fit that cannot be protected says so, or refuses."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.adapters.keras.patches import TENSORFLOW
from holdfast.base.patching import PROCESS, PatchSet
from tests.contracts.keras_scenarios import GONE, TABLE_OF, needed_by

HERE = Path(__file__).parent
NEEDED = ("keras", "tf_keras", "tensorflow")
pytestmark = [
    pytest.mark.parametrize("module", TABLE_OF),
    # Not imported here: it takes seconds.
    pytest.mark.skipif(not all(map(importlib.util.find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of all scenarios: TensorFlow takes seconds to import, once."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.contracts.keras_scenarios", str(tmp_path_factory.mktemp("keras"))],
        env={**env, "PYTHONPATH": str(HERE.parents[1]), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def is_the_warning(text: str, table: PatchSet, target: str) -> bool:
    what, _, rest = text.partition(" lacks ")
    missing, _, tested = rest.partition("; tested with ")
    return (
        what.endswith(f"training with it is not protected: {table.framework} {table.version()}")
        and target in missing.split(", ")
        and tested == f"{table.framework} {table.oldest} to {table.newest}"
    )


def test_whichever_name_is_missing_nothing_is_touched_and_one_warning_says_what_is_gone(
    results: dict[str, Any], module: str
) -> None:
    found = results[f"{module}: each name"]
    assert set(found) >= set(needed_by(module))
    for target, seen in found.items():
        assert seen["touched"] == [], target
        (line,) = seen["heard"]
        table = TENSORFLOW if target.startswith("tensorflow.") else TABLE_OF[module]
        assert is_the_warning(line, table, target), line


def test_what_is_applied_is_marked_once_and_undone_without_a_trace(results: dict[str, Any], module: str) -> None:
    found = results[f"{module}: undo"]
    patches = [*TABLE_OF[module].patches, *TENSORFLOW.patches]
    assert found["marked"] == sorted(patch.target for patch in patches if patch.scope == PROCESS)
    assert found["twice"] == found["left"] == []


@pytest.mark.parametrize("how", ["missing", "missing in tensorflow", "callback", "callback and variable"])
def test_a_fit_that_cannot_be_protected_ends_as_without_holdfast_and_one_warning_says_why(
    results: dict[str, Any], module: str, how: str
) -> None:
    alone, found = results[f"{module}: without holdfast"], results[f"{module}: {how}"]
    assert (alone["steps"], alone["refused"], alone["heard"]) == (8, None, [])
    assert {**found, "heard": []} == alone
    assert found["files"] == []
    table, gone = (TENSORFLOW, GONE["tensorflow"]) if "tensorflow" in how else (TABLE_OF[module], GONE[module])
    (line,) = found["heard"]
    assert is_the_warning(line, table, gone), line


@pytest.mark.parametrize("how", ["required", "required of tensorflow", "callback required"])
def test_with_require_it_is_refused_before_its_first_step(results: dict[str, Any], module: str, how: str) -> None:
    found = results[f"{module}: {how}"]
    assert (found["steps"], found["files"]) == (0, [])
    gone = GONE["tensorflow" if "tensorflow" in how else module]
    assert found["refused"].startswith("UnprotectedError: ")
    assert f"lacks {gone}; tested with" in found["refused"]
    assert found["refused"].endswith("HOLDFAST_ENABLED=require refuses to train unprotected")


@pytest.mark.parametrize("how", ["protected", "required and protected"])
def test_with_every_name_there_the_same_fit_is_protected(results: dict[str, Any], module: str, how: str) -> None:
    found = results[f"{module}: {how}"]
    assert (found["steps"], found["refused"], found["heard"]) == (8, None, [])
    assert "checkpoint-8" in found["files"]


def test_a_wrapper_that_fails_takes_the_other_tables_back_and_the_next_attempt_succeeds(
    results: dict[str, Any], module: str
) -> None:
    found = results[f"{module}: failed half way"]
    assert "seed_datasets" in found["raised"]
    assert found["left"] == []
    patches = [*TABLE_OF[module].patches, *TENSORFLOW.patches]
    assert found["after"] == sum(patch.scope == PROCESS for patch in patches)
