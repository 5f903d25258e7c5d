"""Which location gets a save that has a deadline, and until when."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

from holdfast.base.clock import Deadline
from holdfast.engine.saving import Files, Save, Saver
from holdfast.errors import StoreError
from holdfast.progress import Journal
from holdfast.staging.images import BytesImage
from holdfast.store.checkpoints import verify, whole
from holdfast.store.local import LocalBackend


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1.8e9


@pytest.fixture
def saver(tmp_path):
    backends = [LocalBackend(str(tmp_path / name)) for name in ("first", "second")]
    journal = Journal(None, run_id="run", attempt=1, rank=0)
    return Saver(
        backends=backends, rank=0, world=1, run="run", attempt=1, token="t", keep=2, journal=journal, clock=Clock()
    )


def order(saver, grace_s: float, size: int) -> list[tuple[str, float]]:
    save = Save(step=1, reason="jit", deadline=Deadline.after(grace_s, saver.clock))
    choices = saver._choices(save, size)
    return [(backend.uri.rsplit("/", 1)[1], round(limit.remaining_s(), 1)) for backend, limit in choices]


def test_the_first_location_is_used_while_it_is_fast_enough(saver):
    saver.speeds = {saver.backends[0].uri: 1e9, saver.backends[1].uri: 1e9}
    assert [name for name, _ in order(saver, 30.0, 10**9)] == ["first", "second"]


def test_a_location_measured_too_slow_for_the_time_left_is_not_tried_first(saver):
    saver.speeds = {saver.backends[0].uri: 1e7, saver.backends[1].uri: 1e9}
    assert [name for name, _ in order(saver, 30.0, 10**9)] == ["second", "first"]


def test_the_first_location_is_left_while_there_is_time_for_the_second(saver):
    saver.speeds = {saver.backends[0].uri: 1e9, saver.backends[1].uri: 1e8}
    (_, first), (_, second) = order(saver, 30.0, 10**9)
    assert second - first >= 10.0
    assert first >= 10.0


def test_the_second_location_has_seconds_and_not_only_what_it_is_expected_to_take(saver):
    (_, first), (_, second) = order(saver, 30.0, 1000)
    assert second - first >= 2.0
    (_, first), (_, second) = order(saver, 3.0, 1000)
    assert second - first == pytest.approx(first, abs=0.1)  # half of what is left


class Full(LocalBackend):
    """No room for large files, for a while."""

    full = True

    def create(self, name, path, size):
        if self.full and path == "model":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(name, path, size)


def test_what_a_late_rank_writes_of_a_failed_save_goes_with_the_next(tmp_path):
    backend = Full(str(tmp_path / "run"))
    journal = Journal(None, run_id="run", attempt=1, rank=0)
    saver = Saver(backends=[backend], rank=0, world=2, run="run", attempt=1, token="t", keep=2, journal=journal)
    files = Files(own=lambda: [BytesImage("rank-0", b"x")], shared=lambda: [BytesImage("model", b"y")])

    def late(step):
        """Rank 1, which has not heard that rank 0 has given up."""
        name = f"checkpoint-{step}"
        backend.begin(name)
        backend.create(name, "rank-1", 1).finish()
        backend.put_part(name, "rank-00001", b'{"token": "t", "files": []}')

    for step in (3, 6):
        with pytest.raises(StoreError, match="could not be saved"):
            saver.write(Save(step=step, reason="periodic"), files, 2)
        assert backend.names() == []
        late(step)
        assert backend.names() == [f"checkpoint-{step}"]
    backend.full = False
    late(9)
    saver.write(Save(step=9, reason="periodic"), files, 2)
    assert backend.names() == ["checkpoint-9"]


def test_all_that_cannot_be_reached_is_one_error_that_names_the_last(saver, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).write_text("a file in the way")
    files = Files(own=lambda: [BytesImage("a", b"x")], shared=lambda: [])
    with pytest.raises(StoreError, match="step 1 could not be saved anywhere"):
        saver.write(Save(step=1, reason="periodic"), files, 1)
    failed = [event for event in saver.journal.recent() if event["event"] == "save_failed"]
    assert len(failed) == 2


def test_a_failed_first_location_means_the_second(saver, tmp_path):
    (tmp_path / "first").write_text("a file in the way")
    files = Files(own=lambda: [BytesImage("a", b"x" * 5000)], shared=lambda: [])
    saver.write(Save(step=7, reason="periodic"), files, 5000)
    assert [checkpoint.step for checkpoint in whole(saver.backends)] == [7]
    assert saver.committed_at is saver.backends[1]


def test_the_same_step_is_committed_once(saver):
    files = Files(own=lambda: [BytesImage("a", b"x")], shared=lambda: [])
    saver.write(Save(step=7, reason="periodic"), files, 1)
    again = saver.write(Save(step=7, reason="jit", deadline=Deadline.after(10, saver.clock)), files, 1)
    assert again.reason == "periodic"


class Interrupted(LocalBackend):
    """Lets another rank save and commit the same step just before or after one call of this one."""

    def __init__(self, root: str, call: str, other) -> None:
        super().__init__(root)
        self._call, self._other = call, other

    def _meanwhile(self, call: str) -> None:
        if call == self._call and self._other is not None:
            other, self._other = self._other, None
            other()

    def begin(self, name):
        self._meanwhile("before begin")
        super().begin(name)
        self._meanwhile("after begin")

    def _make_marked(self, name):
        self._meanwhile("inside begin")
        super()._make_marked(name)

    def claim_part(self, name, part, data):
        self._meanwhile("before claim")
        won = super().claim_part(name, part, data)
        self._meanwhile("after claim")
        return won

    def read_parts(self, name):
        self._meanwhile("before parts")
        return super().read_parts(name)


@pytest.mark.parametrize(
    "call", ["before begin", "inside begin", "after begin", "before claim", "after claim", "before parts"]
)
def test_two_survivors_of_one_step_never_write_into_each_others_commit(tmp_path, call):
    def files(rank):
        own = BytesImage(f"rank-{rank:05d}.safetensors", b"%d" % rank * (3000 + rank))
        other = BytesImage(f"rank-{1 - rank:05d}.safetensors", b"%d" % (1 - rank) * (9000 + rank))
        return Files(own=lambda: [own], shared=lambda: [BytesImage("m", b"m" * 70 * (rank + 1))], of=lambda _: [other])

    def saver(backend, rank):
        journal = Journal(None, run_id="run", attempt=1, rank=rank)
        return Saver(backends=[backend], rank=rank, world=2, run="run", attempt=1, token="t", keep=2, journal=journal)

    def save(grace_s):
        return Save(step=8, reason="rescue", claimed=True, deadline=Deadline.after(grace_s))

    def first():
        try:
            saver(LocalBackend(str(tmp_path)), 0).write(save(1.2), files(0), 1)
        except StoreError:
            assert call in ("after claim", "before parts")  # the other has claimed it and goes on after this

    late = saver(Interrupted(str(tmp_path), call, first), 1)
    late.write(save(20.0), files(1), 1)
    (found,) = whole([LocalBackend(str(tmp_path))])
    assert verify(found) == []
    assert found.manifest.inexact == ()


def test_a_rescue_does_not_wait_for_the_part_of_a_rank_of_another_machine_that_was_silent(tmp_path):
    backend = LocalBackend(str(tmp_path / "run"))
    journal = Journal(None, run_id="run", attempt=1, rank=0)
    saver = Saver(backends=[backend], rank=0, world=2, run="run", attempt=1, token="t", keep=2, journal=journal)
    silent: list[int] = []
    saver.gone = lambda: silent
    files = Files(own=lambda: [BytesImage("rank-0", b"x")], shared=lambda: [BytesImage("model", b"y")])
    began = time.monotonic()
    threading.Timer(0.3, silent.append, [1]).start()
    manifest = saver.write(Save(step=7, reason="rescue", claimed=True, deadline=Deadline.after(20)), files, 2)
    assert 0.3 <= time.monotonic() - began < 15
    assert manifest.inexact == ("the random state and data position of rank 1 are lost",)


def test_an_heir_asks_the_ranks_that_live_for_their_parts(tmp_path):
    """All ranks have failed with one error: each of them knows its part better than what it left on the machine."""
    backend = LocalBackend(str(tmp_path / "run"))

    def save(rank):
        journal = Journal(None, run_id="run", attempt=1, rank=rank)
        saver = Saver(backends=[backend], rank=rank, world=3, run="run", attempt=1, token="t", keep=2, journal=journal)
        own = BytesImage(f"rank-{rank:05d}.safetensors", b"%d" % rank * 3000)
        files = Files(own=lambda: [own], shared=lambda: [BytesImage("model", b"m")], of=lambda _: None)
        manifests[rank] = saver.write(
            Save(step=7, reason="rescue", claimed=True, deadline=Deadline.after(60)), files, 1
        )

    manifests: dict = {}
    ranks = [threading.Thread(target=save, args=(rank,)) for rank in range(3)]
    began = time.monotonic()
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert time.monotonic() - began < 30  # far from the deadline
    assert manifests[0] == manifests[1] == manifests[2]
    (found,) = whole([backend])
    assert verify(found) == []
    assert found.manifest.inexact == ()
    assert len(found.manifest.files) == 4
