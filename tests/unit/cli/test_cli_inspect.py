"""What a person and a script learn from ``ls``, ``show``, ``verify``, ``prune``, ``top`` and ``doctor``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.base.process import Owner
from holdfast.base.run_directory import ATTEMPT, JOURNAL
from holdfast.cli.main import app
from holdfast.progress import Journal
from holdfast.store.base import SENTINEL
from holdfast.store.local import LocalBackend
from tests.kit.checkpoints import make_checkpoint
from tests.unit.cli.cli_helpers import environ, holdfast, json_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was interrupted once, with three checkpoints and one that was never committed."""
    location = tmp_path / "holdfast-runs" / "train"
    for step in (10, 20, 30):
        make_checkpoint(location, step, reason="jit" if step == 20 else "periodic")
    LocalBackend(str(location)).begin("checkpoint-40")
    home = location / ".holdfast"
    home.mkdir(exist_ok=True)
    journal = Journal(home / JOURNAL, run_id="train-1", attempt=1, rank=0)
    journal.record("attempt", resumed_from=None, step=0)
    journal.record("training", step=0)
    journal.record("notice", source="signal", detail="SIGTERM", step=20)
    journal.record("commit", step=20, reason="jit", name="checkpoint-20")
    journal.record("end", step=20, outcome="preempted")
    journal.attempt = 2
    journal.record("attempt", resumed_from=20, step=20)
    journal.record("training", step=20)
    journal.record("commit", step=30, reason="periodic", name="checkpoint-30")
    journal.record("end", step=30, outcome="rescued")
    dead = {"run": "train-1", "host": "gone", "pid": 1, "boot": "x", "started": "1", "pid_namespace": "x"}
    attempt = {"run": "train-1", "attempt": 2, "token": "t", "location": str(location), "fallback": None}
    (home / ATTEMPT).write_text(json.dumps({**attempt, "ranks": {"0": dead}, "grace_period": 30.0}))
    return location


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_ls_shows_checkpoints_newest_first_and_what_is_not_whole(run: Path) -> None:
    (found,) = json_of("ls", run)["runs"]
    assert [(row["name"], row["state"]) for row in found["checkpoints"]] == [
        ("checkpoint-40", "unfinished"),
        ("checkpoint-30", "whole"),
        ("checkpoint-20", "whole"),
        ("checkpoint-10", "whole"),
    ]
    assert found["checkpoints"][2]["reason"] == "jit"
    assert found["checkpoints"][1]["bytes"] == 10_000
    assert (found["saved_step"], found["state"], found["attempts"]) == (30, "stopped", 2)
    shown = holdfast("ls", run)
    assert shown.returncode == 0
    assert "checkpoint-40" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_without_a_name_the_runs_of_this_folder_are_meant(run: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "holdfast-runs" / "other", 5)
    names = {Path(found["location"]).name for found in json_of("ls", cwd=tmp_path)["runs"]}
    assert names == {"train", "other"}
    assert "holdfast-runs/other" in holdfast("ls", cwd=tmp_path).stdout
    assert json_of("ls", "other", cwd=tmp_path)["runs"][0]["saved_step"] == 5  # a bare name
    assert json_of("ls", cwd=tmp_path, HOLDFAST_DIR=str(run))["runs"][0]["location"] == str(run)
    assert json_of("ls", cwd=run)["runs"][0]["saved_step"] == 30  # inside the run's own folder
    missing = holdfast("ls", "nothing", cwd=tmp_path)
    assert missing.returncode == 3
    assert "holdfast-runs/train" in missing.stderr
    assert missing.stderr.count("\n") == 1
    error = json_of("show", "nothing", cwd=tmp_path, code=3)["error"]
    assert error["kind"] == "not_found"


def test_the_fallback_location_is_listed_too(run: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "second", 35, reason="jit")
    rows = json_of("ls", run, HOLDFAST_FALLBACK_DIR=str(tmp_path / "second"))["runs"][0]["checkpoints"]
    assert [(row["step"], row["fallback"]) for row in rows][:2] == [(40, False), (35, True)]


def test_show_tells_a_runs_story_and_a_checkpoints_files(run: Path) -> None:
    story = json_of("show", run)
    assert story["goodput"]["attempts"] == 2
    assert [entry["what"] for entry in story["interruptions"]] == ["preempted", "rescued"]
    one = json_of("show", f"{run}/checkpoint-20")
    assert (one["step"], one["reason"], one["state"]) == (20, "jit", "whole")
    assert [file["path"] for file in one["files"]] == ["model.safetensors", "rank-00000.safetensors"]
    assert json_of("show", "checkpoint-20", "--run", run) == one
    assert json_of("show", "checkpoint-40", "--run", run, code=3)["error"]["message"].endswith("is not whole")
    for what in (run, run / "checkpoint-20"):
        assert holdfast("show", what).returncode == 0


def test_verify_reads_every_byte_and_fails_for_a_flipped_one(run: Path) -> None:
    fine = json_of("verify", run)
    assert fine["whole"] is True
    assert {one["state"] for one in fine["checkpoints"]} == {"whole", "unfinished"}
    assert json_of("verify", run, "--strict", code=1)["whole"] is False
    flip(run / "checkpoint-20" / "model.safetensors")
    broken = json_of("verify", run, code=1)
    assert broken["whole"] is False
    (damaged,) = (one for one in broken["checkpoints"] if one["state"] == "damaged")
    assert damaged["name"] == "checkpoint-20"
    assert "model.safetensors" in damaged["problems"][0]
    assert json_of("verify", run, "--newest")["whole"] is True
    assert json_of("verify", run, "--checkpoint", "checkpoint-20", code=1)["whole"] is False
    for_people = holdfast("verify", run)
    assert for_people.returncode == 1
    assert "checksum" in for_people.stdout


def test_verify_finds_a_truncated_and_a_missing_file_and_a_torn_manifest(run: Path, tmp_path: Path) -> None:
    os.truncate(run / "checkpoint-10" / "model.safetensors", 100)
    (run / "checkpoint-20" / "rank-00000.safetensors").unlink()
    (run / "checkpoint-30" / "holdfast.json").write_text("{")
    found = json_of("verify", run, code=1)["checkpoints"]
    assert [one["state"] for one in found if one["name"] != "checkpoint-40"] == ["damaged"] * 3
    assert holdfast("verify", tmp_path, "--newest").returncode == 3


def test_prune_keeps_the_newest_and_asks_first(run: Path) -> None:
    assert holdfast("prune", run).returncode == 2
    assert holdfast("prune", run, "--keep", "1").returncode == 2  # nobody to ask, and no --yes
    would = json_of("prune", run, "--keep", "1", "--unfinished", "--dry-run")
    assert [row["name"] for row in would["checkpoints"]] == ["checkpoint-40", "checkpoint-20", "checkpoint-10"]
    assert would["removed"] is False
    assert len(json_of("ls", run)["runs"][0]["checkpoints"]) == 4
    assert json_of("prune", run, "--keep", "1", "--unfinished", "--yes")["removed"] is True
    assert [row["step"] for row in json_of("ls", run)["runs"][0]["checkpoints"]] == [30]
    assert json_of("prune", run, "--keep", "1", "--yes")["checkpoints"] == []
    json_of("prune", run, "--all", "--yes")
    assert json_of("ls", run)["runs"][0]["checkpoints"] == []


def test_prune_does_not_touch_a_location_that_a_live_run_holds(run: Path) -> None:
    backend = LocalBackend(str(run))
    backend.acquire(Owner("live"))
    try:
        assert json_of("prune", run, "--keep", "1", "--yes", code=4)["error"]["kind"] == "busy"
    finally:
        backend.release()
    assert len(json_of("ls", run)["runs"][0]["checkpoints"]) == 4


def test_top_shows_a_run_once(run: Path) -> None:
    (shot,) = json_of("top", run)["runs"]
    assert (shot["saved_step"], shot["attempts"], shot["preemptions"]) == (30, 2, 1)
    assert shot["ranks_live"][0]["alive"] is False
    assert holdfast("top", run, "--once").returncode == 0


def findings(*arguments: Any, code: int = 1, **options: Any) -> dict[str, str]:
    found = json_of("doctor", *arguments, code=code, **options)
    assert found["ok"] is (code == 0)
    return {finding["check"]: finding["severity"] for finding in found["findings"]}


def test_doctor_is_content_with_a_healthy_place(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "run", 1)
    found = findings(tmp_path / "run", code=0)
    assert {"location", "fsync", "room", "grace", "torchrun", "shared_memory"} <= found.keys()
    assert not list(tmp_path.glob("**/.holdfast-doctor*"))
    findings(tmp_path / "not" / "yet", "--size", "2MB", code=0)


def test_doctor_finds_a_grace_period_that_is_too_short(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "run", 1, write_s=40.0)
    assert findings(tmp_path / "run")["grace"] == "error"
    assert findings(tmp_path / "run", HOLDFAST_GRACE_PERIOD="60")["torchrun"] == "warning"
    long = findings(tmp_path / "run", code=0, HOLDFAST_GRACE_PERIOD="120", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="130")
    assert long["grace"] == "ok"
    # By a trial: nothing writes a terabyte in two seconds.
    assert findings(tmp_path / "new", "--size", "1TB", HOLDFAST_GRACE_PERIOD="2")["grace"] == "error"


def test_doctor_finds_what_the_history_tells(run: Path) -> None:
    (run / "checkpoint-40" / SENTINEL).touch()
    flip_manifest = run / "checkpoint-30" / "holdfast.json"
    flip_manifest.write_text("{}")
    journal = Journal(run / ".holdfast" / JOURNAL, run_id="train-1", attempt=2, rank=0)
    journal.record("handler_replaced", by="SIGTERM by wandb.on_term")
    with (run / ".holdfast" / JOURNAL).open("a") as file:
        file.write(json.dumps({"t": time.time() - 100, "event": "staged", "attempt": 2, "rank": 1}) + "\n")
    found = findings(run)
    assert found["handler"] == "error"
    assert found["unfinished"] == "warning"
    assert found["damaged"] == "error"
    assert found["clock"] == "warning"


def test_doctor_finds_wrong_settings_an_unknown_store_and_no_room(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "run", 1)
    assert findings(tmp_path / "run", HOLDFAST_KEEP="many")["settings"] == "error"
    assert findings("ftp://somewhere/else")["location"] == "error"
    assert findings(tmp_path / "run", "--size", "900TB")["room"] == "error"
    file = tmp_path / "file"
    file.write_text("")
    assert findings(file / "run")["location"] == "error"


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no memory file system")
def test_doctor_says_that_memory_is_no_disk() -> None:
    assert findings(f"/dev/shm/holdfast-test-{os.getpid()}")["fsync"] == "warning"


def test_the_commands_import_no_torch_and_explain_their_exit_codes(run: Path) -> None:
    looked = (
        "import sys; sys.argv = ['holdfast', 'ls', sys.argv[1]]\n"
        "from holdfast.cli.main import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'numpy', 'psutil', 'obstore'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", looked, str(run)], env=environ(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    for command in ("run", "pause", "resume", "preempt", "ls", "show", "verify", "prune", "top", "doctor", "check"):
        text = CliRunner().invoke(app, [command, "--help"]).output
        assert "Exit codes: 0" in " ".join(text.split())
