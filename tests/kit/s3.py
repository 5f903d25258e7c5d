"""A real S3 server on loopback, and a proxy before it that misbehaves over real sockets."""

from __future__ import annotations

import contextlib
import lzma
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit import ROOT
from tests.kit.ports import free_port

ACCESS_KEY = "AKIAMARKERACCESS"
SECRET_KEY = "markerSecretNeverToBeSeen"
BUCKET = "bucket"


def find_versitygw(unpack_into: Path) -> str:
    """The program, or a skip that says how to get it."""
    named = os.environ.get("HOLDFAST_TEST_VERSITYGW") or shutil.which("versitygw")
    if named:
        return named
    packed = ROOT.parent / "shared/kube/bin/versitygw.xz"
    if packed.is_file():
        program = unpack_into / "versitygw"
        with lzma.open(packed) as source, program.open("wb") as target:
            shutil.copyfileobj(source, target)
        program.chmod(0o755)
        return str(program)
    pytest.skip(
        "needs the S3 server versitygw: install it from github.com/versity/versitygw, or set HOLDFAST_TEST_VERSITYGW"
    )


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """versitygw on a folder; gives its endpoint."""
    program = find_versitygw(folder)
    (folder / "data" / BUCKET).mkdir(parents=True)
    port = free_port()
    process = subprocess.Popen(
        [program, "--port", f"127.0.0.1:{port}", "--region", "us-east-1", "--quiet", "posix", str(folder / "data")],
        env={**os.environ, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 20.0
        while True:
            assert process.poll() is None, "versitygw ended"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
                break
            assert time.monotonic() < until, "versitygw does not listen"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


Policy = Callable[[int, str], str]
"""Number of the request, and its first line; the answer is one of the words below."""

FORWARD = "forward"
UNAVAILABLE = "unavailable"
"""Answer 503."""
HANG = "hang"
"""Take the request, never answer."""
CUT = "cut"
"""Close the connection in the middle of the request's body."""
LOSE_ANSWER = "lose answer"
"""Pass the request on, then close the connection instead of answering."""


class FaultyProxy:
    """Sits before an S3 server and does to each request what the policy says."""

    def __init__(self, upstream: str, policy: Policy) -> None:
        self.policy = policy
        self.requests: list[str] = []
        self._upstream = ("127.0.0.1", int(upstream.rpartition(":")[2])) if upstream else None
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                data = connection.recv(65536)
                if not data:
                    return
                head += data
            head, _, body = head.partition(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            with self._lock:
                number = len(self.requests)
                self.requests.append(lines[0])
            length = next((int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:")), 0)
            action = self.policy(number, lines[0])
            if action == HANG:
                while connection.recv(65536):
                    pass
                return
            if action == CUT:
                while len(body) < length // 2:
                    body += connection.recv(min(65536, length // 2 - len(body)))
                connection.close()
                return
            while len(body) < length:
                body += connection.recv(65536)
            if action == UNAVAILABLE:
                text = b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"
                connection.sendall(
                    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Type: application/xml\r\n"
                    b"Content-Length: %d\r\n\r\n%s" % (len(text), text)
                )
                connection.close()
                return
            assert self._upstream is not None
            kept = [line for line in lines if not line.lower().startswith("connection:")]
            with socket.create_connection(self._upstream) as upstream:
                upstream.sendall("\r\n".join([*kept, "Connection: close"]).encode("latin-1") + b"\r\n\r\n" + body)
                while data := upstream.recv(1 << 20):
                    if action == FORWARD:
                        connection.sendall(data)
            connection.close()
