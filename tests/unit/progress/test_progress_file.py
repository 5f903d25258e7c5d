"""The progress file: what is in it, that it is always whole, and that its reader believes nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.progress import (
    Checkpointing,
    Progress,
    ProgressFile,
    ProgressFileError,
    parse_progress,
    read_progress,
    render,
)

CONTRACT = {
    "epoch": 2,
    "totalEpochs": 3,
    "step": 150,
    "totalSteps": 300,
    "loss": "0.4523",
    "accuracy": "0.8756",
    "validationLoss": "0.5123",
    "validationAccuracy": "0.8234",
    "learningRate": "0.000050",
    "percentComplete": "50.0",
    "estimatedTimeRemaining": "45m",
    "lastUpdateTime": "2024-01-15T10:30:00Z",
    "resumedFrom": "checkpoint-150",
    "checkpointing": {
        "enabled": True,
        "latestCheckpoint": "/workspace/checkpoints/checkpoint-150",
        "checkpointsCreated": 3,
        "latestCheckpointTime": "2024-01-15T10:25:00Z",
    },
}
NOW = datetime(2024, 1, 15, 10, 30, tzinfo=UTC).timestamp()

# How long an example takes says something about the machine's other work, not about the code.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class HandClock:
    """A clock that moves when told."""

    def __init__(self, wall: float = NOW) -> None:
        self.mono = 1000.0
        self.wall_s = wall

    def monotonic(self) -> float:
        return self.mono

    def wall(self) -> float:
        return self.wall_s

    def pass_s(self, seconds: float) -> None:
        self.mono += seconds
        self.wall_s += seconds


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def written(path: Path, progress: Progress, clock: HandClock | None = None) -> dict[str, Any]:
    ProgressFile(path, clock or HandClock()).write(progress)
    return read_progress(path)


def test_a_fully_known_run_is_written_exactly_as_the_contract_shows_it(tmp_path: Path) -> None:
    progress = Progress(
        epoch=2,
        total_epochs=3,
        step=150,
        total_steps=300,
        loss=0.45231,
        accuracy=0.8756,
        validation_loss=0.5123,
        validation_accuracy=0.8234,
        learning_rate=5e-5,
        resumed_from="checkpoint-150",
        checkpointing=Checkpointing(
            enabled=True,
            latest_checkpoint="/workspace/checkpoints/checkpoint-150",
            checkpoints_created=3,
            latest_checkpoint_time=NOW - 300 + 0.7,
        ),
    )
    rendered = render(progress, 50.0, 2700.0, NOW + 0.9)
    assert rendered == CONTRACT
    assert list(rendered) == list(CONTRACT)
    assert parse_progress(json.dumps(rendered).encode()) == CONTRACT


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    assert written(tmp_path / "p.json", Progress()) == {"lastUpdateTime": "2024-01-15T10:30:00Z"}


def test_a_start_from_scratch_says_null_and_an_unknown_start_says_nothing(tmp_path: Path) -> None:
    assert written(tmp_path / "a.json", Progress(resumed_from=None))["resumedFrom"] is None
    assert "resumedFrom" not in written(tmp_path / "b.json", Progress())


def test_totals_that_mean_no_limit_are_unknown_and_so_are_percent_and_remaining_time(tmp_path: Path) -> None:
    for total in (-1, 0):
        found = written(tmp_path / "p.json", Progress(step=5, total_steps=total, total_epochs=total))
        assert found.keys() == {"step", "lastUpdateTime"}


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (0.4523, "0.4523"),
        (12.0, "12.0000"),
        (-3.25, "-3.2500"),
        (0.0, "0.0000"),
        (-0.0, "0.0000"),
        (0.0123456, "0.0123"),
        (0.0005634, "0.0005634"),
        (0.00001, "0.00001"),
        (3e-17, "3.000e-17"),
        (1.5e300, "1.500e+300"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_a_loss_keeps_four_decimals_and_a_small_one_its_digits(tmp_path: Path, loss: float, text: str) -> None:
    assert written(tmp_path / "p.json", Progress(loss=loss))["loss"] == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(5e-5, "0.000050"), (4.9833e-5, "0.000050"), (0.1, "0.100000"), (1e-6, "0.000001"), (1.25e-8, "0.0000000125")],
)
def test_a_learning_rate_keeps_six_decimals_and_a_tiny_one_its_digits(tmp_path: Path, rate: float, text: str) -> None:
    assert written(tmp_path / "p.json", Progress(learning_rate=rate))["learningRate"] == text


@UNHURRIED
@given(st.floats(min_value=1e-300, max_value=1e300))
def test_no_positive_number_is_ever_shown_as_zero_or_far_from_itself(value: float) -> None:
    for text in render(Progress(loss=value, learning_rate=value), None, None, NOW).values():
        if not text.startswith("2024"):
            assert float(text) == pytest.approx(value, rel=0.06)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (0.2, "1s"),
        (30, "30s"),
        (59.5, "1m"),
        (2700, "45m"),
        (3590, "1h"),
        (3900, "1h 5m"),
        (86390, "1d"),
        (2 * 86400 + 3 * 3600 + 60, "2d 3h"),
        (-5, "0s"),
    ],
)
def test_remaining_time_reads_as_people_say_it(seconds: float, text: str) -> None:
    assert render(Progress(), None, seconds, NOW)["estimatedTimeRemaining"] == text


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_a_remaining_time_that_is_no_number_is_left_out(seconds: float) -> None:
    assert "estimatedTimeRemaining" not in render(Progress(), seconds, seconds, NOW)


def test_a_fraction_of_an_epoch_is_cut_and_an_impossible_one_left_out(tmp_path: Path) -> None:
    assert written(tmp_path / "a.json", Progress(epoch=1.87))["epoch"] == 1
    assert "epoch" not in written(tmp_path / "b.json", Progress(epoch=math.nan))


def test_a_checkpoint_uri_is_written_without_its_credentials(tmp_path: Path) -> None:
    saved = Checkpointing(latest_checkpoint="s3://AKIA:s3cr3t@bucket/run/checkpoint-3?X-Amz-Signature=abc")
    found = written(tmp_path / "p.json", Progress(checkpointing=saved))
    assert found["checkpointing"] == {"latestCheckpoint": "s3://bucket/run/checkpoint-3"}


@pytest.mark.parametrize("name", ["a\nb", "x" * 5000, "\x1b[2J", "bad\udcff", "\u202egnp"])
def test_a_name_that_a_reader_would_refuse_is_left_out_and_the_rest_is_written(tmp_path: Path, name: str) -> None:
    progress = Progress(step=4, resumed_from=name, checkpointing=Checkpointing(enabled=True, latest_checkpoint=name))
    found = written(tmp_path / "p.json", progress)
    assert found["step"] == 4
    assert "resumedFrom" not in found
    assert found["checkpointing"] == {"enabled": True}


# --- percent and remaining time ---------------------------------------------------------------------------------


def run_steps(file: ProgressFile, clock: HandClock, steps: range, total: int, step_s: float) -> list[dict[str, Any]]:
    seen = []
    for step in steps:
        clock.pass_s(step_s)
        file.write(Progress(step=step, total_steps=total))
        seen.append(read_progress(file.path))
    return seen


def test_there_is_no_remaining_time_before_the_speed_is_known(tmp_path: Path) -> None:
    clock = HandClock()
    file = ProgressFile(tmp_path / "p.json", clock)
    seen = run_steps(file, clock, range(0, 3), 100, 10.0)
    assert "estimatedTimeRemaining" not in seen[0]
    assert "estimatedTimeRemaining" not in seen[1]
    assert seen[2]["estimatedTimeRemaining"] == "16m"  # 98 steps of 10 s


def test_a_slow_first_step_does_not_make_the_run_look_slow(tmp_path: Path) -> None:
    clock = HandClock()
    file = ProgressFile(tmp_path / "p.json", clock)
    file.write(Progress(step=0, total_steps=102))
    run_steps(file, clock, range(1, 2), 102, 600.0)
    seen = run_steps(file, clock, range(2, 3), 102, 6.0)
    assert seen[-1]["estimatedTimeRemaining"] == "10m"


def test_after_a_resume_percent_goes_on_and_the_speed_is_that_of_this_attempt(tmp_path: Path) -> None:
    clock = HandClock()
    run_steps(ProgressFile(tmp_path / "p.json", clock), clock, range(0, 500), 1000, 60.0)
    clock.pass_s(7200.0)
    file = ProgressFile(tmp_path / "p.json", clock)
    file.write(Progress(step=500, total_steps=1000))
    first = read_progress(file.path)
    assert first["percentComplete"] == "50.0"
    assert "estimatedTimeRemaining" not in first
    seen = run_steps(file, clock, range(501, 521), 1000, 1.0)
    assert seen[-1]["percentComplete"] == "52.0"
    assert seen[-1]["estimatedTimeRemaining"] == "8m"  # 480 steps of 1 s


def test_the_speed_follows_a_run_that_became_slower(tmp_path: Path) -> None:
    clock = HandClock()
    file = ProgressFile(tmp_path / "p.json", clock)
    run_steps(file, clock, range(0, 1000), 100_000, 0.1)
    seen = run_steps(file, clock, range(1000, 2000), 100_000, 1.0)
    assert seen[-1]["estimatedTimeRemaining"] == "1d 3h"  # 98,000 steps of 1 s, with none of the fast ones left


def test_the_speed_is_not_that_of_the_last_moment_alone(tmp_path: Path) -> None:
    clock = HandClock()
    file = ProgressFile(tmp_path / "p.json", clock)
    run_steps(file, clock, range(0, 2001), 12_000, 0.1)
    seen = run_steps(file, clock, range(2001, 2011), 12_000, 0.5)
    assert seen[-1]["estimatedTimeRemaining"] == "17m"  # at the last ten steps' speed it would be 1h 23m


def test_a_wall_clock_that_jumps_changes_no_remaining_time(tmp_path: Path) -> None:
    clock = HandClock()
    file = ProgressFile(tmp_path / "p.json", clock)
    run_steps(file, clock, range(0, 5), 65, 1.0)
    clock.wall_s -= 86400.0
    assert run_steps(file, clock, range(5, 6), 65, 1.0)[-1]["estimatedTimeRemaining"] == "1m"


def test_time_spent_between_two_writes_of_one_step_counts(tmp_path: Path) -> None:
    clock = HandClock()
    file = ProgressFile(tmp_path / "p.json", clock)
    for step in range(0, 20):
        clock.pass_s(1.0)
        file.write(Progress(step=step, total_steps=79))
        clock.pass_s(1.0)
        file.write(Progress(step=step, total_steps=79))  # a commit reports in between
    assert read_progress(file.path)["estimatedTimeRemaining"] == "2m"  # 60 steps of 2 s


def test_one_step_reported_twice_is_no_speed(tmp_path: Path) -> None:
    clock = HandClock()
    file = ProgressFile(tmp_path / "p.json", clock)
    for step in (0, 1, 1, 1):
        clock.pass_s(1.0)
        file.write(Progress(step=step, total_steps=10))
    assert "estimatedTimeRemaining" not in read_progress(file.path)


def test_steps_that_go_back_start_the_measurement_again(tmp_path: Path) -> None:
    clock = HandClock()
    file = ProgressFile(tmp_path / "p.json", clock)
    run_steps(file, clock, range(0, 50), 100, 1.0)
    seen = run_steps(file, clock, range(10, 12), 100, 1.0)
    assert seen[0]["percentComplete"] == "10.0"
    assert "estimatedTimeRemaining" not in seen[0]


@pytest.mark.parametrize("step", [300, 301])
def test_a_complete_run_is_at_one_hundred_percent_with_nothing_left(tmp_path: Path, step: int) -> None:
    found = written(tmp_path / "p.json", Progress(step=step, total_steps=300))
    assert found["percentComplete"] == "100.0"
    assert found["estimatedTimeRemaining"] == "0s"


def test_a_run_that_is_almost_complete_is_not_shown_as_complete(tmp_path: Path) -> None:
    found = written(tmp_path / "p.json", Progress(step=99_999, total_steps=100_000))
    assert found["percentComplete"] == "99.9"
    assert render(Progress(), 99.97, None, NOW)["percentComplete"] == "99.9"


@UNHURRIED
@given(st.integers(0, 1000))
def test_percent_is_exact_to_its_decimal(step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = written(Path(folder) / "p.json", Progress(step=step, total_steps=1000))
    assert found["percentComplete"] == f"{step // 10}.{step % 10}"


# --- on the disk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o077, 0o000, 0o027])
def test_everyone_may_read_it_and_only_the_owner_write_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "p.json"
    with umask(mask):
        ProgressFile(path, HandClock()).write(Progress(step=1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_missing_folders_are_made_and_nothing_else_is_left_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "p.json"
    file = ProgressFile(path, HandClock())
    for step in range(5):
        file.write(Progress(step=step))
    assert os.listdir(path.parent) == ["p.json"]


def test_a_link_planted_under_the_temporary_name_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".p.json.planted.tmp").symlink_to(victim)
    monkeypatch.setattr(tempfile, "_name_sequence", iter(["planted", "free"]))
    ProgressFile(folder / "p.json", HandClock(wall=0.0)).write(Progress(step=1))
    assert victim.read_text() == "precious"
    assert read_progress(folder / "p.json")["step"] == 1


def test_a_link_at_the_file_itself_is_replaced_and_its_target_untouched(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "p.json").symlink_to(victim)
    assert written(tmp_path / "p.json", Progress(step=1))["step"] == 1
    assert victim.read_text() == "precious"


def test_disk_trouble_is_logged_once_per_kind_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "blocker"
    blocker.write_text("a file where a folder is needed")
    file = ProgressFile(blocker / "p.json", HandClock())
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            file.write(Progress(step=step))
        assert len(caplog.records) == 1
        assert str(file.path) in caplog.text
        assert "TRAINING_PROGRESS_FILE" in caplog.text

        blocker.unlink()
        file.write(Progress(step=3))
        assert read_progress(file.path)["step"] == 3

        file.path.unlink()
        blocker.rmdir()
        blocker.write_text("again")
        file.write(Progress(step=4))
    assert len(caplog.records) == 2


def test_two_kinds_of_trouble_are_two_log_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    folder.write_text("a file")
    file = ProgressFile(folder / "p.json", HandClock())
    with caplog.at_level(logging.WARNING):
        file.write(Progress(step=1))
        folder.unlink()
        (folder / "p.json").mkdir(parents=True)
        file.write(Progress(step=2))
        file.write(Progress(step=3))
    assert len(caplog.records) == 2
    assert os.listdir(folder) == ["p.json"], "a temporary file was left behind by a write that failed"


def test_a_full_disk_leaves_the_last_whole_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = """
import logging, resource, signal, sys
from holdfast.progress import Checkpointing, Progress, ProgressFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = ProgressFile(sys.argv[1])
file.write(Progress(step=1))
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
file.write(Progress(step=2, checkpointing=Checkpointing(latest_checkpoint="x" * 3000)))
"""
    path = tmp_path / "p.json"
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60, check=True)
    assert "cannot write the progress file" in result.stderr
    assert read_progress(path)["step"] == 1
    assert os.listdir(tmp_path) == ["p.json"]


def test_temporary_files_of_killed_attempts_go_and_those_of_a_live_one_stay(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    old, young, other = (tmp_path / name for name in (".p.json.aaaa.tmp", ".p.json.bbbb.tmp", ".q.json.aaaa.tmp"))
    for leftover in (old, young, other):
        leftover.write_text("{")
    now = time.time()
    os.utime(old, (now - 7200, now - 7200))
    os.utime(other, (now - 7200, now - 7200))
    ProgressFile(path, HandClock(wall=now)).write(Progress(step=1))
    assert sorted(os.listdir(tmp_path)) == [".p.json.bbbb.tmp", ".q.json.aaaa.tmp", "p.json"]


def test_a_writer_killed_at_any_moment_leaves_a_whole_file_and_readers_never_see_another(tmp_path: Path) -> None:
    code = """
import itertools, sys
from holdfast.progress import Checkpointing, Progress, ProgressFile
file = ProgressFile(sys.argv[1])
for step in itertools.count():
    size = 4000 if step % 2 else 10
    file.write(Progress(step=step, checkpointing=Checkpointing(latest_checkpoint="x" * size)))
    if step == 0:
        print("writing", flush=True)
"""
    path = tmp_path / "p.json"
    dice = random.Random(7)
    for _ in range(12):
        with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            try:
                until = time.monotonic() + dice.uniform(0.0, 0.08)
                while time.monotonic() < until:
                    assert "step" in read_progress(path)
            finally:
                writer.send_signal(signal.SIGKILL)
        assert "step" in read_progress(path)


# --- the reader -------------------------------------------------------------------------------------------------


def test_the_contract_example_is_read_back_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(CONTRACT, indent=2))
    assert read_progress(path) == CONTRACT


def test_unknown_keys_are_dropped_and_null_is_absent(tmp_path: Path) -> None:
    data = {"step": 3, "loss": None, "__proto__": {"x": 1}, "checkpointing": {"enabled": False, "extra": [1]}}
    assert parse_progress(json.dumps(data).encode()) == {"step": 3, "checkpointing": {"enabled": False}}
    assert parse_progress(b'{"resumedFrom": null}') == {"resumedFrom": None}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b'{"step": 1', "not JSON"),
        (b"\x00\x00\x00\x00", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"step": NaN}', "not JSON"),
        (b"[1, 2]", "expected an object"),
        (b'"text"', "expected an object"),
        (b"[" * 60_000, "nested too deeply"),
        (b'{"a":' * 12_000, "nested too deeply"),
        (b'{"step": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"step": 99999999999999999999}', "step is 99999999999999999999"),
        (b'{"step": -1}', "step is -1"),
        (b'{"step": "5"}', "step is '5'"),
        (b'{"step": true}', "step is True"),
        (b'{"step": 1.5}', "step is 1.5"),
        (b'{"loss": 0.45}', "loss is 0.45"),
        (b'{"loss": "<script>"}', "loss is"),
        (b'{"percentComplete": "50%"}', "percentComplete is"),
        (b'{"lastUpdateTime": "yesterday"}', "lastUpdateTime is"),
        (b'{"lastUpdateTime": "2024-13-45T99:00:00Z"}', "lastUpdateTime is"),
        (b'{"estimatedTimeRemaining": "' + b"9" * 100 + b'm"}', "estimatedTimeRemaining is"),
        (b'{"resumedFrom": "\\u001b[2J"}', "resumedFrom is"),
        (b'{"resumedFrom": "a\\nb"}', "resumedFrom is"),
        (b'{"resumedFrom": "\\ud800"}', "resumedFrom is"),
        (b'{"resumedFrom": 150}', "resumedFrom is"),
        (b'{"checkpointing": []}', "checkpointing"),
        (b'{"checkpointing": {"enabled": "yes"}}', "checkpointing.enabled is 'yes'"),
        (b'{"checkpointing": {"latestCheckpoint": "' + b"x" * 5000 + b'"}}', "checkpointing.latestCheckpoint"),
    ],
)
def test_what_no_run_writes_is_refused_with_the_reason(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(data)
    with pytest.raises(ProgressFileError) as refusal:
        read_progress(path)
    text = str(refusal.value)
    assert says in text
    assert str(path) in text
    assert len(text) < 500
    assert text.isprintable()
    assert isinstance(refusal.value, ValueError)


def test_a_huge_file_is_refused_without_being_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # sparse: a terabyte that could not be read into memory
    with pytest.raises(ProgressFileError, match="larger than the 65536 bytes"):
        read_progress(path)
    path.write_text(json.dumps(CONTRACT))
    with pytest.raises(ProgressFileError, match="larger than the 100 bytes"):
        read_progress(path, max_bytes=100)


def test_a_pipe_or_a_folder_in_its_place_does_not_hold_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ProgressFileError, match="not a regular file"):
            read_progress(place)


def test_a_missing_file_is_reported_as_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_progress(tmp_path / "p.json")


@UNHURRIED
@given(
    st.binary(max_size=300)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: st.dictionaries(st.sampled_from([*CONTRACT, "x"]), inner),
    ).map(lambda v: json.dumps(v).encode())
)
def test_any_bytes_either_give_a_progress_or_one_kind_of_error(data: bytes) -> None:
    try:
        found = parse_progress(data)
    except ProgressFileError:
        return
    assert found.keys() <= CONTRACT.keys()


anything = st.none() | st.floats()


@UNHURRIED
@given(
    st.builds(
        Progress,
        epoch=anything,
        total_epochs=anything,
        step=st.none() | st.integers(),
        total_steps=st.none() | st.integers(),
        loss=anything,
        accuracy=anything,
        validation_loss=anything,
        learning_rate=anything,
        resumed_from=st.none() | st.text(),
        checkpointing=st.builds(
            Checkpointing,
            enabled=st.none() | st.booleans(),
            latest_checkpoint=st.none() | st.text(),
            checkpoints_created=st.none() | st.integers(),
            latest_checkpoint_time=anything,
        ),
    )
)
def test_whatever_a_run_reports_its_file_can_be_read(progress: Progress) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = written(Path(folder) / "p.json", progress)
    assert found["lastUpdateTime"] == "2024-01-15T10:30:00Z"
