"""Notices from the metadata endpoint of a cloud's machine: AWS, Google Cloud, Azure.

Guarantees: one notice when the cloud says that it takes this machine back; no answer, no answer in
time, an error or garbage is never a notice and never ends the thread; every request has a timeout;
``stop`` ends a request that hangs.

``http.client`` and not ``urllib.request``: it knows no proxies and follows no redirects, so the question
cannot leave the machine, and its socket can be shut down from ``stop`` in the middle of a long poll.
The addresses are numbers because resolving a name has no timeout.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import logging
import math
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote, urlsplit

from holdfast.errors import ConfigError
from holdfast.locations import without_secrets
from holdfast.notice.base import Deliver, Notice

_log = logging.getLogger(__name__)

_METADATA = "http://169.254.169.254"
_BODY_MAX = 1 << 20
_QUOTE_MAX = 200


class _UnexpectedAnswerError(Exception):
    """The endpoint answered with something that is not documented."""


class _Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes
    at: float
    wall: float

    def text(self) -> str:
        """The body of a 200; raises for any other status."""
        if self.status != 200:
            raise _UnexpectedAnswerError(f"status {self.status}")
        return self.body.decode("utf-8", "replace").strip()

    def object(self) -> dict[str, Any]:
        try:
            content = json.loads(self.text())
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise _UnexpectedAnswerError("a body that is not a JSON object")
        return content

    def seconds_until(self, moment: datetime | None) -> float | None:
        """From this answer to ``moment``, by the endpoint's own clock where it tells: the one here may be wrong."""
        if moment is None:
            return None
        told = _http_date(self.headers.get("Date"))
        now = told.timestamp() if told is not None else self.wall
        return max(0.0, moment.timestamp() - now)


class _Session:
    """Requests of one life of a source; ``cut`` ends the one under way and refuses the next."""

    def __init__(self, base_url: str, request_s: float) -> None:
        address = urlsplit(base_url)
        self.kept: dict[str, str] = {}
        """What later requests need: a token, an ETag, this machine's name."""
        self._host = address.hostname or ""
        self._port = address.port
        self._prefix = address.path.rstrip("/")
        self._request_s = request_s
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._cut = False

    def request(self, method: str, path: str, headers: Mapping[str, str], wait_s: float = 0.0) -> _Answer:
        """``wait_s``: how long the endpoint may rightly take before it answers."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._request_s)
        with self._lock:
            self._connection = connection
        try:
            connection.connect()
            with self._lock:
                # From here on cut() finds a socket to shut down; a cut before it is seen here.
                if self._cut:
                    raise ConnectionAbortedError("stopped")
                connection.sock.settimeout(self._request_s + wait_s)
            connection.request(method, self._prefix + path, headers=dict(headers))
            response = connection.getresponse()
            body = response.read(_BODY_MAX)
            return _Answer(response.status, response.headers, body, time.monotonic(), time.time())
        finally:
            with self._lock:
                self._connection = None
            connection.close()

    def cut(self) -> None:
        with self._lock:
            self._cut = True
            sock = self._connection.sock if self._connection is not None else None
            if sock is not None:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass


class MetadataSource(ABC):
    """Asks a metadata endpoint every ``poll_s`` seconds until it announces the end of this machine."""

    name: ClassVar[str]
    title: ClassVar[str]
    default_poll_s: ClassVar[float]
    backoff_max_s: ClassVar[float]
    """The longest pause after failures; it has to leave something of the cloud's own grace period."""
    hint: ClassVar[str] = ""

    def __init__(self, base_url: str | None = None, poll_s: float | None = None, request_s: float = 2.0) -> None:
        self.base_url = base_url if base_url is not None else _METADATA
        self.poll_s = poll_s if poll_s is not None else self.default_poll_s
        self.request_s = request_s
        try:
            address = urlsplit(self.base_url)
            usable = address.scheme == "http" and bool(address.hostname) and address.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ConfigError(
                f"base_url={without_secrets(self.base_url)!r} for the {self.title} metadata is not usable: "
                f"expected http://HOST or http://HOST:PORT, such as {_METADATA}"
            )
        for knob, value in (("poll_s", self.poll_s), ("request_s", self.request_s)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{knob}={value!r} for the {self.title} metadata must be above 0 seconds")
        self._stop = threading.Event()
        self._session: _Session | None = None
        self._thread: threading.Thread | None = None

    @abstractmethod
    def _look(self, session: _Session) -> Notice | None:
        """Asks once. Any exception means that nothing was learned."""

    def start(self, deliver: Deliver) -> None:
        self.stop()
        self._stop = threading.Event()
        self._session = _Session(self.base_url, self.request_s)
        self._thread = threading.Thread(
            target=self._watch,
            args=(deliver, self._session, self._stop),
            name=f"holdfast-notice-{self.name}",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._session is not None:
            self._session.cut()
        if self._thread is not None and self._thread is not threading.current_thread():
            # Only a connect that hangs outlasts this; the thread then ends by itself at its timeout.
            self._thread.join(0.5)
        self._session = self._thread = None

    def _watch(self, deliver: Deliver, session: _Session, stop: threading.Event) -> None:
        failures = 0
        said: set[str] = set()
        while not stop.is_set():
            began = time.monotonic()
            notice = None
            try:
                notice = self._look(session)
                failures = 0
                pause_s = self.poll_s - (time.monotonic() - began)  # a long poll has waited already
            except Exception as error:
                if stop.is_set():
                    return
                failures += 1
                pause_s = backoff_s(failures, self.poll_s, self.backoff_max_s)
                self._complain(error, said)
            if stop.is_set():
                return
            if notice is not None:
                try:
                    deliver(notice)
                except BaseException:
                    _log.exception("the receiver of the notice %s failed", notice.detail)
                return
            stop.wait(max(0.0, pause_s))

    def _complain(self, error: Exception, said: set[str]) -> None:
        kind = str(error) if isinstance(error, _UnexpectedAnswerError) else type(error).__name__
        if kind in said:
            return
        said.add(kind)
        _log.warning(
            "the %s metadata endpoint at %s did not answer as documented: %s. It is asked again, at the latest every "
            "%g s; until it answers, this source sees no preemption. If this machine is not on %s, leave this source "
            "out.%s",
            self.title,
            without_secrets(self.base_url),
            error if str(error) else kind,
            self.backoff_max_s,
            self.title,
            f" {self.hint}" if self.hint else "",
        )

    def _notice(self, detail: str, answer: _Answer, grace_s: float | None) -> Notice:
        short = " ".join(detail.split())
        return Notice(self.name, short[:_QUOTE_MAX], answer.at, answer.wall, grace_s)


class AwsSource(MetadataSource):
    """EC2 Spot interruption notices, by IMDSv2. A rebalance recommendation takes nothing back: it is not a notice."""

    name = "aws"
    title = "AWS"
    default_poll_s = 5.0
    backoff_max_s = 60.0
    hint = "In a container the token needs --http-put-response-hop-limit 2 or more on the instance."

    _TOKEN_TTL_S = 21600

    def _look(self, session: _Session) -> Notice | None:
        answer = self._ask(session)
        if answer.status == 401:
            # The token ran out, or the machine was hibernated or migrated since.
            session.kept.pop("token", None)
            answer = self._ask(session)
        if answer.status == 404:
            return None
        content = answer.object()
        action, moment = content.get("action"), content.get("time")
        if not isinstance(action, str):
            raise _UnexpectedAnswerError("an instance-action without an action")
        grace_s = answer.seconds_until(_iso_date(moment))
        return self._notice(f"spot instance-action {action} at {moment}", answer, grace_s)

    def _ask(self, session: _Session) -> _Answer:
        if "token" not in session.kept:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._TOKEN_TTL_S)}
            token = session.request("PUT", "/latest/api/token", ttl).text()
            if not token or not token.isascii() or not token.isprintable():
                raise _UnexpectedAnswerError("a token that is not text")
            session.kept["token"] = token
        headers = {"X-aws-ec2-metadata-token": session.kept["token"]}
        return session.request("GET", "/latest/meta-data/spot/instance-action", headers)


class GcpSource(MetadataSource):
    """Preemption of Spot VMs, and host maintenance that terminates. ``poll_s`` is the length of one long poll.

    Asking for maintenance-event also has an effect: without it Compute Engine skips the advance warning.
    """

    name = "gcp"
    title = "Google Cloud"
    default_poll_s = 5.0
    backoff_max_s = 10.0

    _GRACE_S = 30.0
    _HEADERS: ClassVar[dict[str, str]] = {"Metadata-Flavor": "Google"}
    _INSTANCE = "/computeMetadata/v1/instance"

    def _look(self, session: _Session) -> Notice | None:
        if "etag" not in session.kept:
            # The first question must not wait: the value may have changed before it was asked.
            notice = self._ask(session, f"{self._INSTANCE}/preempted", 0)
            if notice is not None or "etag" not in session.kept:
                return notice
        wait_s, etag = math.ceil(self.poll_s), quote(session.kept["etag"], safe="")
        query = f"wait_for_change=true&timeout_sec={wait_s}&last_etag={etag}"
        return self._ask(session, f"{self._INSTANCE}/preempted?{query}", wait_s)

    def _ask(self, session: _Session, path: str, wait_s: float) -> Notice | None:
        answer = session.request("GET", path, self._HEADERS, wait_s)
        preempted = answer.text().upper()
        if preempted not in ("TRUE", "FALSE"):
            raise _UnexpectedAnswerError("an instance/preempted that is neither TRUE nor FALSE")
        if preempted == "TRUE":
            return self._notice("instance/preempted TRUE", answer, self._GRACE_S)
        if etag := answer.headers.get("ETag"):
            session.kept["etag"] = etag
        answer = session.request("GET", f"{self._INSTANCE}/maintenance-event", self._HEADERS)
        if answer.status != 404 and answer.text() == "TERMINATE_ON_HOST_MAINTENANCE":
            return self._notice("maintenance-event TERMINATE_ON_HOST_MAINTENANCE", answer, self._GRACE_S)
        return None


class AzureSource(MetadataSource):
    """Scheduled Events that take this VM: Preempt, and Terminate of a scale set."""

    name = "azure"
    title = "Azure"
    default_poll_s = 1.0
    backoff_max_s = 10.0

    _ENABLE_S = 120.0
    """The first request switches Scheduled Events on for this VM, which may take Azure two minutes."""
    _HEADERS: ClassVar[dict[str, str]] = {"Metadata": "true"}

    def _look(self, session: _Session) -> Notice | None:
        wait_s = 0.0 if "enabled" in session.kept else self._ENABLE_S
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        answer = session.request("GET", path, self._HEADERS, wait_s)
        events = answer.object().get("Events", [])
        if not isinstance(events, list):
            raise _UnexpectedAnswerError("Events that are not a list")
        session.kept["enabled"] = "yes"
        own_name = self._own_name(session)
        for event in events:
            if not isinstance(event, dict) or event.get("EventType") not in ("Preempt", "Terminate"):
                continue
            if event.get("EventStatus") not in ("Scheduled", "Started", None):
                continue
            resources = event.get("Resources")
            # The events of every VM in the availability set or placement group are shown to all of them.
            if own_name and isinstance(resources, list) and own_name not in (str(r).lower() for r in resources):
                continue
            grace_s = answer.seconds_until(_http_date(event.get("NotBefore")))
            return self._notice(f"{event['EventType']} {event.get('EventId')}", answer, grace_s)
        return None

    def _own_name(self, session: _Session) -> str | None:
        if "name" not in session.kept:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            try:
                session.kept["name"] = session.request("GET", path, self._HEADERS).text().lower()
            except (OSError, http.client.HTTPException, _UnexpectedAnswerError):
                return None
        return session.kept["name"]


_SOURCES: dict[str, type[MetadataSource]] = {source.name: source for source in (AwsSource, GcpSource, AzureSource)}


def cloud_source(name: str, base_url: str | None = None, poll_s: float | None = None) -> MetadataSource:
    """The source of a cloud: ``aws``, ``gcp`` or ``azure``. None: the cloud's own address, the advised interval."""
    if name not in _SOURCES:
        raise ConfigError(f"cloud={name!r} is not known; accepted are {', '.join(sorted(_SOURCES))}")
    return _SOURCES[name](base_url, poll_s)


def backoff_s(failures: int, first_s: float, max_s: float) -> float:
    """The pause after the nth failure in a row: twice as long each time, up to ``max_s``."""
    return float(min(max_s, first_s * 2 ** min(failures, 16)))


def _iso_date(value: object) -> datetime | None:
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _http_date(value: object) -> datetime | None:
    """A date as in HTTP headers (``Mon, 19 Sep 2016 18:29:47 GMT``); Azure also shows ISO dates."""
    if not isinstance(value, str) or not value:
        return None
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return _iso_date(value)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
