"""What ``attempt.json`` on shared storage says removes nothing but a folder of this user's own, in its one place."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

import pytest

from holdfast.base.attempt_file import is_token, new_token, read_last_attempt
from holdfast.recorder.boxes import folder
from tests.attacks.hostile import started


def _start(run: Path) -> None:
    done = started(run)
    assert done.returncode == 0, done.stderr


def _leave(folder_of_run: Path, **content: object) -> None:
    (home := folder_of_run / ".holdfast").mkdir(parents=True, exist_ok=True)
    (home / "attempt.json").write_text(json.dumps({"run": "r", "attempt": 1, **content}))


@pytest.mark.core
@pytest.mark.parametrize("form", ["x/../../{}", "../{}", "/{}", "x/../..{}", "{}", "0123456789abcdef/../../{}"])
def test_a_token_that_is_a_path_removes_nothing(form: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "work").write_text("precious")
    base = os.path.dirname(folder("t"))
    for name in (os.path.relpath(victim, base), str(victim)):
        # The folder before the dots has to be there for a path to lead through it.
        _leave(tmp_path / "run", token=form.format(name.lstrip("/")))
        _start(tmp_path / "run")
        assert (victim / "work").read_text() == "precious"


def test_the_folder_of_the_last_attempt_goes_and_one_that_is_a_link_leads_nowhere(tmp_path: Path) -> None:
    gone, linked = secrets.token_hex(8), secrets.token_hex(8)
    os.mkdir(folder(gone), 0o700)
    (victim := tmp_path / "victim").mkdir()
    (victim / "work").write_text("precious")
    os.symlink(victim, folder(linked))
    try:
        for token in (gone, linked):
            _leave(tmp_path / "run", token=token)
            _start(tmp_path / "run")
        assert not os.path.exists(folder(gone))
        assert (victim / "work").read_text() == "precious"
    finally:
        os.unlink(folder(linked))


@pytest.mark.parametrize(
    "content",
    [
        {"attempt": "7" * 5000},
        {"attempt": -4},
        {"attempt": True},
        {"attempt": 1e300},
        {"attempt": None},
        {"run": ["a"]},
        {"run": "a\x1b[2J"},
        {"run": "a" * 100_000},
        {"token": 7},
        {"token": {"a": 1}},
    ],
)
def test_odd_values_are_as_good_as_none(content: dict[str, object], tmp_path: Path) -> None:
    _leave(tmp_path / "run", **content)
    last = read_last_attempt(str(tmp_path / "run" / ".holdfast"))
    assert last.run in (None, "r")
    assert last.number in (0, 1)
    _start(tmp_path / "run")


def test_tokens_have_one_form() -> None:
    assert is_token(new_token())
    assert not any(
        map(is_token, ["", "a", "0" * 15, "0" * 17, "G" * 16, "0" * 16 + "\n", "0" * 8 + "/" + "0" * 7, None])
    )
