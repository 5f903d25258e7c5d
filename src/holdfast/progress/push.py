"""Tells the progress to an address, such as that of the operator in a cluster where nobody may look into the pods.

On a thread of its own: a server that hangs costs the training nothing. Only the newest progress is kept to be told, at
most once in ten seconds. Who tells it is known from a token that is read anew each time, since Kubernetes renews it.
"""

from __future__ import annotations

import logging
import ssl
import threading
import urllib.error
import urllib.request

from holdfast.locations import without_secrets

log = logging.getLogger(__name__)

PERIOD_S = 10.0
TIMEOUT_S = 5.0
TRIES = 10
"""In a row: one of the operator's replicas takes it, and which one is asked is chance."""
_PAUSE_S = 0.2


class Pusher:
    """Tells the newest of what it is given, until it is closed."""

    def __init__(self, url: str, token_file: str | None, authority: str | None, period_s: float = PERIOD_S) -> None:
        """``authority``: certificates, as PEM text, one of which the server's must be signed by; None: the system's."""
        self._url = url
        self._token_file = token_file
        self._period_s = period_s
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirect()]
        if url.startswith("https:"):
            handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cadata=authority)))
        self._opener = urllib.request.build_opener(*handlers)
        self._newest: bytes | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._said: str | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-push", daemon=True)
        self._thread.start()

    def push(self, data: bytes) -> None:
        """Tell this at the next opportunity."""
        with self._changed:
            self._newest = data
            self._changed.notify_all()

    def close(self, wait_s: float = 2.0) -> None:
        """Tell the last word, if that does not take long."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._closed)
                data, self._newest = self._newest, None
            if data is None:
                return
            self._tell(data)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, self._period_s)

    def _tell(self, data: bytes) -> None:
        problem: str | None = None
        for turn in range(TRIES):
            if turn:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _PAUSE_S)
            try:
                self._post(data)
                self._said = None
                return
            except urllib.error.HTTPError as error:
                problem = f"it answers {error.code} {error.reason}"
                error.close()
                if error.code != 503:  # that replica does not act, another does
                    break
            except (OSError, ValueError) as error:
                problem = str(getattr(error, "reason", None) or error)
        if problem != self._said:
            self._said = problem
            log.warning("cannot tell the progress to %s: %s. Training goes on", without_secrets(self._url), problem)

    def _post(self, data: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        if self._token_file is not None:
            with open(self._token_file, encoding="ascii") as file:
                headers["Authorization"] = f"Bearer {file.read().strip()}"
        request = urllib.request.Request(self._url, data, headers, method="POST")
        with self._opener.open(request, timeout=TIMEOUT_S):
            pass


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A token is for the address that was given, and for no other."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None
