"""Loops that write to a folder named by the clock: what the first attempt wrote there is found after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.replay import drill
from tests.kit.checks import assert_whole


@pytest.fixture(scope="module")
def plain():
    server = drill.Server()
    yield server
    server.close()


@pytest.mark.share(2)
@pytest.mark.parametrize("options", [[], ["--hydra"]])
def test_files_of_the_first_attempt_are_found_in_the_folder_of_the_second(plain, tmp_path, options):
    undisturbed = plain.run(drill.Spec(str(tmp_path / "plain"), "plain_dated", options=options))
    assert undisturbed.codes == [0], undisturbed.log
    place = str(tmp_path / "run")
    spec = drill.Spec(place, "plain_dated", options=options, faults=[{"at": "epoch 2"}])
    assert plain.run(spec).codes == [143]
    assert_whole(place)
    again = plain.run(spec.plain())
    assert again.codes == [0], again.log
    assert again.printed == undisturbed.printed
    first, second = sorted(Path(f"{place}.out/outputs").glob("*/*"))
    assert f"the first attempt of this run wrote to {first}, and this one has named {second} by the clock" in again.log
    assert second.is_symlink() == (not options)
    assert (second / "best.pt").samefile(first / "best.pt")
    assert (second / "done").exists()


def test_a_script_that_changes_its_working_folder_keeps_its_location(plain, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), "plain_dated", options=["--hydra"], env={"HOLDFAST_DIR": ""})
    assert plain.run(spec).codes == [0]
    assert_whole(str(tmp_path / "run.out/holdfast-runs/plain_dated"))
