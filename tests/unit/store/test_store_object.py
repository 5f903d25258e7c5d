"""What is special about object stores: where they are, who may use them, and what becomes of a process with one."""

from __future__ import annotations

import builtins
import contextlib
import os
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from holdfast.base.process import Owner
from holdfast.errors import ConfigError, MissingExtraError, StoreError, StoreUnavailableError
from holdfast.store import open_backend
from holdfast.store.base import MANIFEST, SENTINEL
from holdfast.store.checkpoints import retain, verify, whole
from holdfast.store.object import PARALLEL, PART, ObjectBackend
from holdfast.store.object_client import NotThereError
from holdfast.testing.backend_contract import read_back, sample, save_checkpoint, write_file
from tests.kit.s3 import ACCESS_KEY, BUCKET, FORWARD, HANG, SECRET_KEY, UNAVAILABLE, FaultyProxy

TOKEN = "markerSessionTokenNeverToBeSeen"


# Where


@pytest.mark.parametrize(
    ("given", "uri"),
    [
        ("s3://bucket/a/prefix", "s3://bucket/a/prefix"),
        ("s3://bucket/a//prefix/", "s3://bucket/a/prefix"),
        ("s3://bucket", "s3://bucket"),
        ("s3://user:password@bucket/prefix?token=secret#x", "s3://bucket/prefix"),
        ("gs://bucket/prefix", "gs://bucket/prefix"),
        ("az://container/prefix", "az://container/prefix"),
    ],
)
def test_a_location_is_named_without_credentials(given: str, uri: str) -> None:
    backend = ObjectBackend(given, store=MemoryStore())
    assert backend.uri == uri
    assert repr(backend) == f"ObjectBackend({uri!r})"
    save_checkpoint(backend, 1, {"model": b"1"})
    assert next(whole([backend])).location == f"{uri}/checkpoint-1"


@pytest.mark.parametrize("given", ["s3://", "s3:///prefix", "ftp://bucket/x", "s3://bucket/../x", "s3://a:b/x"])
def test_a_location_that_makes_no_sense_is_refused(given: str) -> None:
    with pytest.raises(ConfigError):
        ObjectBackend(given, store=MemoryStore())


def test_each_scheme_has_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bWFya2VyS2V5")
    for uri, name in (("s3://b/x", "S3Store"), ("gs://b/x", "GCSStore"), ("az://b/x", "AzureStore")):
        backend = open_backend(uri)
        assert isinstance(backend, ObjectBackend)
        assert type(backend._client.store).__name__ == name


def test_credentials_that_cannot_be_read_are_a_setting_to_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = tmp_path / "key.json"
    key.write_text('{"private_key": "markerPrivateKey"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    with pytest.raises(ConfigError) as raised:
        open_backend("gs://bucket/x")
    assert "markerPrivateKey" not in everything_about(raised.value)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    really = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("obstore"):
            raise ImportError(name)
        return really(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"pip install 'holdfast\[s3\]'"):
        open_backend("s3://bucket/x")


def test_opening_a_location_contacts_nobody(s3_env: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultyProxy("", lambda number, line: HANG) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        open_backend(f"s3://{BUCKET}/x").release()
        assert proxy.requests == []


def test_a_bucket_that_is_not_there_is_empty_to_read_and_an_error_to_write(s3_env: str) -> None:
    backend = ObjectBackend("s3://no-such-bucket/x")
    assert backend.names() == []
    assert backend.read_manifest("checkpoint-1") is None
    for attempt in (lambda: backend.begin("checkpoint-1"), lambda: backend.acquire(Owner("run"))):
        with pytest.raises(StoreError, match=r"NoSuchBucket.*create the bucket"):
            attempt()


# Who


def test_credentials_replaced_in_the_environment_are_used(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "expired-long-ago")
    backend = ObjectBackend(s3_uri)
    with pytest.raises(StoreError, match="check the secret key") as raised:
        backend.begin("checkpoint-1")
    assert not isinstance(raised.value, StoreUnavailableError)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    save_checkpoint(backend, 1, {"model": b"1"})
    assert [checkpoint.step for checkpoint in whole([backend])] == [1]


def everything_about(error: BaseException) -> str:
    """All that a log, a traceback or a debugger would show of an error."""
    seen: list[str] = []
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and len(seen) < 20:
            seen += [str(one), repr(one), repr(one.args), repr(vars(one))]
            todo += [one.__cause__, one.__context__]
    return "\n".join([*seen, *traceback.format_exception(error)])


def test_no_secret_is_ever_shown(
    s3_env: str, s3_uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    secrets = [ACCESS_KEY, SECRET_KEY, TOKEN, "userinfoMarker", "queryMarker", "AWS4-HMAC", "Signature="]
    shown: list[str] = []
    uri = s3_uri.replace("s3://", "s3://userinfoMarker:userinfoMarker@") + "?token=queryMarker"

    def attempt_all(backend: ObjectBackend) -> None:
        for attempt in (
            backend.names,
            lambda: backend.read_manifest("checkpoint-1"),
            lambda: backend.sizes("checkpoint-1"),
            lambda: backend.read_into("checkpoint-1", "model", 0, memoryview(bytearray(10))),
            lambda: backend.read_into("checkpoint-1", "missing", 0, memoryview(bytearray(10))),
            lambda: backend.begin("checkpoint-1"),
            lambda: backend.begin("checkpoint-2"),
            lambda: write_file(backend, "checkpoint-2", "model", bytes(9 << 20)),
            lambda: backend.claim_part("checkpoint-2", "leader", b"1"),
            lambda: backend.commit("checkpoint-1", b"{}"),
            lambda: backend.acquire(Owner("other")),
            lambda: list(whole([backend])),
            lambda: retain(backend, keep=1),
        ):
            try:
                attempt()
            except StoreError as error:
                shown.append(everything_about(error))
        shown.append(repr(backend) + repr(vars(backend)) + backend.uri)

    held = ObjectBackend(uri, lease_s=1.0)
    held.acquire(Owner("first"))
    save_checkpoint(held, 1, {"model": b"1"})
    attempt_all(ObjectBackend(uri))
    stored = []
    for key in held._client.list_all("list", ""):
        with contextlib.suppress(NotThereError):  # the lease is written anew four times a second
            stored.append(held._client.get("read", key["path"])[0])
    assert any(b'"released"' in data for data in stored)
    shown += [data.decode("latin-1") for data in stored]

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY + "x")
    attempt_all(ObjectBackend(uri, timeout_s=2.0))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY + "x")
    attempt_all(ObjectBackend(uri, timeout_s=2.0))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    attempt_all(ObjectBackend(uri, timeout_s=2.0))
    for policy in (UNAVAILABLE, HANG):
        with FaultyProxy("", lambda number, line, policy=policy: policy) as proxy:  # type: ignore[misc]
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint.replace("://", "://userinfoMarker:userinfoMarker@"))
            attempt_all(ObjectBackend(uri, timeout_s=0.15))
    held.release()
    shown.append(caplog.text)
    assert len(shown) > 40
    for secret in secrets:
        assert not [text for text in shown if secret in text], secret


# How


def test_large_files_go_in_parallel_parts_with_bounded_memory(
    s3_env: str, s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultyProxy(s3_env, lambda number, line: FORWARD) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        backend = ObjectBackend(s3_uri)
        data = sample("large", 5 * PART + 17)
        manifest = save_checkpoint(backend, 1, {"model": data, "small": b"1"})
        uploads = [line for line in proxy.requests if "PUT" in line and "/model" in line]
        assert len(uploads) == 6
        assert all("partNumber" in line for line in uploads)
        assert len([line for line in proxy.requests if "PUT" in line and "/small" in line]) == 1
        proxy.requests.clear()
        assert read_back(backend, manifest)["model"] == data
        assert len([line for line in proxy.requests if "GET" in line and "/model" in line]) >= 6
    assert ObjectBackend.read_size == PARALLEL * PART


def test_a_sentinel_beside_a_manifest_means_nothing() -> None:
    backend = ObjectBackend("s3://bucket/x", store=MemoryStore())
    save_checkpoint(backend, 1, {"model": b"1"})
    backend._client.put("write", f"x/checkpoint-1/{SENTINEL}", b"left over")
    assert [checkpoint.step for checkpoint in whole([backend])] == [1]
    backend.set_aside("checkpoint-1")
    assert backend.read_manifest("checkpoint-1") is None
    assert SENTINEL in backend.sizes("checkpoint-1")


def test_files_that_others_refer_to_are_never_written_over() -> None:
    backend = ObjectBackend("s3://bucket/x", store=MemoryStore())
    first = save_checkpoint(backend, 1, {"frozen": b"same", "moving": b"1"})
    second = save_checkpoint(backend, 2, {"frozen": b"same", "moving": b"2"}, unchanged_since=first)
    retain(backend, keep=1)
    assert set(backend.sizes("checkpoint-1")) == {"frozen"}
    with pytest.raises(StoreError, match="checkpoint-2 refers to checkpoint-1/frozen"):
        backend.begin("checkpoint-1")
    assert read_back(backend, second) == {"frozen": b"same", "moving": b"2"}
    backend.set_aside("checkpoint-2")
    save_checkpoint(backend, 1, {"frozen": b"anew"})
    assert verify(next(whole([backend]))) == []


def test_an_amended_manifest_does_not_bring_a_removed_checkpoint_back() -> None:
    backend = ObjectBackend("s3://bucket/x", store=MemoryStore())
    manifest = save_checkpoint(backend, 1, {"model": b"1"})
    backend.discard("checkpoint-1")
    with pytest.raises(StoreError):
        backend.amend("checkpoint-1", manifest.encode())
    assert backend.names() == []
    assert f"x/checkpoint-1/{MANIFEST}" not in [entry["path"] for entry in backend._client.list_all("list", "x")]


def test_a_signal_is_handled_while_the_store_does_not_answer(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    class Heard(Exception):
        pass

    def hear(signum: int, frame: object) -> None:
        raise Heard

    with FaultyProxy("", lambda number, line: HANG) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        backend = ObjectBackend(s3_uri)
        before = signal.signal(signal.SIGUSR1, hear)
        try:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            began = time.monotonic()
            with pytest.raises(Heard):
                backend.names()
            assert time.monotonic() - began < 15.0
        finally:
            signal.signal(signal.SIGUSR1, before)


def test_a_forked_child_gets_an_error_and_no_hang(s3_uri: str) -> None:
    backend = ObjectBackend(s3_uri)
    backend.acquire(Owner("parent"))
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            backend.release()
            try:
                backend.names()
            except StoreError as error:
                code = 0 if "spawn" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    backend.begin("checkpoint-1")
    save_checkpoint(backend, 1, {"model": b"1"})
    backend.release()


@pytest.mark.parametrize("how", ["quietly", "with a lease", "while a call hangs", "while a lease cannot be renewed"])
def test_a_process_ends_at_once_and_without_a_word(
    s3_env: str, s3_uri: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    code = {
        "quietly": "backend.names()",
        "with a lease": "backend.acquire(Owner('run'))",
        "while a call hangs": "hang()",
        "while a lease cannot be renewed": "backend.acquire(Owner('run')); hang(); time.sleep(0.5)",
    }[how]
    script = f"""
import contextlib, os, sys, threading, time
from holdfast.errors import StoreError
from holdfast.base.process import Owner
from holdfast.store.object import ObjectBackend
backend = ObjectBackend({s3_uri!r}, lease_s=0.5)
def hang():
    os.environ["AWS_ENDPOINT_URL"] = sys.argv[1]
    other = ObjectBackend({s3_uri!r})
    backend._client.store = other._client.store
    def call():
        with contextlib.suppress(StoreError):
            other.names()
    threading.Thread(target=call, daemon=True).start()
    time.sleep(0.3)
{code}
print(time.time(), flush=True)
"""
    with FaultyProxy("", lambda number, line: HANG) as proxy:
        result = subprocess.run(
            [sys.executable, "-c", script, proxy.endpoint], capture_output=True, text=True, timeout=60.0, check=False
        )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert time.time() - float(result.stdout) < 15.0
