"""Which location gets a save that has a deadline, and until when."""

from __future__ import annotations

import pytest

from holdfast.clock import Deadline
from holdfast.errors import StoreError
from holdfast.progress import Journal
from holdfast.saving import Files, Save, Saver
from holdfast.staging.images import BytesImage
from holdfast.store.checkpoints import whole
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
