"""``holdfast prune`` removes what was named, and nothing that a file in the named folder leads to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.checkpoints import make_checkpoint
from tests.unit.cli.cli_helpers import holdfast


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A shared folder whose record names a folder of the victim as its fallback."""
    run = tmp_path / "shared" / "run"
    make_checkpoint(run, 4)
    make_checkpoint(tmp_path / "victim", 7)
    make_checkpoint(tmp_path / "victim", 8)
    (run / ".holdfast").mkdir()
    record = {"run": "r", "attempt": 1, "location": str(run), "fallback": str(tmp_path / "victim"), "ranks": {}}
    (run / ".holdfast" / "attempt.json").write_text(json.dumps(record))
    return run


@pytest.mark.core
@pytest.mark.parametrize("what", [["--all"], ["--keep", "1"], ["--unfinished", "--keep", "1"]])
def test_a_fallback_that_a_record_names_is_left_alone(what: list[str], hostile: Path, tmp_path: Path) -> None:
    (tmp_path / "victim" / "checkpoint-9").mkdir()
    done = holdfast("prune", hostile, *what, "--yes")
    assert done.returncode == 0
    assert f"the fallback {tmp_path / 'victim'} is left alone" in done.stderr
    kept = {path.name for path in (tmp_path / "victim").iterdir()}
    assert kept == {"checkpoint-7", "checkpoint-8", "checkpoint-9"}
    assert (hostile / "checkpoint-4").exists() == ("--all" not in what)


def test_with_its_own_option_the_fallback_is_named_in_full_before_it_goes(hostile: Path, tmp_path: Path) -> None:
    refused = holdfast("prune", hostile, "--all", "--fallback")
    assert refused.returncode == 2
    assert f"in the fallback {tmp_path / 'victim'}, too: checkpoint-8, checkpoint-7" in refused.stderr
    assert (tmp_path / "victim" / "checkpoint-7").exists()
    assert holdfast("prune", hostile, "--all", "--fallback", "--yes").returncode == 0
    assert not (tmp_path / "victim" / "checkpoint-7").exists()


def test_the_environment_of_another_run_names_no_fallback_of_this_one(hostile: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "other", 3)
    (hostile / ".holdfast" / "attempt.json").unlink()
    holdfast("prune", hostile, "--all", "--yes", HOLDFAST_FALLBACK_DIR=str(tmp_path / "other"))
    assert (tmp_path / "other" / "checkpoint-3").exists()
