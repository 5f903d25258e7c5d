"""Progress that is told to a server: a real one, which answers, refuses, hangs or is not there."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast.progress.push import Pusher


class Server(http.server.ThreadingHTTPServer):
    """Remembers what it was told, and answers as it is told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.told: list[tuple[str, bytes]] = []
        self.answers: list[int] = []
        self.hang = threading.Event()
        self.hang.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/progress"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.told.append((self.headers.get("Authorization", ""), data))
        self.server.hang.wait(30)
        self.send_response(self.server.answers.pop(0) if self.server.answers else 204)
        self.send_header("Location", f"{self.server.url}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.hang.set()
        one.shutdown()


def until(what) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_newest_is_told_with_the_token_of_that_moment(server, tmp_path):
    token = tmp_path / "token"
    token.write_text("first\n")
    pusher = Pusher(server.url, str(token), None, period_s=0.2)
    pusher.push(b"1")
    until(lambda: server.told)
    token.write_text("second\n")
    for number in range(2, 50):
        pusher.push(str(number).encode())
    pusher.close()
    assert server.told[0] == ("Bearer first", b"1")
    assert server.told[-1] == ("Bearer second", b"49")
    assert len(server.told) < 6


def test_a_replica_that_does_not_act_is_asked_again(server):
    server.answers = [503, 503, 204]
    Pusher(server.url, None, None).push(b"1")
    until(lambda: len(server.told) == 3)


@pytest.mark.parametrize("answer", [401, 404, 307])
def test_a_refusal_is_said_once_and_nothing_is_sent_elsewhere(server, caplog, answer):
    server.answers = [answer] * 3
    pusher = Pusher(server.url, None, None, period_s=0.05)
    for turn in range(1, 4):
        pusher.push(b"1")
        until(lambda turn=turn: len(server.told) == turn)
    pusher.close()
    assert len(server.told) == 3
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert str(answer) in said[0]


def test_a_server_that_hangs_or_is_gone_delays_nobody(server, monkeypatch):
    monkeypatch.setattr("holdfast.progress.push.TIMEOUT_S", 60.0)  # the server answers after 30 s
    server.hang.clear()
    pusher = Pusher(server.url, None, None)
    began = time.monotonic()
    pusher.push(b"1")
    until(lambda: server.told)
    pusher.push(b"2")
    pusher.close(wait_s=0.2)
    assert time.monotonic() - began < 20
    gone = Pusher("http://127.0.0.1:9/progress", None, None)
    gone.push(b"1")
    gone.close()


def test_a_token_that_is_missing_is_said(server, tmp_path, caplog):
    pusher = Pusher(server.url, str(tmp_path / "none"), None)
    pusher.push(b"1")
    pusher.close(10)
    assert "No such file" in caplog.text
    assert not server.told
