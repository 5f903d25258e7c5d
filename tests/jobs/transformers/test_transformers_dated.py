"""Scripts whose output folder is named by the clock: the same command resumes its run, where the run began."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.transformers import drill
from tests.jobs.transformers.drill import SCRIPTS, Spec


@pytest.fixture(scope="module")
def server():
    return drill.shared()


def spec_of(folder: Path, options: list[str], **env: str) -> Spec:
    return Spec(str(folder / "out"), options=options, script=str(SCRIPTS / "transformers_dated.py"), env=env)


def folders(spec: Spec) -> list[Path]:
    return [path for path in sorted(Path(spec.dir).iterdir()) if not path.is_symlink()]


@pytest.mark.parametrize("options", [[], ["--config"]])
@pytest.mark.share(2)
def test_the_same_command_resumes_in_the_folder_of_its_first_start(server, tmp_path, options) -> None:
    plain = server.run(spec_of(tmp_path / "plain", options, HOLDFAST_ENABLED="0"))
    stopped = server.run(spec_of(tmp_path, options, STOP_AT="8"))
    assert stopped.codes == [143], stopped.log
    spec = spec_of(tmp_path, options)
    first = folders(spec)[0]
    again = server.run(spec)
    assert again.codes == [0], again.log
    assert again.result["digest"] == plain.result["digest"]
    assert f"this command has begun its run in {first} and not finished it" in again.log
    assert f"resuming from {first}/checkpoint-8, step 8" in again.log
    names = {path.name for path in first.iterdir()}
    wanted = {path.name for path in Path(plain.result["folder"]).iterdir()} - ({"done"} if options else set())
    assert wanted <= names
    assert Path(again.result["folder"], "done").exists()
    assert Path(again.result["folder"]).is_symlink() == (not options)


def test_a_finished_run_and_one_of_other_arguments_are_other_runs(server, tmp_path) -> None:
    assert server.run(spec_of(tmp_path, [])).codes == [0]
    assert server.run(spec_of(tmp_path, [], STOP_AT="8")).codes == [143]
    spec = spec_of(tmp_path, [], SEED="2")
    finished, unfinished = folders(spec)
    assert not (finished / "checkpoint-8").exists()
    other = server.run(spec)
    assert other.codes == [0], other.log
    assert f"{unfinished} holds an unfinished run of this command, but the script or its arguments" in other.log
    assert "resuming from" not in other.log
    assert len(folders(spec)) == 3
