"""Values of variables and passwords of indexes stand in no record of a job, and in nobody's arguments."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from holdfast.errors import HoldfastError
from holdfast.kubeflow import records
from holdfast.launch import records as launch
from holdfast.launch import supervisor
from tests.unit.kubeflow.conftest import state
from tests.unit.kubeflow.test_records import interpreter, record, told

__all__ = ("interpreter", "state")

SECRET = "wJalrXUtnFEMIK7MDENG"


def written_below(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


@pytest.mark.core
def test_a_job_record_keeps_names_of_variables_and_not_values(
    interpreter: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMBIENT_TOKEN", SECRET)
    url = f"https://user:{SECRET}@index.example/simple"
    env = {"OWN_TOKEN": SECRET, "HOLDFAST_DIR": f"s3://key:{SECRET}@bucket/x", "HOLDFAST_KEEP": "2"}
    job = records.submit(record(env=env, index_urls=[url]), "pass")
    assert {f"OWN_TOKEN={SECRET}", f"AMBIENT_TOKEN={SECRET}", "HOLDFAST_KEEP=2"} <= set(told(interpreter))
    assert SECRET not in written_below(state)
    assert SECRET not in repr(records.read_record("job"))
    assert records.read_record("job").names == ["OWN_TOKEN"]
    assert records.read_record("job").env == {"HOLDFAST_DIR": "s3://bucket/x", "HOLDFAST_KEEP": "2"}

    # Its launcher is killed, and this process forgets: now another one resumes it.
    assert job.launcher is not None
    os.kill(job.launcher["pid"], signal.SIGKILL)
    records._children["job"].wait()
    records._submitted.clear()
    monkeypatch.delenv("AMBIENT_TOKEN")
    with pytest.raises(HoldfastError, match=r"was submitted with OWN_TOKEN in its env.* set it here"):
        records.resume("job")
    monkeypatch.setenv("OWN_TOKEN", "of the resumer")
    assert records.resume("job").is_alive()
    assert {"OWN_TOKEN=of the resumer", "HOLDFAST_KEEP=2"} <= set(told(interpreter))


def test_a_launch_record_keeps_settings_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("HOLDFAST_FALLBACK_DIR", f"s3://key:{SECRET}@bucket/x")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    spec = launch.LaunchSpec(program=["train.py"], environ=supervisor.carried_environ())
    assert spec.environ["OMP_NUM_THREADS"] == "3"
    assert spec.environ["HOLDFAST_FALLBACK_DIR"] == "s3://bucket/x"
    assert SECRET not in repr(spec)
    for name, value in spec.environ.items():
        assert name in launch.carried_names(), value


@pytest.fixture
def index() -> Iterator[tuple[str, list[str], list[str]]]:
    """An index that wants a password: its URL, the passwords it was given, and the arguments that held one."""
    passwords: list[str] = []
    leaks: list[str] = []

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = self.headers.get("Authorization", "")
            if not given:
                self.send_response(401)
                self.send_header("WWW-Authenticate", "Basic realm=index")
                self.end_headers()
                return
            passwords.append(base64.b64decode(given.split()[1]).decode())
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    line = path.read_text(errors="replace").replace("\0", " ")
                    leaks.extend([line] if SECRET in line else [])
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://user:{SECRET}@127.0.0.1:{server.server_port}/simple", passwords, leaks
    server.shutdown()
    server.server_close()


def test_the_password_of_an_index_reaches_it_and_no_arguments(
    state: Path, index: tuple[str, list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, passwords, leaks = index
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    job = records.submit(record(packages=["no-such-package"], index_urls=[url, url]), "pass")
    limit = time.monotonic() + 180
    while records.read_record("job").is_alive() and records.read_record("job").code is None:
        assert time.monotonic() < limit
        time.sleep(0.1)
    assert f"user:{SECRET}" in passwords, Path(job.log).read_text()
    assert leaks == []
    assert "could not be installed" in Path(job.log).read_text()
    assert SECRET not in written_below(state)
    records.delete("job")
