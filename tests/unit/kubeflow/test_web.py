"""``holdfast jobs page``: jobs are paused and resumed by a click, by whoever has the key and by nobody else."""

from __future__ import annotations

import http.cookiejar
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubeflow.trainer import LocalProcessBackendConfig, TrainerClient

from holdfast.errors import JobNotFoundError
from holdfast.kubeflow import Progress, TransformersTrainer, progress, wait_for
from holdfast.kubeflow.page import Page
from tests.unit.kubeflow import functions

pytestmark = pytest.mark.core(0)

PAGE = [sys.executable, "-m", "holdfast.cli", "jobs", "page"]


@pytest.fixture
def address(state: Path) -> Iterator[str]:
    process = subprocess.Popen([*PAGE, "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().split()[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()


class Browser:
    """Keeps cookies, follows redirections and clicks what can be clicked."""

    def __init__(self, address: str) -> None:
        self.opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
        self.text = self.open(address)
        self.home = address.partition("?")[0]

    def open(self, address: str, data: bytes | None = None) -> str:
        with self.opener.open(address, data, timeout=20) as answer:
            return answer.read().decode()

    def buttons(self) -> dict[str, bool]:
        """Which there are, and whether they can be clicked."""
        found = re.findall(r'action="(\w+)"><button [^>]*?( disabled)?>', self.open(self.home + "jobs"))
        return {action: not disabled for action, disabled in found}

    def click(self, action: str, name: str) -> None:
        assert self.buttons()[action]
        self.text = self.open(self.home + action, urllib.parse.urlencode({"name": name}).encode())

    def until(self, words: str) -> str:
        limit = time.monotonic() + 60
        while words not in (text := self.open(self.home + "jobs")):
            assert time.monotonic() < limit, text
            time.sleep(0.2)
        return text


def test_a_job_is_paused_and_resumed_by_a_click(address: str, state: Path) -> None:
    browser = Browser(address)
    assert "There are no jobs." in browser.text
    client = TrainerClient(LocalProcessBackendConfig())
    given = {"steps": 5000, "pause_s": 0.05}
    name = client.train(trainer=TransformersTrainer(func=functions.tiny, func_args=given, output_dir="out"))
    wait_for(name, step=3, timeout_s=120)
    assert name in browser.until(">Running<")
    assert browser.buttons() == {"pause": True, "resume": False}
    browser.click("pause", name)
    browser.until(">Paused<")
    assert browser.buttons() == {"pause": False, "resume": True}
    stopped = progress(name).step
    browser.click("resume", name)
    assert wait_for(name, step=stopped + 2, timeout_s=120).resumed_from == f"checkpoint-{stopped}"
    browser.until(f"resumed from <b>checkpoint-{stopped}</b>")
    client.delete_job(name)
    browser.until("There are no jobs.")


class Hostile:
    """Jobs whose names and words are markup; what was asked of them is kept."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def names(self) -> list[str]:
        return ['"><script>name', "nonsense"]

    def progress(self, name: str) -> Progress:
        if name not in self.names():
            raise JobNotFoundError(name)
        if name == "nonsense":
            raise ValueError("could not convert it")
        return Progress(name, "Running", {"loss": "<script>loss", "percentComplete": "?"})

    def grace_s(self, name: str) -> float:
        return 1.0

    def pause(self, name: str) -> None:
        self.asked.append(name)
        raise TimeoutError("<script>not paused")


@pytest.fixture
def hostile() -> Iterator[Any]:
    jobs = Hostile()
    with Page(jobs) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        yield jobs, page
        page.shutdown()


@pytest.mark.parametrize("path", ["", "jobs", "?key=wrong", "?key=", "nothing", "pause"])
def test_nobody_without_the_key_sees_or_does_anything(hostile: Any, path: str) -> None:
    jobs, page = hostile
    home = page.url.partition("?")[0]
    for data in (None, urllib.parse.urlencode({"name": jobs.names()[0]}).encode()):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(home + path, data, timeout=20)
        assert refused.value.code == 403
        assert b"Open the address" in refused.value.read()
    assert jobs.asked == []


def test_markup_of_a_job_stays_text(hostile: Any) -> None:
    jobs, page = hostile
    browser = Browser(page.url)
    browser.click("pause", jobs.names()[0])
    text = browser.until("&lt;script&gt;not paused")
    assert jobs.asked == jobs.names()[:1]
    assert "<script>" not in text
    assert "could not convert" in text, "a job that makes no sense is shown as such, beside the others"


@pytest.mark.parametrize(
    ("path", "data", "code"),
    [("nothing", None, 404), ("delete", b"name=x", 404), ("pause", b"x" * 10_001, 400), ("pause", b"name=other", 200)],
)
def test_what_the_page_does_not_know_changes_nothing(hostile: Any, path: str, data: bytes | None, code: int) -> None:
    jobs, page = hostile
    browser = Browser(page.url)
    try:
        browser.open(browser.home + path, data)
        got = 200
    except urllib.error.HTTPError as refused:
        got = refused.code
    assert got == code
    assert jobs.asked == []


def test_a_port_that_is_taken_is_said_in_one_line(state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*PAGE, "--port", port], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"--port={port} is not accepted: Address already in use" in done.stderr
