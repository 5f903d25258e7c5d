"""A complete run is replayed for the same command alone: a script that begins otherwise is trained, and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs.replay import drill


@pytest.fixture(scope="module")
def plain():
    """Runs plain PyTorch scripts; see drill.py."""
    server = drill.Server()
    yield server
    server.close()


def spec_of(folder: Path, world: int = 1, *, scale: float = 1.0, outputs: int = 1, **env: str) -> drill.Spec:
    """One attempt, with what the script finds in files."""
    out = Path(f"{folder}.out")
    out.mkdir(parents=True, exist_ok=True)
    (out / "own_settings.py").write_text(f"SCALE = {scale}\n")
    (out / "settings.json").write_text(json.dumps({"outputs": outputs}))
    return drill.Spec(str(folder), "plain_settings", world, [], env)


@pytest.mark.parametrize(
    ("change", "world", "named"),
    [
        ({"RATE": "0.02"}, 1, "the variable RATE"),
        ({"RATE": "0.02"}, 2, "the variable RATE"),
        ({"scale": 0.25}, 1, "the source of own_settings"),
        ({"outputs": 3}, 1, "settings.json"),
    ],
)
@pytest.mark.core(1)
def test_a_script_with_other_settings_is_another_run(plain, tmp_path, change, world, named):
    run = tmp_path / "run"
    expected = plain.run(spec_of(tmp_path / "off", world, **change, HOLDFAST_ENABLED="0"))
    assert plain.run(spec_of(run, world)).codes == [0] * world
    changed = spec_of(run, world, **change)
    changed.faults.append({"at": "step 6"})
    stopped = plain.run(changed)
    assert stopped.codes == [143] * world, stopped.log
    assert "holds a complete run that began otherwise" in stopped.log
    assert named in stopped.log
    resumed = plain.run(changed.plain())
    assert resumed.codes == [0] * world, resumed.log
    assert resumed.printed == expected.printed, resumed.log
    assert "resuming from" in resumed.log
    again = plain.run(changed.plain())
    assert again.printed == expected.printed, again.log
    assert "where it is complete" in again.log


def test_the_same_command_replays_what_is_complete(plain, tmp_path):
    first = plain.run(spec_of(tmp_path / "run"))
    again = plain.run(spec_of(tmp_path / "run", HOLDFAST_PROGRESS_EVERY="5"))
    assert (again.codes, again.printed) == ([0], first.printed), again.log
    assert "where it is complete" in again.log


def test_an_unfinished_run_with_other_settings_resumes_and_says_so(plain, tmp_path):
    spec = spec_of(tmp_path / "run")
    spec.faults.append({"at": "step 4"})
    assert plain.run(spec).codes == [143]
    again = plain.run(spec_of(tmp_path / "run", RATE="0.02"))
    assert again.codes == [0], again.log
    assert "begins otherwise than the run that it resumes (the variable RATE" in again.log
