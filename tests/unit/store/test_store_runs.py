"""Two runs in one location, as real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from holdfast.base.process import Owner
from holdfast.errors import LocationBusyError
from holdfast.store import Backend, open_backend
from holdfast.store.checkpoints import whole
from holdfast.store.local import LocalBackend
from holdfast.store.object import LEASE, ObjectBackend
from holdfast.testing.backend_contract import manifest_for, save_checkpoint

ELSEWHERE = {"host": "elsewhere", "boot": "another-boot", "pid_namespace": "pid:[1]"}
"""A process of which nothing can be known here."""


class Holder:
    """Another process that holds the location."""

    def __init__(self, *arguments: str) -> None:
        script = Path(__file__).with_name("store_holder.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.grandchild = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def holding(*arguments: str) -> Iterator[Holder]:
    holder = Holder(*arguments)
    try:
        while (word := holder.hear()) != "held":
            assert word.startswith("grandchild"), word
            holder.grandchild = int(word.split()[1])
        yield holder
    finally:
        holder.kill()
        if holder.grandchild:
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder.grandchild, signal.SIGKILL)


@pytest.fixture(params=["local", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else str(request.getfixturevalue("s3_uri"))


def test_a_second_run_is_kept_out_until_the_first_is_killed(location: str) -> None:
    with holding(location, "first") as holder:
        backend = open_backend(location)
        with pytest.raises(LocationBusyError) as raised:
            backend.acquire(Owner("second"), wait_s=0.2)
        assert "'first'" in str(raised.value)
        assert str(holder.pid) in str(raised.value)
        holder.say("commit 1")
        assert holder.hear() == "committed"
        holder.kill()
        began = time.monotonic()
        backend.acquire(Owner("second"), wait_s=60.0)
        assert time.monotonic() - began < 20.0
        assert [checkpoint.step for checkpoint in whole([backend])] == [1]
        backend.release()


def test_a_child_that_outlives_the_run_does_not_block_the_next(location: str) -> None:
    with holding(location, "first", "120", "with a child") as holder:
        backend = open_backend(location)
        with pytest.raises(LocationBusyError):
            backend.acquire(Owner("second"))
        holder.kill()
        os.kill(holder.grandchild, 0)  # it lives
        backend.acquire(Owner("second"), wait_s=5.0)
        backend.release()
        os.kill(holder.grandchild, 0)


def test_a_run_that_leaves_frees_the_location(location: str) -> None:
    with holding(location, "first") as holder:
        holder.say("leave")
        assert holder.process.wait(20.0) == 0
        backend = open_backend(location)
        backend.acquire(Owner("second"), wait_s=2.0)
        backend.release()


def test_a_run_that_is_pushed_aside_notices(location: str) -> None:
    with holding(location, "first") as holder:
        backend = open_backend(location)
        backend.acquire(Owner("second"), takeover=True)
        holder.say("commit 7")
        assert holder.hear().startswith("busy:")
        assert [checkpoint.step for checkpoint in whole([backend])] == []
        save_checkpoint(backend, 8, {"model": b"1"})
        holder.kill()
        with pytest.raises(LocationBusyError):
            open_backend(location).acquire(Owner("third"))
        backend.release()


def test_of_many_runs_that_start_together_one_gets_the_location(location: str) -> None:
    holders = [Holder(location, f"run-{number}") for number in range(3)]
    try:
        assert sorted(holder.hear() for holder in holders) == ["", "", "held"]
    finally:
        for holder in holders:
            holder.kill()


def test_a_forked_child_does_not_hold_what_its_parent_holds(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path))
    backend.acquire(Owner("parent"))
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            backend.release()  # lets go of nothing of the parent's
            try:
                LocalBackend(str(tmp_path)).acquire(Owner("child"))
            except LocationBusyError as error:
                code = 0 if "'parent'" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with holding_fails(str(tmp_path)):
        pass
    backend.release()


@contextlib.contextmanager
def holding_fails(location: str) -> Iterator[None]:
    holder = Holder(location, "other")
    try:
        assert holder.hear() == ""
        assert holder.process.wait(20.0) != 0
        yield
    finally:
        holder.kill()


def test_the_same_folder_by_another_name_is_the_same_location(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    backend = LocalBackend(str(tmp_path / "real"))
    backend.acquire(Owner("first"))
    with pytest.raises(LocationBusyError):
        LocalBackend(str(tmp_path / "alias")).acquire(Owner("second"))
    with holding_fails(str(tmp_path / "alias")):
        pass
    backend.release()


# Leases


def lease_of(backend: ObjectBackend) -> dict[str, object]:
    body: dict[str, object] = json.loads(backend._client.get("read", backend._key(LEASE))[0])
    return body


def leave_lease(backend: ObjectBackend, run: str, lease_s: float) -> None:
    """A lease of a process elsewhere that has stopped renewing it."""
    body = {
        "owner": {**Owner(run).as_dict(), **ELSEWHERE},
        "token": "theirs",
        "lease_s": lease_s,
        "renewals": 1,
        "renewed": "2999-01-01T00:00:00+00:00",
        "released": False,
    }
    backend._client.put("write", backend._key(LEASE), json.dumps(body).encode())


@pytest.fixture
def s3_bucket(s3_uri: str) -> Iterator[ObjectBackend]:
    backend = ObjectBackend(s3_uri)
    yield backend
    backend.close()


@pytest.fixture(params=["memory", "s3"])
def bucket(request: pytest.FixtureRequest) -> Iterator[ObjectBackend]:
    if request.param == "memory":
        backend = ObjectBackend("s3://bucket/prefix", store=MemoryStore())
    else:
        backend = ObjectBackend(request.getfixturevalue("s3_uri"))
    yield backend
    backend.close()


def test_a_lease_that_nobody_renews_expires_by_the_clock_of_the_store(
    s3_bucket: ObjectBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither the holder's idea of the time, which is far ahead, nor ours, which is far behind, matters.
    monkeypatch.setattr(time, "time", lambda: 0.0)
    began = time.monotonic()
    leave_lease(s3_bucket, "theirs", lease_s=4.0)
    with pytest.raises(LocationBusyError) as raised:
        s3_bucket.acquire(Owner("ours"))
    assert re.search("free in [0-6] s", str(raised.value))
    assert "elsewhere" in str(raised.value)
    s3_bucket.acquire(Owner("ours"), wait_s=60.0)
    assert 4.0 < time.monotonic() - began < 60.0
    assert lease_of(s3_bucket)["owner"]["run"] == "ours"  # type: ignore[index]


def test_an_expired_lease_needs_no_waiting(s3_bucket: ObjectBackend) -> None:
    leave_lease(s3_bucket, "theirs", lease_s=0.0)
    time.sleep(3.1)
    s3_bucket.acquire(Owner("ours"), wait_s=0.0)


def test_the_same_run_elsewhere_is_replaced_at_once(bucket: ObjectBackend) -> None:
    leave_lease(bucket, "ours", lease_s=1000.0)
    began = time.monotonic()
    bucket.acquire(Owner("ours"))
    assert time.monotonic() - began < 20.0


def test_a_lease_is_renewed_and_keeps_others_out(s3_bucket: ObjectBackend) -> None:
    mine = ObjectBackend(s3_bucket.uri, store=s3_bucket._client.store, lease_s=3.0)
    mine.acquire(Owner("mine", **ELSEWHERE))
    with pytest.raises(LocationBusyError):
        s3_bucket.acquire(Owner("other"), wait_s=5.6)
    assert int(lease_of(s3_bucket)["renewals"]) >= 3  # type: ignore[call-overload]
    assert not mine.lost
    mine.release()
    assert lease_of(s3_bucket)["released"] is True
    s3_bucket.acquire(Owner("other"))


def test_a_lease_that_was_taken_is_noticed_by_its_renewal(
    bucket: ObjectBackend, caplog: pytest.LogCaptureFixture
) -> None:
    mine = ObjectBackend(bucket.uri, store=bucket._client.store, lease_s=0.4)
    mine.acquire(Owner("mine"))
    bucket.acquire(Owner("other"), takeover=True)
    until = time.monotonic() + 10.0
    while not mine.lost and time.monotonic() < until:
        time.sleep(0.02)
    assert mine.lost
    assert "taken over by another run (run 'other'" in caplog.text
    mine.begin("checkpoint-1")
    with pytest.raises(LocationBusyError):
        mine.commit("checkpoint-1", manifest_for(1, []).encode())
    with pytest.raises(LocationBusyError):
        mine.amend("checkpoint-1", manifest_for(1, []).encode())
    with pytest.raises(LocationBusyError):
        mine.acquire(Owner("mine"))
    mine.release()
    assert lease_of(bucket)["owner"]["run"] == "other"  # type: ignore[index]
    assert lease_of(bucket)["released"] is False
    bucket.release()
    mine.acquire(Owner("mine"))
    mine.commit("checkpoint-1", manifest_for(1, []).encode())
    mine.release()


def test_a_lease_that_somebody_deleted_is_put_back(bucket: ObjectBackend) -> None:
    bucket.acquire(Owner("ours"))
    bucket._client.delete("remove", [bucket._key(LEASE)])
    bucket.begin("checkpoint-1")
    bucket.commit("checkpoint-1", manifest_for(1, []).encode())
    assert lease_of(bucket)["owner"]["run"] == "ours"  # type: ignore[index]


def test_a_lease_that_cannot_be_read_counts_until_it_expires() -> None:
    mine = ObjectBackend("s3://bucket/prefix", store=MemoryStore(), lease_s=0.5)
    mine._client.put("write", mine._key(LEASE), b"not a lease")
    with pytest.raises(LocationBusyError, match="unknown process"):
        mine.acquire(Owner("ours"))
    mine.acquire(Owner("ours"), wait_s=10.0)
    mine.release()


def test_of_many_that_want_a_free_lease_one_gets_it(bucket: ObjectBackend) -> None:
    backends = [ObjectBackend(bucket.uri, store=bucket._client.store) for _ in range(6)]
    got: list[int] = []
    start = threading.Barrier(len(backends))

    def want(number: int) -> None:
        start.wait()
        with contextlib.suppress(LocationBusyError):
            backends[number].acquire(Owner(f"run-{number}"))
            got.append(number)

    threads = [threading.Thread(target=want, args=(number,)) for number in range(len(backends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert len(got) == 1
    assert lease_of(bucket)["owner"]["run"] == f"run-{got[0]}"  # type: ignore[index]
    assert not [entry for entry in bucket._client.list_all("list", "") if entry["path"].endswith(".now")]
    backends[got[0]].release()


def test_a_run_that_sleeps_past_its_lease_commits_nothing_when_it_wakes(s3_uri: str) -> None:
    with holding(s3_uri, "sleeper", "4") as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        backend: Backend = open_backend(s3_uri)
        with pytest.raises(LocationBusyError):
            backend.acquire(Owner("other"))
        backend.acquire(Owner("other"), wait_s=60.0)
        os.kill(holder.pid, signal.SIGCONT)
        holder.say("commit 5")
        assert holder.hear().startswith("busy:")
        assert backend.names() == ["checkpoint-5"]
        assert list(whole([backend])) == []
        backend.release()


# Owners


def test_only_what_this_machine_can_see_is_called_dead() -> None:
    alive = Owner("run")
    assert not alive.is_dead()
    gone = subprocess.Popen(["true"])
    record = alive.as_dict()
    gone.wait()
    assert Owner.from_dict({**record, "pid": gone.pid}).is_dead()
    assert Owner.from_dict({**record, "started": "1"}).is_dead(), "another process has its number now"
    for unknown in (
        {"boot": "other"},
        {"boot": ""},
        {"pid_namespace": "pid:[1]"},
        {"pid_namespace": ""},
        {"started": ""},
    ):
        assert not Owner.from_dict({**record, "pid": gone.pid, **unknown}).is_dead(), unknown
    assert not Owner.from_dict({"run": "old record", "pid": gone.pid}).is_dead()
    assert Owner.from_dict(json.loads(json.dumps(record))) == alive
    for nonsense in ({}, {"pid": "x"}, [], None, {"pid": None}):
        with pytest.raises(ValueError):
            Owner.from_dict(nonsense)  # type: ignore[arg-type]
