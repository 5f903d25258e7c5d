"""What is left of a rank that was killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from holdfast.recorder import blackbox, boxes
from holdfast.recorder.blackbox import BlackBox, read_box
from holdfast.recorder.boxes import BOUNDARY, IN_FLIGHT
from holdfast.torch import rng


@pytest.fixture
def kept_random():
    state = rng.capture()
    yield
    rng.restore(state)


def draw(index: int) -> list[float]:
    """Every generator, and every kind of spare value."""
    numbers = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(1))]
    if index % 2:
        numbers += [float(np.random.randn()), float(torch.randn(1)), random.gauss(0, 1)]
    if index % 3:
        numbers.append(float(torch.randn(1, dtype=torch.float64)))
    return numbers


def test_a_record_continues_every_random_stream_exactly(tmp_path, kept_random):
    box = BlackBox(str(tmp_path / "box"), 0)
    for index in range(40):
        draw(index)
        box.note(BOUNDARY, index, 0, 0, 0)
        record = read_box(str(tmp_path / "box"))[2][-1]
        expected = [draw(index) for _ in range(3)]
        rng.restore(record.random)
        assert [draw(index) for _ in range(3)] == expected


def _spare_normal_where_the_position_is_the_same() -> None:
    state = np.random.get_state(legacy=False)
    np.random.set_state({**state, "has_gauss": 1, "gauss": 0.25})


def _one_word_of_each() -> None:
    version, words, gauss = random.getstate()
    random.setstate((version, (*words[:300], words[300] ^ 1, *words[301:]), gauss))
    state = np.random.get_state(legacy=False)
    state["state"]["key"][300] ^= 1
    np.random.set_state(state)
    torch_state = torch.get_rng_state()
    torch_state[24 + 8 * 300] ^= 1
    torch.set_rng_state(torch_state)


def _as_many_draws_as_there_are_words() -> None:
    """Every position is then what it was, and every word another."""
    random.getrandbits(32 * 624)
    np.random.bytes(4 * 624)
    torch.randint(2**30, (624,))


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


CHANGES = {
    "nothing": lambda: None,
    "another seed": lambda: _seed(2),
    "the seed from before": lambda: _seed(1),
    "Python alone": lambda: random.seed(3),
    "NumPy alone": lambda: np.random.seed(3),
    "torch alone": lambda: torch.manual_seed(3),
    "a spare normal where the position is the same": _spare_normal_where_the_position_is_the_same,
    "one word of each": _one_word_of_each,
    "as many draws as there are words": _as_many_draws_as_there_are_words,
    "spare normals of Python": lambda: random.gauss(0, 1),
    "spare normals of torch": lambda: (torch.randn(1), torch.randn(1, dtype=torch.float64)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_record_sees_every_change_of_a_random_state_since_the_one_before(tmp_path, kept_random, change):
    box = BlackBox(str(tmp_path / "box"), 0)
    _seed(1)
    step = 0
    for _ in range(5):  # often enough that each slot has been written with every state before it
        for action in (CHANGES[change], lambda: None, lambda: draw(5), lambda: _seed(1)):
            action()
            step += 1
            before = rng.capture()
            box.note(BOUNDARY, step, 0, 0, step)
            record = read_box(str(tmp_path / "box"))[2][-1]
            assert record.step == record.delivered == step
            expected = [draw(5) for _ in range(3)]
            rng.restore(record.random)
            assert [draw(5) for _ in range(3)] == expected
            rng.restore(before)


def test_the_epoch_and_pass_of_a_record_are_its_own(tmp_path):
    box = BlackBox(str(tmp_path / "box"), 0)
    for step, (epoch, passes) in enumerate([(0, 1), (0, 1), (0, 2), (1, 3), (1, 3), (1, 3), (0, 1)], 1):
        box.note(BOUNDARY, step, epoch, passes, 9)
        box.note(IN_FLIGHT, step + 1, epoch, passes, 10)
        records = {record.kind: record for record in read_box(str(tmp_path / "box"))[2] if record.step >= step}
        found = [(records[kind].step, records[kind].epoch, records[kind].passes) for kind in (BOUNDARY, IN_FLIGHT)]
        assert found == [(step, epoch, passes), (step + 1, epoch, passes)]


def test_a_note_that_is_interrupted_takes_no_later_one_along(tmp_path, kept_random):
    box = BlackBox(str(tmp_path / "box"), 0)
    for step in (1, 2):
        box.note(BOUNDARY, step, 0, 0, 0)
    with pytest.raises(TypeError):
        box.note(BOUNDARY, 3, 0, 0, None)
    assert [record.step for record in box.records()] == [2]
    for step in (4, 5, 6):
        box.note(BOUNDARY, step, 0, 0, 0)
        assert box.records()[-1].step == step


@pytest.mark.parametrize("unknown", [("_torch_words",), ("_python_words",), ("_numpy_words",)])
def test_the_slower_public_calls_give_the_same(tmp_path, kept_random, monkeypatch, unknown):
    for name in unknown:
        monkeypatch.setattr(blackbox, name, lambda *_: None)
    box = BlackBox(str(tmp_path / "box"), 0)
    assert not box.fast
    for index in range(6):
        draw(index)
        box.note(BOUNDARY, index, 0, 0, 0)
        expected = draw(index)
        rng.restore(box.records()[-1].random)
        assert draw(index) == expected


def test_the_place_of_the_words_is_known_here():
    assert BlackBox(None, 0).fast


def test_the_end_of_a_step_outlives_any_number_of_moments_inside_the_next_one(tmp_path):
    """Gradient accumulation has many of them, and a survivor asks what was drawn between the two."""
    box = BlackBox(str(tmp_path / "box"), 0)
    for step in (6, 7, 8):
        for delivered in range(5):
            box.note(IN_FLIGHT, step, 1, 2, delivered)
            kept = {record.step: record.delivered for record in box.records()}
            assert kept[step] == delivered
            assert step == 6 or kept[step - 1] == 4


def test_the_last_boundary_outlives_any_number_of_moments_inside_the_next_step(tmp_path):
    box = BlackBox(str(tmp_path / "box"), 3)
    box.note(BOUNDARY, 7, 1, 2, 5)
    for _ in range(10):
        box.note(IN_FLIGHT, 8, 1, 2, 6)
    rank, pid, records = read_box(str(tmp_path / "box"))
    assert (rank, pid) == (3, os.getpid())
    assert [(r.step, r.epoch, r.passes, r.delivered) for r in records if r.kind == BOUNDARY] == [(7, 1, 2, 5)]


def test_a_process_killed_while_it_writes_leaves_a_whole_record(tmp_path):
    path = str(tmp_path / "box")
    for _ in range(20):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            box = BlackBox(path, 0)
            step = 0
            while True:
                step += 1
                torch.rand(3)
                box.note(BOUNDARY, step, 0, 0, step)
                if step == 50:
                    os.write(writer, b"x")
        os.read(reader, 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
        records = read_box(path)[2]
        assert records
        for record in records:
            assert record.step == record.delivered >= 49
            rng.restore({**rng.capture(), "torch": record.random["torch"]})


def test_others_may_not_read_it(tmp_path):
    BlackBox(str(tmp_path / "deep" / "box"), 0)
    assert (tmp_path / "deep" / "box").stat().st_mode & 0o077 == 0


def test_rubbish_is_no_black_box(tmp_path):
    (tmp_path / "box").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match="no black box"):
        read_box(str(tmp_path / "box"))


def test_boxes_of_jobs_that_died_long_ago_are_removed_and_no_others():
    long_ago = time.time() - 8 * 86400
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    jobs = {}
    cases = (("dead", ended.pid, long_ago), ("recent", ended.pid, None), ("alive", os.getpid(), long_ago))
    for name, pid, when in cases:
        job = jobs[name] = boxes.folder(f"test-{name}-{os.getpid()}")
        os.makedirs(job, mode=0o700)
        path = os.path.join(job, "rank-0")
        box = BlackBox(path, 0)
        box._memory[72:80] = pid.to_bytes(8, "little")
        if when is not None:
            os.utime(path, (when, when))
            os.utime(job, (when, when))
    try:
        boxes.forget_old()
        assert {name for name, job in jobs.items() if os.path.exists(job)} == {"recent", "alive"}
    finally:
        for job in jobs.values():
            shutil.rmtree(job, ignore_errors=True)
