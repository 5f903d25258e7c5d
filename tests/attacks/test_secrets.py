"""Credentials in a location reach nothing that is written or shown."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.base.run_directory import home_of
from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.launch.records import LaunchSpec
from holdfast.launch.runs import place_of
from holdfast.launch.supervisor import child_environ
from holdfast.locations import without_secrets
from tests.attacks.hostile import ended, started
from tests.kit.s3 import BUCKET

SECRET = "wJalrXUtnFEMIK7MDENG"
SIGNATURE = "9f8e7d6c5b4a"
HOLDING = (
    "s3://AKIAIOSFODNN7EXAMPLE:{secret}@{bucket}/runs/a",
    "s3://{bucket}/runs/a?X-Amz-Signature={signature}&X-Amz-Credential={secret}",
    "s3://user:{secret}/with/slash?and=more@{bucket}/runs/a",
    "s3://{secret}@{bucket}/runs/a?sig={signature}#token={secret}",
)
PLACES = tuple(form.format(secret=SECRET, signature=SIGNATURE, bucket="bucket") for form in HOLDING)


def _assert_clean(text: str) -> None:
    assert SECRET not in text
    assert SIGNATURE not in text


@pytest.mark.core
@pytest.mark.parametrize("place", PLACES)
def test_settings_and_records_hold_the_bucket_and_the_prefix_alone(place: str, tmp_path: Path) -> None:
    environ = {"HOLDFAST_DIR": place, "HOLDFAST_FALLBACK_DIR": place}
    for settings in (Settings.load(environ), Settings.load({}, dir=place, fallback=place), Settings(dir=place)):
        assert settings.dir == "s3://bucket/runs/a"
        assert settings.replace(dir=place).dir == "s3://bucket/runs/a"
        _assert_clean(repr(settings))
    spec = LaunchSpec(program=["a.py"], dir=place, environ=environ)
    child = child_environ(spec)
    _assert_clean(child["HOLDFAST_DIR"] + child["HOLDFAST_FALLBACK_DIR"])
    assert place_of(place).location == "s3://bucket/runs/a"
    assert home_of(place) == home_of("s3://bucket/runs/a")


def test_homes_of_places_without_credentials_are_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    for place in ("s3://bucket/runs/a", "gs://bucket/a/", "az://c/user@host/x", "s3://bucket"):
        name = place.rstrip("/").rpartition("/")[2]
        digest = hashlib.sha256(place.encode()).hexdigest()[:12]
        assert home_of(place) == f"/state/holdfast/{name}-{digest}"
    assert without_secrets("/data/a?b@c") == "/data/a?b@c"
    assert without_secrets("file:///data/a?b@c") == "file:///data/a?b@c"


@pytest.mark.parametrize(
    "variable",
    ["HOLDFAST_PROGRESS_URL", "HOLDFAST_GRACE_PERIOD", "HOLDFAST_CLOUD"],
)
def test_a_value_that_is_refused_is_told_without_credentials(variable: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Settings.load({variable: f"https://user:{SECRET}@host/?sig={SIGNATURE}"})
    _assert_clean(str(refused.value))


@pytest.mark.parametrize("place", PLACES[:3])
def test_a_start_that_fails_tells_no_secret(place: str, tmp_path: Path) -> None:
    unreachable = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    done = started(place, XDG_STATE_HOME=str(tmp_path), AWS_REGION="us-east-1", **unreachable)
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    _assert_clean(done.stdout + done.stderr)
    _assert_clean_below(tmp_path)


def _assert_clean_below(folder: Path) -> None:
    for path in folder.rglob("*"):
        _assert_clean(str(path))
        if path.is_file():
            _assert_clean(path.read_text(errors="replace"))


SAVING = """
import sys
import torch
import holdfast
model = torch.nn.Linear(2, 2)
with holdfast.Run(sys.argv[1], model=model, save_every="1 steps") as run:
    for epoch in run.epochs(1):
        for _ in run.batches(range(2)):
            run.step()
"""

OBJECTS = """
import sys
from holdfast.store import open_backend
client = open_backend(sys.argv[1])._client
for found in client.list_all("list", sys.argv[2]):
    print(found["path"])
    print(client.get("read", found["path"])[0].decode(errors="replace"))
"""


@pytest.mark.parametrize("number", range(len(HOLDING)))
def test_a_run_on_object_storage_writes_and_shows_none(
    number: int, s3_variables: dict[str, str], tmp_path: Path
) -> None:
    prefix = f"secrets/run-{os.getpid()}-{number}"
    place = HOLDING[number].format(secret=SECRET, signature=SIGNATURE, bucket=BUCKET).replace("runs/a", prefix)
    clean = f"s3://{BUCKET}/{prefix}"
    variables = {**s3_variables, "XDG_STATE_HOME": str(tmp_path / "state")}
    (tmp_path / "train.py").write_text(SAVING)
    ran = ended("run", "--dir", place, tmp_path / "train.py", place, cwd=tmp_path, **variables)
    assert ran.returncode == 0, ran.stderr
    _assert_clean(ran.stdout + ran.stderr)
    for command in (["ls"], ["ls", "--json"], ["show"], ["show", "--json"], ["doctor", "--json"], ["verify"]):
        shown = ended(command[0], place, *command[1:], **variables)
        assert clean in shown.stdout, shown.stderr
        _assert_clean(shown.stdout + shown.stderr)
    named = ended("ls", "--json", HOLDFAST_DIR=place, **variables)
    assert json.loads(named.stdout)["runs"][0]["saved_step"] == 2
    _assert_clean(named.stdout)
    listed = subprocess.run(
        [sys.executable, "-c", OBJECTS, clean, prefix],
        env={**os.environ, **s3_variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "holdfast.json" in listed.stdout
    _assert_clean(listed.stdout)
    programs = (tmp_path / "state").rglob("launch.json"), (tmp_path / "state" / "holdfast" / "starts").glob("*.json")
    for path in [path for found in programs for path in found]:  # the script's own arguments are the script's
        record = json.loads(path.read_text())
        assert record["spec"].pop("program")
        _assert_clean(json.dumps(record))
        path.unlink()
    _assert_clean_below(tmp_path / "state")
