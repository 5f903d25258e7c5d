"""tests/run.py: a test that fails in the whole run gets one more try, alone, and is never hidden."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import run
from tests.kit import ROOT

SECOND_TIME = """
from pathlib import Path

def test_passes():
    pass

def test_fails_once():
    seen = Path(__file__).with_name("seen")
    again = seen.exists()
    seen.touch()
    assert again

def test_fails():
    assert False
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(SECOND_TIME)
    return tmp_path


def whole_run(folder: Path, *tests: str) -> tuple[int, list[str]]:
    """Exit code, and the names in the file of failures."""
    failures = folder / "failures"
    failures.touch()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", f"--failures-file={failures}", *tests]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, failures.read_text().split()


def closed(folder: Path, codes: list[int], failures: list[str]) -> int:
    (folder / "scratch").mkdir()
    runner = run.Runner([], folder / "scratch", folder)
    runner.codes = codes
    (folder / "scratch/failures").write_text("".join(f"{name}\n" for name in failures))
    return runner.close()


def test_what_fails_once_is_named_as_flaky_and_the_run_passes(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, failures = whole_run(folder, "test_some.py::test_passes", "test_some.py::test_fails_once")
    assert (code, failures) == (1, ["test_some.py::test_fails_once"])
    assert closed(folder, [0, code], failures) == 0
    flaky = capfd.readouterr().out.partition("FLAKY")[2]
    assert flaky.split()[-1:] == failures


def test_what_fails_twice_fails_the_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, failures = whole_run(folder, "test_some.py")
    assert (code, len(failures)) == (1, 2)
    assert closed(folder, [code], failures) == 1
    out = capfd.readouterr().out
    assert out.partition("FAILED TWICE")[2].split()[0] == "test_some.py::test_fails"
    assert out.partition("FLAKY")[2].split()[-1:] == ["test_some.py::test_fails_once"]


def test_more_failures_than_accidents_are_not_run_again(folder: Path) -> None:
    assert closed(folder, [1], [f"test_some.py::test_passes[{number}]" for number in range(run.MOST_AGAIN + 1)]) == 1


@pytest.mark.parametrize("code", [2, 3, 4, -9])
def test_a_process_that_did_not_end_by_itself_fails_the_run_whatever_its_tests_say(folder: Path, code: int) -> None:
    assert closed(folder, [0, code], ["test_some.py::test_passes"]) == code


def test_no_failure_and_no_tests_pass(folder: Path) -> None:
    assert closed(folder, [0, run.NO_TESTS], []) == 0


def test_a_copy_of_the_environment_names_the_place_where_it_lies(tmp_path: Path) -> None:
    environment = tmp_path / "copy/.venv"
    packages = environment / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (environment / "bin").mkdir()
    script = environment / "bin/tool"
    script.write_text("#!/tmp/clone/.venv/bin/python\n")
    script.chmod(0o755)
    (packages / "ours.pth").write_text("/tmp/clone/src\n")
    original = tmp_path / "original"
    os.link(script, original)
    run._relocate(environment, "/tmp/clone", str(tmp_path / "copy"))
    assert script.read_text() == f"#!{tmp_path}/copy/.venv/bin/python\n"
    assert script.stat().st_mode & 0o777 == 0o755
    assert (packages / "ours.pth").read_text() == f"{tmp_path}/copy/src\n"
    assert original.read_text() == "#!/tmp/clone/.venv/bin/python\n"
