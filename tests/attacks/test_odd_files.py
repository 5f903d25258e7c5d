"""Pipes, links, devices and huge files in place of small files neither hang nor crash a command or a start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.base.small_files import RefusedFileError, open_below, read_json, read_small
from holdfast.progress import read_journal
from tests.attacks.hostile import ODD, as_another_user, ended, root, started
from tests.kit.checkpoints import make_checkpoint
from tests.unit.cli.cli_helpers import holdfast

RECORDS = ("attempt.json", "launch.json", "journal.jsonl", "control.json", "writer.lock")


@pytest.mark.parametrize("odd", ODD)
def test_every_odd_file_is_refused_at_once(odd: str, tmp_path: Path) -> None:
    path = tmp_path / "attempt.json"
    ODD[odd](path)
    began = time.monotonic()
    assert read_json(path) == {}
    assert time.monotonic() - began < 5
    if odd != "deep":
        with pytest.raises((RefusedFileError, IsADirectoryError)):
            read_small(path)


@pytest.mark.core
@pytest.mark.timeout(60)
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", RECORDS)
def test_commands_and_starts_live_with_odd_files_in_the_folder_of_a_run(name: str, odd: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "run", 3)
    home = tmp_path / "run" / ".holdfast"
    home.mkdir()
    ODD[odd](home / name)
    make_checkpoint(tmp_path / "other", 4)
    listed = holdfast("ls", tmp_path / "run", tmp_path / "other")
    assert "checkpoint-3" in listed.stdout
    assert "checkpoint-4" in listed.stdout
    for command in (["preempt", "--timeout", "0"], ["pause", "--timeout", "0"], ["show"], ["verify"]):
        holdfast(*command, tmp_path / "run")
    start = started(tmp_path / "run")
    if name == "writer.lock" and odd not in ("huge", "deep"):
        assert "writer.lock" in start.stderr or "cannot write into" in start.stderr
    elif name == "attempt.json" and odd == "folder":
        assert "attempt.json" in start.stderr  # it cannot be replaced; nobody waits for it
    else:
        assert "resumes Checkpoint" in start.stdout, start.stderr
        assert start.returncode == 0, start.stderr


@pytest.mark.core
@pytest.mark.timeout(60)
@pytest.mark.parametrize("odd", ODD)
def test_a_followed_loop_starts_beside_odd_files(odd: str, tmp_path: Path) -> None:
    code = (
        "import sys; from holdfast.adapters.replay.file_history import FileHistory; "
        "from holdfast.adapters.replay.identity import owner_of, records_in; "
        "history = FileHistory(sys.argv[2] + '/files-0'); history.recall(); "
        "print(owner_of(sys.argv[1]), records_in(sys.argv[2]), history.changes)"
    )
    home = tmp_path / "run" / ".holdfast"
    (home / "processes").mkdir(parents=True)
    for name in ("run.json", "processes/a.json", "files-0"):
        ODD[odd](home / name)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run"), str(home)],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert done.stdout == "{} {'a': {}} {}\n"


@pytest.mark.parametrize("odd", ODD)
def test_the_listing_of_all_runs_lives_with_one_that_is_odd(odd: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "holdfast-runs" / "good", 4)
    for number, name in enumerate(RECORDS):
        (home := tmp_path / "holdfast-runs" / f"odd-{number}" / ".holdfast").mkdir(parents=True)
        ODD[odd](home / name)
    make_checkpoint(tmp_path / "holdfast-runs" / "manifest", 5)
    (manifest := tmp_path / "holdfast-runs" / "manifest" / "checkpoint-5" / "holdfast.json").unlink()
    ODD[odd](manifest)
    ODD[odd](tmp_path / "holdfast-runs" / "good" / "training_progress.json")
    listed = holdfast("ls", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "good" in listed.stdout


def test_a_lock_that_is_a_link_does_not_empty_the_file_that_it_leads_to(tmp_path: Path) -> None:
    victim = tmp_path / "precious"
    victim.write_text("kept")
    make_checkpoint(tmp_path / "run", 3)
    make_checkpoint(tmp_path / "run", 4)
    (tmp_path / "run" / ".holdfast").mkdir()
    (tmp_path / "run" / ".holdfast" / "writer.lock").symlink_to(victim)
    assert ended("prune", tmp_path / "run", "--keep", "1", "--yes").returncode != 0
    assert victim.read_text() == "kept"


@root
def test_the_files_of_launchers_of_other_users_are_not_read(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(shared))
    folder = shared / f"holdfast-launch-attack-{os.getpid()}"
    make = "import os, sys; os.mkdir(sys.argv[1]); os.mkfifo(sys.argv[1] + '/starting')"
    as_another_user(make, folder)
    try:
        assert ended("preempt", "--timeout", "1", cwd=tmp_path).returncode == 3
    finally:
        os.unlink(folder / "starting")
        os.rmdir(folder)


@root
def test_a_file_of_another_user_is_refused_where_the_owner_counts(shared: Path) -> None:
    as_another_user("import sys; open(sys.argv[1], 'w').write('{}')", shared / "theirs")
    assert read_small(shared / "theirs") == b"{}"
    with pytest.raises(RefusedFileError, match="belongs to another user"):
        read_small(shared / "theirs", own=True)


def test_nothing_behind_a_linked_folder_is_opened(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("theirs")
    (tmp_path / "inside").symlink_to("elsewhere")
    with pytest.raises(RefusedFileError, match="link"):
        os.close(open_below(str(tmp_path), "inside/file"))


def test_the_journal_of_a_run_is_read_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    _sparse(path)
    with open(path, "ab") as file:
        file.write(b'\n{"event": "commit", "t": 1.0}\n')
    assert [event["event"] for event in read_journal(path)] == ["commit"]


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)
