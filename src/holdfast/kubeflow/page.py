"""The jobs on a web page, each with two buttons: ``holdfast jobs page``.

It is for the person who starts it: it answers whoever has the address with the key in it, and nobody else.
"""

from __future__ import annotations

import contextlib
import hmac
import html
import secrets
import threading
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from holdfast.errors import HoldfastError
from holdfast.kubeflow import jobs
from holdfast.kubeflow.view import as_html

_LONGEST_FORM = 10_000
_ACTIONS = {
    "pause": ("Pause", "Save, and stop", (jobs.RUNNING,)),
    "resume": ("Resume", "Go on from the newest checkpoint", (jobs.PAUSED,)),
}
_SHELL = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>holdfast: jobs</title>
<meta name="viewport" content="width=device-width">
<noscript><meta http-equiv="refresh" content="5"></noscript>
<style>
body {{ font-family: sans-serif; margin: 2em }} section {{ margin-bottom: 1.5em }} form {{ display: inline }}
</style>
</head><body><h1>Jobs</h1><main id="jobs">{jobs}</main>
<script nonce="{nonce}">
setInterval(async () => {{
  const answer = await fetch("jobs").catch(() => null);
  const text = answer && answer.ok ? await answer.text() : "<p>The page is no longer served.</p>";
  document.getElementById("jobs").innerHTML = text;
}}, 2000);
</script></body></html>
"""


class Page(ThreadingHTTPServer):
    """Serves the page until it is shut down."""

    daemon_threads = True

    def __init__(self, found: jobs.Jobs, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), _Handler)
        self.key = secrets.token_urlsafe(24)
        self._jobs = found
        self._told: dict[str, str] = {}
        """What became of the last click on a job."""

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/?key={self.key}"

    def content(self) -> str:
        """All jobs, as HTML. What they say of themselves is not trusted."""
        try:
            names = self._jobs.names()
        except (HoldfastError, OSError) as error:
            return f"<p>{html.escape(str(error))}</p>"
        return "\n".join(map(self._section, names)) or "<p>There are no jobs.</p>"

    def _section(self, name: str) -> str:
        told = html.escape(self._told.get(name, ""))
        try:
            now = self._jobs.progress(name)
            shown = as_html(now)
        except (HoldfastError, OSError, ValueError) as error:  # deleted meanwhile, or a progress that makes no sense
            return f"<section><b>{html.escape(name)}</b> {html.escape(str(error))}</section>"
        buttons = "".join(
            f'<form method="post" action="{action}"><button name="name" value="{html.escape(name)}" title="{title}"'
            f"{'' if now.state in states else ' disabled'}>{label}</button></form> "
            for action, (label, title, states) in _ACTIONS.items()
        )
        return f"<section>{shown}{buttons}{told}</section>"

    def click(self, action: str, name: str) -> None:
        """Begin to pause or resume a job: a save takes longer than a page may."""

        def act() -> None:
            try:
                self._jobs.progress(name)  # is there such a job?
            except (HoldfastError, OSError, ValueError):
                return
            self._told[name] = "Pausing: the job saves first" if action == "pause" else "Resuming"
            try:
                if action == "pause":
                    jobs.paused(self._jobs, name, None)
                else:
                    self._jobs.resume(name)
                self._told.pop(name, None)
            except (HoldfastError, OSError) as error:
                self._told[name] = str(error)

        threading.Thread(target=act, name=f"holdfast-{action}-{name}", daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Page
    server_version, sys_version = "holdfast", ""
    timeout = 30

    @property
    def _cookie(self) -> str:
        return f"holdfast-{self.server.server_address[1]}"  # a browser sends cookies to all ports of a machine

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        given = parse_qs(address.query).get("key", [""])[0]
        if address.path == "/" and self._is_key(given):
            cookie = f"{self._cookie}={self.server.key}; HttpOnly; SameSite=Strict; Path=/"
            self._answer(HTTPStatus.SEE_OTHER, "", {"Location": "/", "Set-Cookie": cookie})
        elif self._is_known() and address.path == "/":
            nonce = secrets.token_urlsafe(16)
            shell = _SHELL.format(jobs=self.server.content(), nonce=nonce)
            self._answer(HTTPStatus.OK, shell, nonce=nonce)
        elif self._is_known() and address.path == "/jobs":
            self._answer(HTTPStatus.OK, self.server.content())
        elif self._is_known():
            self._answer(HTTPStatus.NOT_FOUND, "There is no such page.")

    def do_POST(self) -> None:
        if not self._is_known():
            return
        action = self.path.lstrip("/")
        length = self.headers.get("Content-Length", "")
        if action not in _ACTIONS:
            self._answer(HTTPStatus.NOT_FOUND, "There is no such action.")
        elif not length.isdecimal() or int(length) > _LONGEST_FORM:
            self._answer(HTTPStatus.BAD_REQUEST, "The name of a job is missing.")
        else:
            form = parse_qs(self.rfile.read(int(length)).decode(errors="replace"))
            self.server.click(action, form.get("name", [""])[0])
            self._answer(HTTPStatus.SEE_OTHER, "", {"Location": "/"})

    def _is_key(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.server.key.encode())

    def _is_known(self) -> bool:
        """Whether the browser has shown the key; answers it if not."""
        cookies: SimpleCookie = SimpleCookie()
        with contextlib.suppress(CookieError):
            cookies.load(self.headers.get("Cookie", ""))
        shown = cookies.get(self._cookie)
        if shown is not None and self._is_key(shown.value):
            return True
        self._answer(HTTPStatus.FORBIDDEN, "Open the address that <code>holdfast jobs page</code> has printed.")
        return False

    def _answer(self, status: HTTPStatus, text: str, headers: dict[str, str] | None = None, nonce: str = "") -> None:
        body = text.encode()
        script = f"script-src 'nonce-{nonce}'; connect-src 'self'; " if nonce else ""
        policy = f"default-src 'none'; {script}style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'"
        self.send_response(status)
        for name, value in {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal is for the address."""
