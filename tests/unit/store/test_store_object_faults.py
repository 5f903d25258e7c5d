"""Object stores that fail, over real sockets: an error in time, and nothing half-done is visible."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.base.process import Owner
from holdfast.errors import CheckpointExistsError, StoreError, StoreUnavailableError
from holdfast.store.checkpoints import clean, retain, verify, whole
from holdfast.store.object import ObjectBackend
from holdfast.testing.backend_contract import manifest_for, read_back, sample, save_checkpoint, write_file
from tests.kit.s3 import CUT, FORWARD, HANG, LOSE_ANSWER, UNAVAILABLE, FaultyProxy

TIMEOUT_S = 1.5
"""Where nothing is answered."""
PATIENT_S = 6.0
"""Where some calls have to come through, by way of a proxy in this very process."""

OPERATIONS: dict[str, Callable[[ObjectBackend], Any]] = {
    "names": lambda backend: backend.names(),
    "read_manifest": lambda backend: backend.read_manifest("checkpoint-1"),
    "sizes": lambda backend: backend.sizes("checkpoint-1"),
    "read_into": lambda backend: backend.read_into("checkpoint-1", "model", 0, memoryview(bytearray(20 << 20))),
    "begin": lambda backend: backend.begin("checkpoint-2"),
    "write a small file": lambda backend: write_file(backend, "checkpoint-2", "model", b"small"),
    "write a large file": lambda backend: write_file(backend, "checkpoint-2", "model", bytes(20 << 20)),
    "adopt": lambda backend: backend.adopt("checkpoint-2", "model", "checkpoint-1", "model"),
    "put_part": lambda backend: backend.put_part("checkpoint-2", "rank-0", b""),
    "claim_part": lambda backend: backend.claim_part("checkpoint-2", "leader", b""),
    "read_parts": lambda backend: backend.read_parts("checkpoint-2"),
    "commit": lambda backend: backend.commit("checkpoint-2", manifest_for(2, []).encode()),
    "amend": lambda backend: backend.amend("checkpoint-1", manifest_for(1, []).encode()),
    "discard": lambda backend: backend.discard("checkpoint-1"),
    "set_aside": lambda backend: backend.set_aside("checkpoint-1"),
    "acquire": lambda backend: backend.acquire(Owner("run")),
}


def through(
    proxy: FaultyProxy, uri: str, monkeypatch: pytest.MonkeyPatch, timeout_s: float = PATIENT_S
) -> ObjectBackend:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    return ObjectBackend(uri, timeout_s=timeout_s)


@pytest.mark.parametrize("fault", [UNAVAILABLE, HANG])
def test_a_store_that_does_not_serve_is_an_error_in_time(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def attempt(operation: str) -> tuple[float, BaseException | None]:
        began = time.monotonic()
        try:
            OPERATIONS[operation](backends[operation])
        except BaseException as error:
            return time.monotonic() - began, error
        return time.monotonic() - began, None

    with FaultyProxy("", lambda number, line: fault) as proxy:
        backends = {operation: through(proxy, s3_uri, monkeypatch, TIMEOUT_S) for operation in OPERATIONS}
        with ThreadPoolExecutor(len(OPERATIONS)) as pool:
            outcomes = dict(zip(OPERATIONS, pool.map(attempt, OPERATIONS), strict=True))
    for operation, (seconds, error) in outcomes.items():
        assert isinstance(error, StoreUnavailableError), (operation, error)
        # A large file is written in several calls, and then aborted.
        assert seconds < TIMEOUT_S * (2.0 if operation == "write a large file" else 1.0) + 15.0, operation
        assert s3_uri in str(error)
        assert proxy.endpoint in str(error)
        assert ("503" in str(error)) == (fault == UNAVAILABLE), (operation, error)


def test_a_port_where_nobody_listens_is_an_error_at_once(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="refused"):
        ObjectBackend(s3_uri).names()
    assert time.monotonic() - began < 15.0


def test_a_store_that_fails_twice_is_asked_again(s3_env: str, s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, int] = {}

    def twice(number: int, line: str) -> str:
        seen[line] = seen.get(line, 0) + 1
        return UNAVAILABLE if seen[line] <= 2 else FORWARD

    with FaultyProxy(s3_env, twice) as proxy:
        backend = through(proxy, s3_uri, monkeypatch, timeout_s=20.0)
        files = {"model": sample("model", 9 << 20), "rng": b"1"}
        manifest = save_checkpoint(backend, 1, files)
        assert verify(next(whole([backend]))) == []
        assert read_back(backend, manifest) == files
        assert sum(count > 2 for count in seen.values()) >= 5


def test_an_answer_that_is_lost_changes_nothing(s3_env: str, s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store does what it is told and the word of it is lost: what is tried again must know its own work."""
    seen: dict[str, int] = {}

    def every_other_time(number: int, line: str) -> str:
        seen[line] = seen.get(line, 0) + 1
        return LOSE_ANSWER if line.startswith("PUT") and seen[line] % 2 else FORWARD

    with FaultyProxy(s3_env, every_other_time) as proxy:
        backend = through(proxy, s3_uri, monkeypatch, timeout_s=20.0)
        backend.acquire(Owner("run"))
        backend.begin("checkpoint-1")
        assert backend.claim_part("checkpoint-1", "leader", b"me") is True
        assert backend.claim_part("checkpoint-1", "leader", b"me") is False
        entry = write_file(backend, "checkpoint-1", "model", b"1")
        backend.commit("checkpoint-1", manifest_for(1, [entry]).encode())
        assert verify(next(whole([backend]))) == []
        with pytest.raises(CheckpointExistsError):
            backend.commit("checkpoint-1", manifest_for(1, [entry], reason="final").encode())
        backend.begin("checkpoint-2")
        backend.commit("checkpoint-2", manifest_for(2, []).encode())
        assert not backend.lost
        backend.release()


@pytest.mark.parametrize("at", ["the first part", "the last request", "any part"])
def test_a_store_that_dies_during_an_upload_leaves_nothing_visible(
    s3_env: str, s3_uri: str, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    direct = ObjectBackend(s3_uri)
    save_checkpoint(direct, 1, {"model": sample(1, 100)})
    died = False

    def dies(number: int, line: str) -> str:
        nonlocal died
        trigger = {
            "the first part": "partNumber=1&" in line or "PUT" in line,
            "the last request": line.startswith("POST") and "uploadId=" in line,
            "any part": "partNumber=3" in line,
        }[at]
        died = died or (trigger and "model" in line)
        return CUT if died else FORWARD

    with FaultyProxy(s3_env, dies) as proxy:
        backend = through(proxy, s3_uri, monkeypatch, timeout_s=5.0)
        began = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            save_checkpoint(backend, 2, {"model": sample(2, 40 << 20)})
        assert time.monotonic() - began < 5.0 + 5.0 + 5.0
        assert died
    assert [checkpoint.step for checkpoint in whole([direct])] == [1]
    assert "model" not in direct.sizes("checkpoint-2")
    assert clean(direct) == ["checkpoint-2"]
    assert direct.names() == ["checkpoint-1"]
    assert verify(next(whole([direct]))) == []


def test_a_store_that_dies_before_the_commit_leaves_a_checkpoint_that_is_not_whole(
    s3_env: str, s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = ObjectBackend(s3_uri)
    save_checkpoint(direct, 1, {"model": b"1"})
    with FaultyProxy(s3_env, lambda number, line: UNAVAILABLE if "holdfast.json" in line else FORWARD) as proxy:
        backend = through(proxy, s3_uri, monkeypatch)
        backend.begin("checkpoint-2")
        entry = write_file(backend, "checkpoint-2", "model", b"2")
        with pytest.raises(StoreUnavailableError):
            backend.commit("checkpoint-2", manifest_for(2, [entry]).encode())
    assert [checkpoint.step for checkpoint in whole([direct])] == [1]
    direct.commit("checkpoint-2", manifest_for(2, [entry]).encode())
    assert [checkpoint.step for checkpoint in whole([direct])] == [2, 1]


def test_cleaning_up_that_fails_does_not_undo_a_commit(
    s3_env: str, s3_uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    committed = False

    def after_the_commit(number: int, line: str) -> str:
        nonlocal committed
        answer = UNAVAILABLE if committed else FORWARD
        committed = committed or (line.startswith("PUT") and "holdfast.json" in line)
        return answer

    with FaultyProxy(s3_env, after_the_commit) as proxy:
        save_checkpoint(through(proxy, s3_uri, monkeypatch), 1, {"model": b"1"})
    assert "sentinel is still there" in caplog.text
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_env)
    direct = ObjectBackend(s3_uri)
    assert [checkpoint.step for checkpoint in whole([direct])] == [1]
    assert clean(direct) == []


def test_retention_removes_nothing_while_a_manifest_is_out_of_reach(
    s3_env: str, s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = ObjectBackend(s3_uri)
    first = save_checkpoint(direct, 1, {"frozen": b"same"})
    save_checkpoint(direct, 2, {"frozen": b"other"})
    save_checkpoint(direct, 3, {"frozen": b"same"}, unchanged_since=first)
    hidden = "checkpoint-3/holdfast.json"
    with FaultyProxy(s3_env, lambda number, line: UNAVAILABLE if hidden in line else FORWARD) as proxy:
        backend = through(proxy, s3_uri, monkeypatch)
        with pytest.raises(StoreError):
            retain(backend, keep=1)
        backend.begin("checkpoint-4")
        with pytest.raises(StoreError):
            clean(backend)
    found = list(whole([direct]))
    assert [checkpoint.step for checkpoint in found] == [3, 2, 1]
    assert [verify(checkpoint) for checkpoint in found] == [[], [], []]


def test_an_answer_cut_short_is_not_taken_for_the_whole(
    s3_env: str, s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = ObjectBackend(s3_uri)
    save_checkpoint(direct, 1, {"model": sample(1, 3 << 20)})
    with FaultyProxy(s3_env, lambda number, line: LOSE_ANSWER if "model" in line else FORWARD) as proxy:
        backend = through(proxy, s3_uri, monkeypatch)
        problems = verify(next(whole([backend])))
    assert len(problems) == 1
    assert "model" in problems[0]
