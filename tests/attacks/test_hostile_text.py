"""What a manifest, a journal or a record says cannot act on the terminal of whoever looks at it, nor crash the look."""

from __future__ import annotations

import json
import os
import pty
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast.base.words import is_plain, shown
from holdfast.config import Settings
from holdfast.errors import CheckpointCorruptError, ConfigError
from holdfast.store.manifest import FileEntry, Manifest, _seal
from tests.attacks.hostile import ended, started
from tests.kit.checkpoints import make_checkpoint
from tests.unit.cli.cli_helpers import HOLDFAST, environ, holdfast

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp"
MARKUP = "[/bold][red]x[/nope] [link=file:///etc/passwd]y[/link] :warning:"


def _rewritten(folder: Path, **changes: Any) -> None:
    """The manifest of checkpoint-4 with other values, and with a checksum that matches them."""
    path = folder / "checkpoint-4" / "holdfast.json"
    body = {**json.loads(path.read_text()), **changes}
    body.pop("xxh3_128")
    path.write_text(json.dumps({**body, "xxh3_128": _seal(body)}))


def _on_a_terminal(*arguments: str | Path, cwd: Path | None = None) -> str:
    """What a command writes to a terminal, byte for byte."""
    ours, theirs = pty.openpty()
    variables = {name: value for name, value in environ().items() if name not in ("NO_COLOR", "TERM")}
    with subprocess.Popen(
        [*HOLDFAST, *map(str, arguments)],
        cwd=cwd,
        env={**variables, "TERM": "xterm", "COLUMNS": "400"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    ) as command:
        os.close(theirs)
        data = b""
        try:
            while more := os.read(ours, 65536):
                data += more
        except OSError:  # nobody holds the other end any more
            pass
        os.close(ours)
        command.wait(60)
    text = data.decode("utf-8", "replace")
    assert "Traceback" not in text, text
    return text


def _assert_harmless(text: str) -> None:
    assert "\x1b[2J" not in text
    assert "\x1b]0" not in text
    assert "\x07" not in text
    assert "\x9b" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize(
    "changes",
    [
        {"reason": ESCAPES},
        {"reason": MARKUP},
        {"reason": 7},
        {"run": ESCAPES},
        {"run": "r" * 10_000},
        {"run": {"a": 1}},
        {"created": "now\nand then"},
        {"timings": {ESCAPES: 1.0}},
        {"timings": {"write_s": MARKUP}},
        {"timings": {"write_s": True}},
        {"timings": [1]},
        {"step": "4"},
        {"step": 4.0},
        {"step": True},
        {"epoch": ESCAPES},
        {"world_size": -1},
        {"attempt": 10**30},
        {"inexact": [7]},
        {"files": [{"path": "a", "size": 1, "xxh3_128": ESCAPES}]},
        {"files": [{"path": 7, "size": 1, "xxh3_128": "0" * 32}]},
        {"files": [{"path": "a", "size": "1", "xxh3_128": "0" * 32}]},
        {"files": [{"path": "a", "size": 1, "xxh3_128": "0" * 32, "ref": ["checkpoint-3/a"]}]},
    ],
)
def test_a_manifest_with_other_values_than_its_kind_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "run", 4)
    _rewritten(tmp_path / "run", **changes)
    with pytest.raises(CheckpointCorruptError) as refused:
        Manifest.decode((tmp_path / "run" / "checkpoint-4" / "holdfast.json").read_bytes())
    assert is_plain(str(refused.value))
    listed = holdfast("ls", tmp_path / "run")
    assert "damaged" in listed.stdout
    holdfast("show", "checkpoint-4", "--run", tmp_path / "run")


@pytest.mark.core
def test_markup_and_escapes_of_a_manifest_are_shown_as_they_are_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_checkpoint(run, 4, run=MARKUP)
    entry = {"path": f"{MARKUP.replace('/', '')}{ESCAPES}", "size": 1, "xxh3_128": "0" * 32}
    _rewritten(run, inexact=[ESCAPES + MARKUP], files=[])
    shown_one = _on_a_terminal("show", "checkpoint-4", "--run", run)
    assert MARKUP in shown_one
    assert r"not exact: \x1b[2J" in shown_one
    _assert_harmless(shown_one)
    _rewritten(run, files=[entry])
    for command in (["ls", run], ["verify", run], ["show", "checkpoint-4", "--run", run], ["doctor", run]):
        _assert_harmless(_on_a_terminal(*command))
    plain = ended("ls", run, "--json")
    _assert_harmless(plain.stdout)
    assert json.loads(plain.stdout)["runs"][0]["checkpoints"][0]["state"] == "damaged"


def test_the_names_of_folders_are_escaped(tmp_path: Path) -> None:
    name = f"{MARKUP.replace('/', '')}{ESCAPES}"
    make_checkpoint(tmp_path / "holdfast-runs" / name, 4)
    make_checkpoint(tmp_path / "holdfast-runs" / "other", 4)
    for command in (["ls"], ["top", "--once"], ["show", f"holdfast-runs/{name}"], ["pause", f"holdfast-runs/{name}"]):
        _assert_harmless(_on_a_terminal(*command, cwd=tmp_path))
    _assert_harmless(_on_a_terminal("prune", f"holdfast-runs/{name}", "--all", "--dry-run", cwd=tmp_path))


@pytest.mark.parametrize("seed", range(12))
def test_events_and_records_of_any_kind_are_looked_at_without_an_exception(seed: int, tmp_path: Path) -> None:
    """Journals and records of real shape in which values are exchanged for others."""
    chance = random.Random(seed)
    odd: list[Any] = [None, True, -1, 0, 10**30, 1e308, float("nan"), "", ESCAPES, MARKUP, [], [1], {}, {"a": 1}, "7"]
    events = [
        {"event": "launch", "pid": 3, "start": 1},
        {"event": "attempt", "step": 0, "resumed_from": None, "location": "x", "process_started": 1.0, "world": 1},
        {"event": "training", "step": 0, "since_start_s": 1.0},
        {"event": "notice", "step": 3, "detail": "SIGTERM", "source": "signal"},
        {"event": "agreed", "step": 4, "since_notice_s": 0.1},
        {"event": "commit", "step": 4, "reason": "jit", "bytes": 5, "since_notice_s": 1.0, "stall_s": 0.1, "name": "c"},
        {"event": "end", "step": 4, "outcome": "preempted", "reason": "jit", "since_notice_s": 1.0},
        {"event": "died", "attempt_ended": 1, "step": 4, "last_seen": 1.0},
        {"event": "paused", "step": 4},
        {"event": "resumed", "step": 4},
    ]
    make_checkpoint(tmp_path / "run", 4)
    (home := tmp_path / "run" / ".holdfast").mkdir()
    with open(home / "journal.jsonl", "w", encoding="utf-8") as file:
        for number in range(200):
            event: dict[str, Any] = {
                "t": 1000.0 + number, "run": "r", "attempt": number // 10 + 1, "rank": 0, **chance.choice(events)
            }  # fmt: skip
            for key in chance.sample(sorted(event), chance.randrange(4)):
                if key != "event":
                    event[key] = chance.choice(odd)
            file.write(json.dumps(event) + "\n")
    for name in ("attempt.json", "launch.json", "control.json"):
        record = {
            "run": "r", "attempt": 3, "token": "0" * 16, "location": str(tmp_path / "run"), "fallback": None,
            "ranks": {"0": {"run": "r", "pid": 5}}, "grace_period": 5.0, "started": 1.0, "progress_file": None,
            "owner": {"run": "r", "pid": 5}, "spec": {"program": ["a.py"], "environ": {}}, "state": "paused",
            "step": 3, "code": None, "control": "", "since": 0.0, "id": "a", "action": "pause", "time": 1.0,
        }  # fmt: skip
        for key in chance.sample(sorted(record), 1 + chance.randrange(3)):
            record[key] = chance.choice(odd)
        if isinstance(record["spec"], dict):
            record["spec"][chance.choice(["program", "workers", "dir", "settings", "environ"])] = chance.choice(odd)
        (home / name).write_text(json.dumps(record))
    for command in (["ls"], ["show"], ["top", "--once"], ["doctor"], ["verify"], ["pause", "--timeout", "0"]):
        done = holdfast(*command, tmp_path / "run")
        _assert_harmless(done.stdout + done.stderr)
    holdfast("preempt", tmp_path / "run", "--timeout", "0")
    begun = started(tmp_path / "run")
    assert begun.returncode == 0, begun.stderr
    shutil.rmtree(tmp_path / "run")


def test_what_is_written_is_what_is_accepted() -> None:
    """No start writes a manifest that a later one refuses."""
    with pytest.raises(ConfigError, match="HOLDFAST_RUN_ID"):
        Settings.load({"HOLDFAST_RUN_ID": "a\x1b[2J"})
    for text in ("checkpoint", "ünïcode", "日本", "a b", "x" * 400):
        run = str(Settings.load({"HOLDFAST_RUN_ID": text}).run_id)
        manifest = Manifest(
            step=1,
            reason="jit",
            world_size=1,
            files=(FileEntry("a", 1, "0" * 32),),
            created="2026-01-01T00:00:00Z",
            run=run,
            attempt=1,
            timings={"write_s": 0, "gather_s": 0.5},
        )
        assert Manifest.decode(manifest.encode()) == manifest


@pytest.mark.parametrize("text", ["", "plain", "ünïcode 日本", "two\nlines\tand a tab"])
def test_what_is_harmless_is_shown_as_it_is(text: str) -> None:
    assert shown(text) == text
