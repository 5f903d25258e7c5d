"""The clouds' metadata endpoints, spoken by a real server on this machine."""

from __future__ import annotations

import itertools
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest

from holdfast.errors import ConfigError
from holdfast.notice import Notice, NoticeSource, cloud_source
from holdfast.notice.cloud import AwsSource, AzureSource, GcpSource, backoff_s

POLL_S = 0.01
QUIET_S = 0.3
"""Absence cannot be awaited: this long without a notice counts as none."""


class Request(NamedTuple):
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    at: float


class Reply(NamedTuple):
    status: int
    body: str | bytes = ""
    headers: dict[str, str] = {}  # noqa: RUF012


Answer = Callable[[Request], Reply | None]
"""None: the connection is closed without a word."""


class Endpoint:
    """A metadata server whose answers a test sets by path."""

    def __init__(self, port: int = 0) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: queue.Queue[Request] = queue.Queue()
        self.closing = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                address = urlsplit(self.path)
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, address.path, parse_qs(address.query), headers, time.monotonic())
                endpoint.asked.put(request)
                answer = endpoint.answers.get(address.path, lambda _: Reply(404, "Not Found"))
                reply = answer(request)
                if reply is None:
                    self.close_connection = True
                    return
                body = reply.body if isinstance(reply.body, bytes) else reply.body.encode()
                if reply.status:
                    self.send_response_only(reply.status)
                    self.send_header("Date", reply.headers.get("Date", self.date_time_string()))
                    for name, value in reply.headers.items():
                        if name != "Date":
                            self.send_header(name, value)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                try:
                    self.wfile.write(body)
                except OSError:
                    pass

            do_PUT = do_GET

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that went away is what some tests are about

        self.server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def hang(self, request: Request) -> Reply | None:
        self.closing.wait(60)
        return None

    def wait_for(self, path: str) -> Request:
        while True:
            request = self.asked.get(timeout=20)
            if request.path == path:
                return request

    def close(self) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class Receiver:
    def __init__(self) -> None:
        self.notices: queue.Queue[Notice] = queue.Queue()
        self.sources: list[NoticeSource] = []

    def start(self, source: NoticeSource) -> None:
        self.sources.append(source)
        source.start(self.notices.put)

    def notice(self) -> Notice:
        return self.notices.get(timeout=20)

    def is_quiet(self) -> bool:
        try:
            self.notices.get(timeout=QUIET_S)
        except queue.Empty:
            return True
        return False


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.put(record.getMessage())


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    served = Endpoint()
    yield served
    served.close()


@pytest.fixture
def receiver(endpoint: Endpoint) -> Iterator[Receiver]:
    made = Receiver()
    yield made
    for source in made.sources:
        source.stop()


@pytest.fixture
def warnings() -> Iterator[Warnings]:
    handler = Warnings()
    logging.getLogger("holdfast").addHandler(handler)
    yield handler
    logging.getLogger("holdfast").removeHandler(handler)


def always(status: int, body: str | bytes = "", **headers: str) -> Answer:
    return lambda _: Reply(status, body, headers)


def in_turn(*answers: Answer) -> Answer:
    """Each answer once, then the last one for good."""
    left = list(answers)

    def answer(request: Request) -> Reply | None:
        return (left.pop(0) if len(left) > 1 else left[0])(request)

    return answer


def threads_end() -> bool:
    """Whether the threads of all sources end soon, and not only with the request or the pause they are in."""
    threads = [t for t in threading.enumerate() if t.name.startswith("holdfast-notice-")]
    for thread in threads:
        thread.join(60)
    return not any(t.is_alive() for t in threads)


def in_seconds(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


# AWS


ACTION = "/latest/meta-data/spot/instance-action"
TOKEN = "/latest/api/token"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


def serve_tokens(endpoint: Endpoint, action: Answer) -> list[str]:
    """IMDSv2: a token by PUT, 401 without a valid one. Gives the valid tokens; clearing them expires all."""
    valid: list[str] = []

    def token(request: Request) -> Reply:
        if request.method != "PUT":
            return Reply(405)
        if not 1 <= int(request.headers.get("x-aws-ec2-metadata-token-ttl-seconds", "0")) <= 21600:
            return Reply(400)
        valid.append(f"token-{time.monotonic_ns()}==")
        return Reply(200, valid[-1])

    def guarded(request: Request) -> Reply | None:
        if request.headers.get("x-aws-ec2-metadata-token") not in valid:
            return Reply(401, "Unauthorized")
        return action(request)

    endpoint.answers[TOKEN] = token
    endpoint.answers[ACTION] = guarded
    return valid


def interruption(seconds: float = 120, action: str = "terminate") -> str:
    return json.dumps({"action": action, "time": in_seconds(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")})


class TestAws:
    def test_an_interruption_is_a_notice_once_with_the_time_that_is_left(
        self, endpoint: Endpoint, receiver: Receiver
    ) -> None:
        serve_tokens(endpoint, in_turn(always(404), always(404), lambda _: Reply(200, interruption(120))))
        before = time.monotonic()
        receiver.start(AwsSource(endpoint.url, POLL_S))
        notice = receiver.notice()
        assert notice.source == "aws"
        assert "terminate" in notice.detail
        assert notice.grace_s == pytest.approx(120, abs=3)
        assert before <= notice.at <= time.monotonic()
        assert notice.wall == pytest.approx(time.time(), abs=20)
        assert receiver.is_quiet()
        assert threads_end()
        asked = [(r.method, r.path) for r in endpoint.asked.queue]
        assert asked == [("PUT", TOKEN), ("GET", ACTION), ("GET", ACTION), ("GET", ACTION)]

    def test_a_token_that_ran_out_is_replaced(self, endpoint: Endpoint, receiver: Receiver) -> None:
        valid = serve_tokens(endpoint, in_turn(always(404), lambda _: Reply(200, interruption())))
        receiver.start(AwsSource(endpoint.url, 0.2))
        endpoint.wait_for(ACTION)
        valid.clear()
        assert receiver.notice().source == "aws"
        assert len(valid) == 1

    @pytest.mark.parametrize("action", ["stop", "hibernate"])
    def test_stop_and_hibernate_are_notices_too(self, endpoint: Endpoint, receiver: Receiver, action: str) -> None:
        serve_tokens(endpoint, lambda _: Reply(200, interruption(action=action)))
        receiver.start(AwsSource(endpoint.url, POLL_S))
        assert action in receiver.notice().detail

    def test_a_rebalance_recommendation_is_not_a_notice(self, endpoint: Endpoint, receiver: Receiver) -> None:
        serve_tokens(endpoint, always(404))
        endpoint.answers[REBALANCE] = always(200, '{"noticeTime": "2020-10-27T08:22:00Z"}')
        receiver.start(AwsSource(endpoint.url, POLL_S))
        endpoint.wait_for(ACTION)
        assert receiver.is_quiet()

    def test_the_time_left_does_not_depend_on_this_machines_clock(self, endpoint: Endpoint, receiver: Receiver) -> None:
        theirs = format_datetime(in_seconds(-3600), usegmt=True)
        serve_tokens(endpoint, lambda _: Reply(200, interruption(-3600 + 90), {"Date": theirs}))
        receiver.start(AwsSource(endpoint.url, POLL_S))
        assert receiver.notice().grace_s == pytest.approx(90, abs=3)

    @pytest.mark.parametrize("moment", ["", "soon", None, 17])
    def test_an_interruption_without_a_readable_time_is_still_a_notice(
        self, endpoint: Endpoint, receiver: Receiver, moment: object
    ) -> None:
        serve_tokens(endpoint, always(200, json.dumps({"action": "terminate", "time": moment})))
        receiver.start(AwsSource(endpoint.url, POLL_S))
        assert receiver.notice().grace_s is None

    def test_a_time_in_the_past_leaves_nothing(self, endpoint: Endpoint, receiver: Receiver) -> None:
        serve_tokens(endpoint, lambda _: Reply(200, interruption(-60)))
        receiver.start(AwsSource(endpoint.url, POLL_S))
        assert receiver.notice().grace_s == 0

    def test_a_proxy_in_the_environment_is_not_used(
        self, endpoint: Endpoint, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        serve_tokens(endpoint, lambda _: Reply(200, interruption()))
        receiver.start(AwsSource(endpoint.url, POLL_S))
        assert receiver.notice().source == "aws"


class TestTrouble:
    @pytest.mark.parametrize(
        ("trouble", "said"),
        [
            pytest.param(always(503, "try later"), "status 503", id="503"),
            pytest.param(always(200, "<html>sign in</html>"), "not a JSON object", id="a page"),
            pytest.param(always(200, '["terminate"]'), "not a JSON object", id="a list"),
            pytest.param(always(200, "[" * 100_000), "not a JSON object", id="deep"),
            pytest.param(always(200, '{"action": 3}'), "without an action", id="no action"),
            pytest.param(always(200, b"\xff\xfe\x00"), "not a JSON object", id="binary"),
            pytest.param(always(302, Location="http://127.0.0.1:9/"), "status 302", id="redirect"),
            pytest.param(always(0, b"\x16\x03\x01 not http\r\n\r\n"), "not http", id="not HTTP"),
            pytest.param(lambda _: None, "closed connection", id="hung up"),
        ],
    )
    def test_an_answer_that_is_not_documented_is_no_notice_and_is_said_once(
        self, endpoint: Endpoint, receiver: Receiver, warnings: Warnings, trouble: Answer, said: str
    ) -> None:
        serve_tokens(endpoint, in_turn(trouble, trouble, trouble, lambda _: Reply(200, interruption())))
        receiver.start(AwsSource(endpoint.url, POLL_S))
        assert "terminate" in receiver.notice().detail
        assert len([r for r in endpoint.asked.queue if r.path == ACTION]) == 4
        text = warnings.texts.get_nowait()
        assert said in text
        assert endpoint.url in text
        assert warnings.texts.empty()

    def test_each_kind_of_trouble_is_said(self, endpoint: Endpoint, receiver: Receiver, warnings: Warnings) -> None:
        answers = in_turn(always(503), always(500), always(503), lambda _: Reply(200, interruption()))
        serve_tokens(endpoint, answers)
        receiver.start(AwsSource(endpoint.url, POLL_S))
        receiver.notice()
        assert ["status 503" in warnings.texts.get_nowait(), "status 500" in warnings.texts.get_nowait()] == [
            True,
            True,
        ]
        assert warnings.texts.empty()

    @pytest.mark.parametrize("token", ["", "a\nb", "\u00e9"])
    def test_a_token_that_is_no_token_is_not_used(
        self, endpoint: Endpoint, receiver: Receiver, warnings: Warnings, token: str
    ) -> None:
        serve_tokens(endpoint, lambda _: Reply(200, interruption()))
        endpoint.answers[TOKEN] = in_turn(always(200, token), endpoint.answers[TOKEN])
        receiver.start(AwsSource(endpoint.url, POLL_S))
        receiver.notice()
        assert "token" in warnings.texts.get_nowait()

    def test_an_endpoint_that_hangs_is_asked_again(
        self, endpoint: Endpoint, receiver: Receiver, warnings: Warnings
    ) -> None:
        serve_tokens(endpoint, in_turn(endpoint.hang, lambda _: Reply(200, interruption())))
        receiver.start(AwsSource(endpoint.url, POLL_S, request_s=0.2))
        assert receiver.notice().source == "aws"
        assert "timed out" in warnings.texts.get_nowait()

    def test_an_endpoint_that_is_not_there_yet_is_found_later(self, warnings: Warnings) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        receiver, source = Receiver(), AwsSource(f"http://127.0.0.1:{port}", POLL_S)
        receiver.start(source)
        assert "refused" in warnings.texts.get(timeout=20)
        endpoint = Endpoint(port)
        try:
            serve_tokens(endpoint, lambda _: Reply(200, interruption()))
            assert receiver.notice().source == "aws"
        finally:
            source.stop()
            endpoint.close()

    def test_a_receiver_that_fails_ends_only_the_source(self, endpoint: Endpoint, warnings: Warnings) -> None:
        def fail(notice: Notice) -> None:
            raise SystemExit(1)

        serve_tokens(endpoint, lambda _: Reply(200, interruption()))
        source = AwsSource(endpoint.url, POLL_S)
        source.start(fail)
        assert "failed" in warnings.texts.get(timeout=20)
        source.stop()

    def test_pauses_double_up_to_the_limit(self) -> None:
        assert [backoff_s(n, 5.0, 60.0) for n in (1, 2, 3, 4, 5, 10_000)] == [10.0, 20.0, 40.0, 60.0, 60.0, 60.0]

    def test_failures_are_followed_by_longer_pauses(self, endpoint: Endpoint, receiver: Receiver) -> None:
        serve_tokens(endpoint, always(503))
        receiver.start(AwsSource(endpoint.url, 0.02))
        times = [endpoint.wait_for(ACTION).at for _ in range(4)]
        pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert all(pause >= expected for pause, expected in zip(pauses, (0.04, 0.08, 0.16), strict=True)), pauses


class TestStopping:
    @pytest.mark.parametrize("source_type", [AwsSource, GcpSource, AzureSource])
    def test_stop_ends_a_request_that_hangs(
        self, endpoint: Endpoint, warnings: Warnings, source_type: type[AwsSource | GcpSource | AzureSource]
    ) -> None:
        for path in (TOKEN, PREEMPTED, EVENTS):
            endpoint.answers[path] = endpoint.hang
        notices: list[Notice] = []
        source = source_type(endpoint.url, request_s=60)
        source.start(notices.append)
        endpoint.asked.get(timeout=20)
        began = time.monotonic()
        source.stop()
        assert time.monotonic() - began < 15
        assert threads_end()
        assert notices == []
        assert warnings.texts.empty()

    def test_stop_ends_a_long_pause(self, endpoint: Endpoint) -> None:
        serve_tokens(endpoint, always(404))
        source = AwsSource(endpoint.url, poll_s=3600)
        source.start(lambda notice: None)
        endpoint.wait_for(ACTION)
        source.stop()
        assert threads_end()

    def test_a_source_may_start_again(self, endpoint: Endpoint, receiver: Receiver) -> None:
        serve_tokens(endpoint, lambda _: Reply(200, interruption()))
        source = AwsSource(endpoint.url, POLL_S)
        for _ in range(2):
            receiver.start(source)
            assert receiver.notice().source == "aws"
            source.stop()

    def test_a_source_may_be_stopped_by_its_receiver(self, endpoint: Endpoint) -> None:
        stopped = threading.Event()
        serve_tokens(endpoint, lambda _: Reply(200, interruption()))
        source = AwsSource(endpoint.url, POLL_S)

        def stop(notice: Notice) -> None:
            source.stop()
            stopped.set()

        source.start(stop)
        assert stopped.wait(20)


# Google Cloud


PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"


class Google:
    """The metadata server's values with their ETags, and requests that wait for a change."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._changed = threading.Condition()
        self._value = "FALSE"
        self._etag = 1
        self.waiting = threading.Event()
        endpoint.answers[PREEMPTED] = self._guarded(self._preempted)
        self.set_maintenance("NONE")

    def preempt(self) -> None:
        with self._changed:
            self._value, self._etag = "TRUE", self._etag + 1
            self._changed.notify_all()

    def set_maintenance(self, value: str) -> None:
        self._endpoint.answers[MAINTENANCE] = self._guarded(always(200, value))

    def _guarded(self, answer: Answer) -> Answer:
        return lambda r: answer(r) if r.headers.get("metadata-flavor") == "Google" else Reply(403)

    def _preempted(self, request: Request) -> Reply:
        with self._changed:
            if request.query.get("wait_for_change") == ["true"]:
                [etag], [timeout_s] = request.query["last_etag"], request.query["timeout_sec"]
                self.waiting.set()
                self._changed.wait_for(lambda: f"e/{self._etag}" != etag, float(timeout_s))
            return Reply(200, self._value, {"ETag": f"e/{self._etag}", "Metadata-Flavor": "Google"})


class TestGcp:
    def test_a_preemption_ends_the_long_poll_and_is_a_notice(self, endpoint: Endpoint, receiver: Receiver) -> None:
        google = Google(endpoint)
        receiver.start(GcpSource(endpoint.url, poll_s=30))
        assert google.waiting.wait(20)
        before = time.monotonic()
        google.preempt()
        notice = receiver.notice()
        assert (notice.source, notice.detail, notice.grace_s) == ("gcp", "instance/preempted TRUE", 30.0)
        assert notice.at - before < 20
        assert receiver.is_quiet()

    def test_stop_ends_a_long_poll(self, endpoint: Endpoint, warnings: Warnings) -> None:
        google, notices = Google(endpoint), list[Notice]()
        source = GcpSource(endpoint.url, poll_s=30)
        source.start(notices.append)
        assert google.waiting.wait(20)
        began = time.monotonic()
        source.stop()
        assert time.monotonic() - began < 15
        assert threads_end()
        google.preempt()
        assert notices == []
        assert warnings.texts.empty()

    def test_a_preemption_before_the_start_is_seen(self, endpoint: Endpoint, receiver: Receiver) -> None:
        Google(endpoint).preempt()
        receiver.start(GcpSource(endpoint.url, poll_s=30))
        assert receiver.notice().grace_s == 30.0

    def test_maintenance_that_terminates_is_a_notice_and_migration_is_not(
        self, endpoint: Endpoint, receiver: Receiver
    ) -> None:
        google = Google(endpoint)
        google.set_maintenance("MIGRATE_ON_HOST_MAINTENANCE")
        receiver.start(GcpSource(endpoint.url, poll_s=0.05))
        endpoint.wait_for(MAINTENANCE)
        assert receiver.is_quiet()
        google.set_maintenance("TERMINATE_ON_HOST_MAINTENANCE")
        notice = receiver.notice()
        assert (notice.source, notice.grace_s) == ("gcp", 30.0)
        assert "TERMINATE_ON_HOST_MAINTENANCE" in notice.detail

    def test_a_server_that_does_not_wait_is_not_flooded(self, endpoint: Endpoint, receiver: Receiver) -> None:
        endpoint.answers[PREEMPTED] = always(200, "FALSE", ETag="same")
        receiver.start(GcpSource(endpoint.url, poll_s=3600))
        assert "wait_for_change" not in endpoint.wait_for(PREEMPTED).query
        assert endpoint.wait_for(PREEMPTED).query["last_etag"] == ["same"]
        assert receiver.is_quiet()
        assert PREEMPTED not in [r.path for r in endpoint.asked.queue]

    @pytest.mark.parametrize("value", ["", "maybe", "<html>"])
    def test_garbage_is_not_a_notice(
        self, endpoint: Endpoint, receiver: Receiver, warnings: Warnings, value: str
    ) -> None:
        endpoint.answers[PREEMPTED] = in_turn(always(200, value), always(200, "TRUE"))
        receiver.start(GcpSource(endpoint.url, POLL_S))
        assert receiver.notice().source == "gcp"
        assert "neither TRUE nor FALSE" in warnings.texts.get_nowait()


# Azure


EVENTS = "/metadata/scheduledevents"
NAME = "/metadata/instance/compute/name"


def event(kind: str = "Preempt", vm: str = "worker_0", seconds: float = 30, **more: object) -> dict[str, object]:
    return {
        "EventId": "f020ba2e-3bc0-4c40-a10b-86575a9eabd5",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": [vm],
        "EventStatus": "Scheduled",
        "NotBefore": format_datetime(in_seconds(seconds), usegmt=True),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
        **more,
    }


def schedule(endpoint: Endpoint, *events: object) -> None:
    content = json.dumps({"DocumentIncarnation": 1, "Events": events})

    def answer(request: Request) -> Reply:
        if request.headers.get("metadata") != "true" or request.query != {"api-version": ["2020-07-01"]}:
            return Reply(400)
        return Reply(200, content)

    endpoint.answers[EVENTS] = answer


def name_vm(endpoint: Endpoint, name: str) -> None:
    def answer(request: Request) -> Reply:
        if request.headers.get("metadata") != "true" or request.query.get("format") != ["text"]:
            return Reply(400)
        return Reply(200, name)

    endpoint.answers[NAME] = answer


class TestAzure:
    @pytest.mark.parametrize("kind", ["Preempt", "Terminate"])
    def test_an_event_that_takes_this_vm_is_a_notice_with_the_time_that_is_left(
        self, endpoint: Endpoint, receiver: Receiver, kind: str
    ) -> None:
        name_vm(endpoint, "Worker_0")
        schedule(endpoint)
        receiver.start(AzureSource(endpoint.url, POLL_S))
        endpoint.wait_for(EVENTS)
        schedule(endpoint, event("Freeze"), event(kind, seconds=45))
        notice = receiver.notice()
        assert notice.source == "azure"
        assert notice.detail == f"{kind} f020ba2e-3bc0-4c40-a10b-86575a9eabd5"
        assert notice.grace_s == pytest.approx(45, abs=3)
        assert receiver.is_quiet()

    @pytest.mark.parametrize(
        "other",
        [
            event(vm="worker_1"),
            event("Freeze"),
            event("Reboot"),
            event("Redeploy"),
            event(EventStatus="Completed"),
            "Preempt",
            None,
            {},
        ],
        ids=lambda other: str(other)[:60],
    )
    def test_other_vms_and_other_events_are_not_notices(
        self, endpoint: Endpoint, receiver: Receiver, other: object
    ) -> None:
        name_vm(endpoint, "worker_0")
        schedule(endpoint, other)
        receiver.start(AzureSource(endpoint.url, POLL_S))
        endpoint.wait_for(EVENTS)
        assert receiver.is_quiet()
        schedule(endpoint, other, event())
        assert receiver.notice().source == "azure"

    @pytest.mark.parametrize("answer", [always(404), always(503), lambda _: None], ids=["404", "503", "hung up"])
    def test_a_vm_that_does_not_know_its_name_takes_every_event_for_its_own(
        self, endpoint: Endpoint, receiver: Receiver, answer: Answer
    ) -> None:
        endpoint.answers[NAME] = answer
        schedule(endpoint, event(vm="worker_7"))
        receiver.start(AzureSource(endpoint.url, POLL_S))
        assert receiver.notice().source == "azure"

    def test_an_event_that_has_begun_has_no_time_of_its_own(self, endpoint: Endpoint, receiver: Receiver) -> None:
        schedule(endpoint, event(EventStatus="Started", NotBefore=""))
        receiver.start(AzureSource(endpoint.url, POLL_S))
        assert receiver.notice().grace_s is None

    def test_the_first_answer_may_take_long_because_it_switches_the_service_on(
        self, endpoint: Endpoint, receiver: Receiver, warnings: Warnings
    ) -> None:
        schedule(endpoint, event())
        ready, slow = threading.Event(), endpoint.answers[EVENTS]

        def switched_on(request: Request) -> Reply | None:
            ready.wait(20)
            return slow(request)

        endpoint.answers[EVENTS] = switched_on
        receiver.start(AzureSource(endpoint.url, POLL_S, request_s=0.1))
        endpoint.wait_for(EVENTS)
        assert receiver.is_quiet()
        ready.set()
        assert receiver.notice().source == "azure"
        assert warnings.texts.empty()

    @pytest.mark.parametrize("content", ["", "{", '{"Events": "none"}', '{"Events": {"EventType": "Preempt"}}'])
    def test_garbage_is_not_a_notice(
        self, endpoint: Endpoint, receiver: Receiver, warnings: Warnings, content: str
    ) -> None:
        endpoint.answers[EVENTS] = always(200, content)
        receiver.start(AzureSource(endpoint.url, POLL_S))
        assert "Azure" in warnings.texts.get(timeout=20)
        assert receiver.is_quiet()
        schedule(endpoint, event())
        assert receiver.notice().source == "azure"


class TestChoosing:
    @pytest.mark.parametrize(("name", "kind"), [("aws", AwsSource), ("gcp", GcpSource), ("azure", AzureSource)])
    def test_a_cloud_is_chosen_by_name(self, name: str, kind: type) -> None:
        source = cloud_source(name, "http://127.0.0.1:1", 2.5)
        assert type(source) is kind
        assert (source.base_url, source.poll_s) == ("http://127.0.0.1:1", 2.5)

    def test_the_address_of_every_cloud_is_the_link_local_one(self) -> None:
        assert {cloud_source(name).base_url for name in ("aws", "gcp", "azure")} == {"http://169.254.169.254"}

    def test_an_unknown_cloud_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"cloud='oracle'.*aws, azure, gcp"):
            cloud_source("oracle")

    @pytest.mark.parametrize(
        "url", ["", "169.254.169.254", "https://169.254.169.254", "http://", "http://h:x", "file:///a"]
    )
    def test_an_address_that_is_none_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigError, match="base_url="):
            cloud_source("aws", url)

    @pytest.mark.parametrize("poll_s", [0.0, -1.0])
    def test_a_poll_interval_that_is_no_time_is_refused(self, poll_s: float) -> None:
        with pytest.raises(ConfigError, match="poll_s="):
            cloud_source("gcp", poll_s=poll_s)
