"""``holdfast resume`` runs a command that lies in the folder of a run only after it was shown and asked for."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.base.process import Owner
from tests.attacks.hostile import as_another_user, ended, root
from tests.kit.checkpoints import make_checkpoint
from tests.unit.cli.cli_helpers import HOLDFAST, environ


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """The folder of a run as an archive brings it, with a command in it that leaves a file."""
    run = tmp_path / "run"
    make_checkpoint(run, 4)
    (run / ".holdfast").mkdir()
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w').close()\n")
    _pack(run, [str(tmp_path / "evil.py")])
    return run


def _pack(run: Path, program: list[str], **spec: Any) -> None:
    record = {
        "owner": Owner("launcher", pid=1, started="1").as_dict(),
        "spec": {"program": program, "cwd": str(run.parent), **spec},
        "state": "paused",
        "since": 1.0,
    }
    (path := run / ".holdfast" / "launch.json").unlink(missing_ok=True)
    path.write_text(json.dumps(record))
    path.chmod(0o600)


@pytest.mark.core
def test_the_command_of_an_unpacked_run_is_shown_and_not_run(unpacked: Path, tmp_path: Path) -> None:
    _pack(unpacked, [str(tmp_path / "evil.py"), "\x1b[2J"], environ={"PYTHONPATH": "/of/theirs"}, workers=None)
    done = ended("resume", unpacked)
    assert done.returncode == 2
    assert "evil.py" in done.stderr
    assert "PYTHONPATH=/of/theirs" in done.stderr
    assert "\x1b" not in done.stderr
    assert "--yes" in done.stderr
    assert ended("resume", unpacked, "--detach").returncode == 2
    assert not (tmp_path / "owned").exists()


def test_with_yes_it_is_run_and_is_the_users_own_from_then_on(unpacked: Path, tmp_path: Path) -> None:
    assert ended("resume", unpacked, "--yes").returncode == 0
    assert (tmp_path / "owned").exists()
    (tmp_path / "owned").unlink()
    (tmp_path / "other.py").write_text("raise SystemExit('swapped')\n")
    _pack(unpacked, [str(tmp_path / "other.py")])
    done = ended("resume", unpacked)
    assert done.returncode == 0
    assert "swapped" not in done.stderr
    assert (tmp_path / "owned").exists()


@pytest.mark.parametrize(("answer", "runs"), [(b"n\n", False), (b"y\n", True)])
def test_at_a_terminal_a_person_is_asked(answer: bytes, runs: bool, unpacked: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, answer)
    done = subprocess.run(
        [*HOLDFAST, "resume", str(unpacked)],
        env=environ(),
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(ours)
    os.close(theirs)
    assert "Run it?" in done.stderr
    assert (tmp_path / "owned").exists() == runs


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PATH", "PYTHONSTARTUP", "AWS_ENDPOINT_URL", "BASH_ENV"])
@pytest.mark.parametrize("table", ["environ", "settings"])
def test_a_record_sets_no_variables_but_ours(table: str, name: str, unpacked: Path, tmp_path: Path) -> None:
    _pack(unpacked, [str(tmp_path / "evil.py")], **{table: {name: "x"}})
    assert ended("resume", unpacked, "--yes").returncode != 0
    assert not (tmp_path / "owned").exists()


def test_a_record_that_is_a_link_or_that_others_can_write_is_not_run(unpacked: Path, tmp_path: Path) -> None:
    record = unpacked / ".holdfast" / "launch.json"
    record.chmod(0o666)
    assert "can be written by other users" in ended("resume", unpacked, "--yes").stderr
    record.chmod(0o600)
    os.rename(record, tmp_path / "elsewhere.json")
    record.symlink_to(tmp_path / "elsewhere.json")
    assert ended("resume", unpacked, "--yes").returncode != 0
    assert not (tmp_path / "owned").exists()


@root
def test_a_record_of_another_user_is_not_run(unpacked: Path, shared: Path, tmp_path: Path) -> None:
    text = (unpacked / ".holdfast" / "launch.json").read_text()
    make_checkpoint(shared / "run", 4)
    (shared / "run" / ".holdfast").mkdir(mode=0o777)
    (shared / "run" / ".holdfast").chmod(0o777)
    as_another_user(
        "open(os.path.join(sys.argv[1], 'launch.json'), 'w').write(sys.argv[2])", shared / "run" / ".holdfast", text
    )
    done = ended("resume", shared / "run", "--yes")
    assert "belongs to another user" in done.stderr
    assert done.returncode != 0
    assert not (tmp_path / "owned").exists()


def test_the_record_that_is_checked_is_the_one_that_is_run(unpacked: Path, tmp_path: Path) -> None:
    """A record that is exchanged a hundred times a second: what runs is what was shown."""
    (tmp_path / "shown.py").write_text("print('that was shown')\n")
    swap = f"""
import json, os, sys, time
path = {str(unpacked / ".holdfast" / "launch.json")!r}
record = json.load(open(path))
while os.getppid() == {os.getpid()}:
    for name in ("evil.py", "shown.py"):
        record["spec"]["program"] = [os.path.join({str(tmp_path)!r}, name)]
        with open(path + ".new", "w") as file:
            json.dump(record, file)
        os.chmod(path + ".new", 0o600)
        os.replace(path + ".new", path)
"""
    with subprocess.Popen([sys.executable, "-c", swap]) as swapping:
        try:
            for number in range(3):
                done = ended("resume", unpacked, "--yes", XDG_STATE_HOME=str(tmp_path / f"state-{number}"))
                assert ("shown.py" in done.stderr) == ("that was shown" in done.stdout), done.stderr
                assert ("evil.py" in done.stderr) == (tmp_path / "owned").exists()
                (tmp_path / "owned").unlink(missing_ok=True)
        finally:
            swapping.kill()


def test_a_users_own_run_goes_on_without_a_question(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("open('count', 'a').write('x'); raise SystemExit(5)\n")
    (tmp_path / "run" / ".holdfast").mkdir(parents=True)
    assert ended("run", "--dir", tmp_path / "run", "--max-restarts", "0", "mine.py", cwd=tmp_path).returncode == 5
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w').close()\n")
    _pack(tmp_path / "run", [str(tmp_path / "evil.py")])  # somebody else writes into that folder
    assert ended("resume", tmp_path / "run", cwd=Path("/")).returncode == 5
    assert (tmp_path / "count").read_text() == "xx"
    assert not (tmp_path / "owned").exists()
