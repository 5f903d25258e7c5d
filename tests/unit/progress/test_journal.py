"""The journal: whole lines from many processes, through kills and full disks, and without secrets."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.progress import Journal, read_journal, redact
from holdfast.progress.journal import MAX_LINE_BYTES

# How long an example takes says something about the machine's other work, not about the code.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class FixedClock:
    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 1705314600.1234


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def journal_at(path: Path | None, *, rank: int = 0) -> Journal:
    return Journal(path, run_id="r1", attempt=2, rank=rank, clock=FixedClock())


def recorded(path: Path, **fields: Any) -> dict[str, Any]:
    with journal_at(path) as journal:
        journal.record("commit", **fields)
    return list(read_journal(path))[-1]


def test_a_line_says_when_what_who_and_then_the_fields(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    with journal_at(path, rank=3) as journal:
        journal.record("commit", step=7, seconds=0.5, location=Path("/ckpt/checkpoint-7"))
        journal.sync()
    assert path.read_text() == (
        '{"time":"2024-01-15T10:30:00.123Z","t":1705314600.1234,"event":"commit","run":"r1","attempt":2,"rank":3,'
        '"step":7,"seconds":0.5,"location":"/ckpt/checkpoint-7"}\n'
    )


def test_a_field_cannot_pass_itself_off_as_one_of_the_journal(tmp_path: Path) -> None:
    line = recorded(tmp_path / "j", rank=9, attempt=8, event="end", t=0)
    assert (line["rank"], line["attempt"], line["event"], line["t"]) == (0, 2, "commit", 1705314600.1234)
    assert (line["rank_"], line["attempt_"], line["event_"], line["t_"]) == (9, 8, "end", 0)


@pytest.mark.parametrize("mask", [0o077, 0o000])
def test_only_the_owner_may_read_it_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        recorded(tmp_path / "j", step=1)
    assert stat.S_IMODE((tmp_path / "j").stat().st_mode) == 0o600


def test_lines_of_many_processes_never_interleave(tmp_path: Path) -> None:
    code = """
import sys
from holdfast.progress import Journal
path, rank = sys.argv[1], int(sys.argv[2])
journal = Journal(path, run_id="r", attempt=1, rank=rank)
print("ready", flush=True)
sys.stdin.readline()
for number in range(150):
    journal.record("wait", number=number, texts=[str(rank) * 3000] * (number % 12))
"""
    path = tmp_path / "j"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, path, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(4)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:  # all at once, so that they do write at the same time
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    lines = path.read_bytes().split(b"\n")
    events = [json.loads(line) for line in lines if line]
    assert len(events) == 4 * 150
    for rank in range(4):
        own = [event for event in events if event["rank"] == rank]
        assert [event["number"] for event in own] == list(range(150))
        assert {text for event in own for text in event["texts"]} == {str(rank) * 3000}


def test_a_kill_in_the_middle_costs_at_most_the_line_being_written(tmp_path: Path) -> None:
    code = """
import itertools, sys
from holdfast.progress import Journal
journal = Journal(sys.argv[1], run_id="r", attempt=int(sys.argv[2]), rank=0)
for number in itertools.count():
    journal.record("wait", number=number, texts=["x" * 4000] * 10)
    if number == 0:
        print("writing", flush=True)
"""
    path = tmp_path / "j"
    dice = random.Random(3)
    for attempt in range(6):
        command = [sys.executable, "-c", code, str(path), str(attempt)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writing\n"
            time.sleep(dice.uniform(0.0, 0.03))  # how far it gets is the point
            writer.send_signal(signal.SIGKILL)
    events = list(read_journal(path))
    for attempt in range(6):
        numbers = [event["number"] for event in events if event["attempt"] == attempt]
        assert numbers == list(range(len(numbers)))
        assert numbers


def test_a_line_after_a_torn_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "j"
    recorded(path, step=1)
    with open(path, "ab") as file:
        file.write(b'{"time":"2024-01-15T10:30:00.123Z","t":17053')
    recorded(path, step=2)
    assert [event["step"] for event in read_journal(path)] == [1, 2]


def test_a_line_torn_by_a_peer_while_the_file_is_open_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with journal_at(path) as journal:
        journal.record("commit", step=1)
        with open(path, "ab") as peer:
            peer.write(b'{"torn": ')
        journal.record("commit", step=2)
    assert [event["step"] for event in read_journal(path)] == [1, 2]


def test_a_write_that_the_disk_cuts_short_costs_only_its_line(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from holdfast.progress import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal(sys.argv[1], run_id="r", attempt=1, rank=0)
journal.record("commit", step=1)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
journal.record("commit", step=2, pad="x" * 500)
journal.record("commit", step=3, pad="x" * 500)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
journal.record("commit", step=4)
"""
    path = tmp_path / "j"
    command = [sys.executable, "-c", code, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "cannot write the journal" in result.stderr
    assert [event["step"] for event in read_journal(path)] == [1, 4]


def test_what_is_no_event_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "j"
    good = b'{"t": 1.5, "event": "end"}'
    path.write_bytes(
        b"\n".join(
            [
                good,
                b"",
                b"not json",
                b"[1]",
                b'"text"',
                b'{"event": "end"}',
                b'{"t": NaN, "event": "end"}',
                b'{"t": true, "event": "end"}',
                b'{"t": 1, "event": 5}',
                b"\xff\xfe",
                b"[" * 100_000,
                b'{"t": 1, "event": "' + b"x" * (20 * MAX_LINE_BYTES) + b'"}',
                b"\0" * 512 + good,
                b'{"t": 2, "event": "en',
            ]
        )
    )
    assert list(read_journal(path)) == [{"t": 1.5, "event": "end"}] * 2


def test_a_journal_that_does_not_exist_yet_has_no_events(tmp_path: Path) -> None:
    assert list(read_journal(tmp_path / "j")) == []


def test_disk_trouble_is_logged_once_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocker = tmp_path / "blocker"
    blocker.write_text("a file where a folder is needed")
    journal = journal_at(blocker / "j")
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            journal.record("commit", step=step)
            journal.sync()
        assert len(caplog.records) == 1
        assert str(blocker / "j") in caplog.text
        blocker.unlink()
        journal.record("commit", step=3)
        assert [event["step"] for event in read_journal(blocker / "j")] == [3]
        journal.close()
        (blocker / "j").unlink()
        blocker.rmdir()
        blocker.write_text("again")
        journal.record("commit", step=4)
    assert len(caplog.records) == 2
    assert [event["step"] for event in journal.recent()] == [0, 1, 2, 3, 4]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_logged_once_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    journal = journal_at(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            journal.record("commit", step=step)
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_a_link_planted_at_its_place_is_not_written_through(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "j").symlink_to(victim)
    journal_at(tmp_path / "j").record("commit", step=1)
    assert victim.read_text() == "precious"
    assert "cannot write the journal" in caplog.text


def test_without_a_path_the_last_hundred_events_are_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with journal_at(None) as journal:
        for step in range(250):
            journal.record("commit", step=step)
        journal.sync()
    assert [event["step"] for event in journal.recent()] == list(range(150, 250))
    assert os.listdir(tmp_path) == []


def test_an_event_after_close_is_not_lost(tmp_path: Path) -> None:
    journal = journal_at(tmp_path / "j")
    journal.record("commit", step=1)
    journal.close()
    journal.close()
    journal.record("commit", step=2)
    assert [event["step"] for event in read_journal(tmp_path / "j")] == [1, 2]


def test_closing_gives_the_descriptor_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        recorded(tmp_path / f"{number}", step=1)
    assert len(os.listdir("/proc/self/fd")) == before


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_values_that_json_does_not_know_become_text(tmp_path: Path) -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    line = recorded(
        tmp_path / "j",
        loss=float("nan"),
        error=ValueError("bad\nvalue"),
        ranks={1},
        names=("a", "b"),
        odd=Unprintable(),
        by_rank={0: 1.5},
        cycle=cycle,
        broken="\udcff",
    )
    assert line["loss"] == "nan"
    assert line["error"] == "ValueError: bad\nvalue"
    assert line["ranks"] == [1]
    assert line["names"] == ["a", "b"]
    assert line["odd"] == "<Unprintable>"
    assert line["by_rank"] == {"0": 1.5}


@pytest.mark.parametrize("field", [["y" * 4000] * 100, 10**5000], ids=["long", "many digits"])
def test_an_event_too_large_for_a_line_is_still_there_without_its_fields(tmp_path: Path, field: Any) -> None:
    line = recorded(tmp_path / "j", step=1, field=field)
    assert line["event"] == "commit"
    assert line["truncated"] is True


# --- secrets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("s3://KEYNAME:SECRET@host/run", "s3://host/run"),
        ("s3://KEYNAME:SEC/RET+@bucket/run", "s3://bucket/run"),
        ("s3://KEYNAME:SEC?RET@bucket/run", "s3://bucket/run"),
        ("https://host:9000/a/b?X-Amz-Signature=SECRET&x=1", "https://host:9000/a/b"),
        ("https://host/cb#access_token=SECRET", "https://host/cb"),
        ("https://SECRET@host/x", "https://host/x"),
        ("http://host:8080/user@example.org/x", "http://host:8080/user@example.org/x"),
        ("http://[::1]:8080/a@b", "http://[::1]:8080/a@b"),
        ("s3://a:SECRET@c/d,s3://e:SECRET@g/h", "s3://c/d,s3://g/h"),
        ("PUT 'https://h/x?sig=SECRET' failed: 403", "PUT 'https://h/x failed: 403"),
        ("AWS_SECRET_ACCESS_KEY=SECRET", "AWS_SECRET_ACCESS_KEY=***"),
        ("--hub-token=SECRET", "--hub-token=***"),
        ("Authorization: Bearer SECRET", "Authorization: ***"),
        ("password='SECRET and SECRET' next", "password=*** next"),
        ("failed for AKIAABCDEFGHIJKLMNOP", "failed for ***"),
        ("max_tokens=512 --tokenizer=gpt2", "max_tokens=512 --tokenizer=gpt2"),
        ("step 5 of 10, loss 0.3", "step 5 of 10, loss 0.3"),
    ],
)
def test_a_text_loses_its_secrets_and_keeps_the_rest(text: str, clean: str) -> None:
    assert redact(text) == clean
    assert redact(f"before {text}") == f"before {clean}"


def test_values_under_a_secret_name_are_hidden_at_any_depth(tmp_path: Path) -> None:
    line = recorded(
        tmp_path / "j",
        storage={"aws_access_key": "SECRET", "accessKeyId": "SECRET", "key id": "SECRET", "uri": "s3://u:SECRET@b/p"},
        client_secret="SECRET",
        nested=[{"Password": ["SECRET"]}, {"credentials": {"a": "SECRET"}}],
        auth_tokens=["SECRET"],
        token=None,
        tokens_per_s=1200.5,
        tokenizer="gpt2",
        argv=[
            "train.py",
            "--token",
            "SECRET",
            "--api-key",
            "SECRET",
            "--max-tokens",
            "512",
            "--use-token",
            "--lr",
            "1",
        ],
    )
    assert "SECRET" not in (tmp_path / "j").read_text()
    assert line["storage"]["uri"] == "s3://b/p"
    assert line["token"] is None
    assert line["tokens_per_s"] == 1200.5
    assert line["tokenizer"] == "gpt2"
    assert line["argv"] == [
        "train.py",
        "--token",
        "***",
        "--api-key",
        "***",
        "--max-tokens",
        "512",
        "--use-token",
        "--lr",
        "1",
    ]


def test_a_secret_that_the_cut_of_a_long_text_would_halve_is_not_kept() -> None:
    text = "x " * 2040 + "s3://KEYNAME:" + "SECRET" * 50 + "@bucket/run"
    assert "SECRET" not in redact(text)
    assert len(redact(text)) <= 4096


def test_redaction_of_a_long_hostile_text_is_quick() -> None:
    begin = time.monotonic()
    for text in ("secret" * 100_000, "a.-" * 200_000, "s3://" * 100_000, "token=" * 100_000, "a " * 300_000):
        redact(text)
    assert time.monotonic() - begin < 5.0


@UNHURRIED
@given(
    scheme=st.sampled_from(["s3", "https", "gs", "az", "postgresql+psycopg"]),
    user=st.from_regex(r"[A-Za-z0-9%._~-]{0,10}", fullmatch=True),
    secret=st.from_regex(r"QQQ[A-Za-z0-9%._~!$&'()*+,;=:-]{0,20}", fullmatch=True),
    path=st.from_regex(r"[a-z0-9/_.-]{0,20}", fullmatch=True),
)
def test_no_password_in_a_uri_survives(scheme: str, user: str, secret: str, path: str) -> None:
    uri = f"{scheme}://{user}:{secret}@host/{path}?sig={secret}"
    assert redact({"error": f"cannot reach {uri}: timed out"}) == {
        "error": f"cannot reach {scheme}://host/{path} timed out"
    }


@UNHURRIED
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text() | st.binary(max_size=5),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=20,
    )
)
def test_any_value_can_be_recorded_and_redacting_twice_changes_nothing(value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        line = recorded(Path(folder) / "j", value=value)
    assert line["event"] == "commit"
    once = redact(value)
    assert redact(once) == once
