"""``holdfast doctor`` says of each framework which version is here, which names resolve and what was tested."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.wheels import NotDownloadedError, unpacked


def doctor(folder: Path, **variables: str) -> dict[str, Any]:
    ours = ("HOLDFAST_", "RAY_TRAIN_", "CHECKPOINT_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)} | variables
    command = [sys.executable, "-m", "holdfast.cli", "doctor", "--json", str(folder)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    return json.loads(done.stdout)


def test_every_installed_framework_shows_its_version_and_that_all_its_names_resolve(tmp_path: Path) -> None:
    told = doctor(tmp_path, HOLDFAST_ENABLED="1")
    for adapter in told["adapters"]:
        if not adapter["installed"]:
            continue
        assert adapter["acts"], adapter
        for framework, points in adapter["points"].items():
            found, needed = re.fullmatch(r"(\d+) of (\d+)", points).groups()
            assert found == needed != "0", adapter
            assert re.fullmatch(r"[\d.]+ to [\d.]+", adapter["tested"][framework])
        (finding,) = (one for one in told["findings"] if one["check"] == f"adapter {adapter['name']}")
        for framework, version in adapter["installed"].items():
            assert f"{framework} {version}" in finding["found"]
            if framework in adapter["points"]:
                tested = adapter["tested"][framework]
                assert f"{adapter['points'][framework]} patch points, tested {tested}" in finding["found"]


def test_a_version_that_lacks_names_is_a_warning_that_names_them_and_the_adapter_does_not_act(tmp_path: Path) -> None:
    """transformers 5.1 has no ``Trainer._run_epoch``: its training cannot be followed."""
    try:
        version, old = unpacked("transformers", "5.1.0", tmp_path / "old")
    except NotDownloadedError as error:
        pytest.skip(str(error))
    told = doctor(tmp_path / "run", HOLDFAST_ENABLED="1", PYTHONPATH=str(old))
    (adapter,) = (one for one in told["adapters"] if one["name"] == "transformers")
    assert adapter["installed"] == {"transformers": version}
    assert not adapter["acts"]
    assert "transformers.trainer:Trainer._run_epoch" in adapter["missing"]
    (finding,) = (one for one in told["findings"] if one["check"] == "adapter transformers")
    assert finding["severity"] == "warning"
    assert "lacks" in finding["found"]
    assert "transformers.trainer:Trainer._run_epoch" in finding["found"]
    assert "HOLDFAST_ENABLED=require" in finding["do"]
