"""Goodput: every second of a run is accounted for, whatever its journal looks like."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from holdfast.progress import Goodput, Journal, goodput, read_journal, timeline

START = 1_700_000_000.0

# How long an example takes says something about the machine's other work, not about the code.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def event(t: float, name: str, attempt: int = 1, rank: int = 0, **fields: Any) -> dict[str, Any]:
    return {"t": START + t, "event": name, "run": "r", "attempt": attempt, "rank": rank, **fields}


def parts(found: Goodput) -> float:
    return found.useful_s + found.startup_s + found.lost_restart_s + found.lost_replay_s + found.lost_stall_s


def one_attempt(begin: float, attempt: int, first: int, resumed: int | None) -> list[dict[str, Any]]:
    """Two seconds of imports, eight of loading."""
    return [
        event(begin + 2, "attempt", attempt, process_started=START + begin, resumed_from=resumed, step=first),
        event(begin + 10, "training", attempt, step=first),
    ]


UNINTERRUPTED = [
    event(0, "launch"),
    *one_attempt(1, 1, 0, None),
    event(111, "end", step=100, outcome="complete", seconds_trained=100.0),
    event(112, "exit"),
]

KILLED = [
    *one_attempt(0, 1, 0, None),
    event(60, "staged", step=50, reason="periodic", stall_s=0.0, bytes=10),
    event(61, "commit", step=50, reason="periodic"),
    # killed at 110 after step 100, seen last at 110; the next attempt starts from 50
    event(118, "died", 2, step=100, last_seen=START + 110),
    *one_attempt(116.5, 2, 50, 50),
    event(176.5, "end", 2, step=100, outcome="complete"),
]

PREEMPTED = [
    *one_attempt(0, 1, 0, None),
    event(100, "notice", source="signal", detail="SIGTERM", grace_s=30, step=90),
    event(100.1, "commit", step=80, reason="periodic"),  # was on its way already
    event(100.5, "agreement", kind="stop", step=91, seconds=0.5),
    event(101.5, "staged", step=91, reason="jit", stall_s=0.5),
    event(103, "commit", step=91, reason="jit"),
    event(103, "wait", step=91, seconds=1.5, why="commit"),
    event(103.5, "end", step=91, outcome="preempted"),
    *one_attempt(120, 2, 91, 91),
    event(230, "end", 2, step=191, outcome="complete"),
]


def test_a_run_without_interruption_is_useful_but_for_its_start() -> None:
    found = goodput(UNINTERRUPTED)
    assert found.startup_s == pytest.approx(11)
    assert found.useful_s == pytest.approx(100)
    assert found.total_s == pytest.approx(111)
    assert found.ratio == pytest.approx(100 / 111)
    assert (found.attempts, found.preemptions, found.steps_lost) == (1, 0, 0)
    assert timeline(UNINTERRUPTED) == []


def test_a_kill_costs_the_restart_and_the_steps_since_the_last_checkpoint() -> None:
    found = goodput(KILLED)
    assert found.startup_s == pytest.approx(10)
    assert found.lost_replay_s == pytest.approx(50)
    assert found.lost_restart_s == pytest.approx(16.5)
    assert found.useful_s == pytest.approx(100)
    assert found.steps_lost == 50
    assert (found.attempts, found.preemptions) == (2, 0)
    assert [row.outcome for row in found.rows] == ["died", "complete"]
    (entry,) = timeline(KILLED)
    assert (entry["what"], entry["steps_lost"], entry["step"], entry["resumed_at_step"]) == ("died", 50, 100, 50)
    assert entry["resume_s"] == pytest.approx(16.5)
    assert entry["notice_to_commit_s"] is None


def test_a_preemption_with_a_just_in_time_save_costs_the_stall_and_the_restart_only() -> None:
    found = goodput(PREEMPTED)
    assert found.steps_lost == 0
    assert found.lost_replay_s == 0
    assert found.lost_stall_s == pytest.approx(2.0)
    assert found.lost_restart_s == pytest.approx(26.5)
    assert found.useful_s == pytest.approx(93.5 - 2.0 + 100)
    assert found.preemptions == 1
    (entry,) = timeline(PREEMPTED)
    assert entry["what"] == "preempted"
    assert entry["detail"] == "signal: SIGTERM"
    assert entry["notice_to_commit_s"] == pytest.approx(3.0), "the periodic save that landed first is not the answer"
    assert entry["resume_s"] == pytest.approx(26.5)
    assert entry["t"] == START + 100


def test_the_report_of_several_ranks_counts_once() -> None:
    doubled = [{**line, "rank": rank, "t": line["t"] + rank / 100} for line in PREEMPTED for rank in range(4)]
    once, many = goodput(PREEMPTED), goodput(doubled)
    assert many.lost_stall_s == pytest.approx(once.lost_stall_s)
    assert many.useful_s == pytest.approx(once.useful_s, abs=0.1)
    assert (many.preemptions, many.attempts, many.steps_lost) == (1, 2, 0)
    assert len(timeline(doubled)) == 1


def test_two_waits_of_one_rank_at_one_step_are_two_waits() -> None:
    waits = [event(20, "wait", step=5, seconds=1.0, why="slot"), event(22, "wait", step=5, seconds=1.0, why="slot")]
    found = goodput([*UNINTERRUPTED[:3], *waits, *UNINTERRUPTED[3:]])
    assert found.lost_stall_s == pytest.approx(2.0)


def test_a_wait_before_the_first_batch_is_a_part_of_the_start() -> None:
    found = goodput(
        [UNINTERRUPTED[0], UNINTERRUPTED[1], event(5, "wait", step=0, seconds=2.0, why="lock"), *UNINTERRUPTED[2:]]
    )
    assert found.lost_stall_s == 0
    assert found.startup_s == pytest.approx(11)


def test_stalls_longer_than_the_training_leave_nothing_useful_and_nothing_negative() -> None:
    events = [*UNINTERRUPTED[:3], event(20, "wait", step=5, seconds=5000.0, why="slot"), *UNINTERRUPTED[3:]]
    found = goodput(events)
    assert (found.lost_stall_s, found.useful_s) == pytest.approx((100, 0))
    assert found.total_s == pytest.approx(111)


def test_a_straggler_of_the_attempt_before_does_not_reach_into_the_next_one() -> None:
    straggler = event(150, "end", 1, rank=1, step=100, outcome="failed")
    found = goodput([*KILLED[:-1], straggler, KILLED[-1]])
    assert found.total_s == pytest.approx(176.5)
    assert found.rows[1].useful_s == pytest.approx(50)


@pytest.mark.parametrize("outcome", ["preempted", "rescued"])
def test_a_pause_is_reported_but_no_part_of_the_total_unless_asked(outcome) -> None:
    events = [
        *one_attempt(0, 1, 0, None),
        event(60, "notice", source="file", detail="pause", step=50),
        event(61, "commit", step=50),
        event(61, "end", step=50, outcome=outcome),
        event(62, "paused"),
        event(3662, "resumed"),
        event(3663, "launch"),
        *one_attempt(3664, 2, 50, 50),
        event(3724, "end", 2, step=100, outcome="complete"),
    ]
    found = goodput(events)
    assert found.lost_idle_s == pytest.approx(3600)
    assert found.total_s == pytest.approx(3724 - 3600)
    assert found.lost_restart_s == pytest.approx(13)
    assert found.preemptions == 0
    assert parts(found) == pytest.approx(found.total_s)
    with_idle = goodput(events, count_idle=True)
    assert with_idle.total_s == pytest.approx(3724)
    assert with_idle.ratio < found.ratio
    (entry,) = timeline(events)
    assert entry["what"] == "paused"
    assert entry["resume_s"] == pytest.approx(13)


def test_a_pause_whose_end_was_not_written_ends_with_the_next_launch() -> None:
    events = [
        *one_attempt(0, 1, 0, None),
        event(61, "end", step=50, outcome="preempted"),
        event(62, "paused"),
        event(1062, "launch"),
        *one_attempt(1063, 2, 50, 50),
        event(1100, "end", 2, step=90, outcome="complete"),
    ]
    assert goodput(events).lost_idle_s == pytest.approx(1000)


def test_the_time_between_a_finished_run_and_its_next_start_is_idle_and_loses_nothing() -> None:
    events = [
        *UNINTERRUPTED,
        event(10_000, "launch", 2),
        *one_attempt(10_001, 2, 0, None),
        event(10_111, "end", 2, step=100, outcome="complete"),
    ]
    found = goodput(events)
    assert found.steps_lost == 0
    assert found.useful_s == pytest.approx(200)
    assert found.lost_idle_s == pytest.approx(10_000 - 111)


def test_a_new_start_after_the_run_was_complete_takes_nothing_from_its_attempts() -> None:
    again = [*one_attempt(10_001, 3, 0, None), event(10_111, "end", 3, step=100, outcome="complete")]
    found = goodput([*PREEMPTED, *again])
    assert found.steps_lost == 0
    assert found.lost_replay_s == 0


def test_an_end_with_an_outcome_from_elsewhere_is_an_end() -> None:
    events = [*one_attempt(0, 1, 0, None), event(60, "commit", step=50), event(70, "end", step=60, outcome="evicted")]
    assert [(entry["what"], entry["steps_lost"]) for entry in timeline(events)] == [("died", 10)]


def test_a_checkpoint_found_corrupt_later_takes_with_it_what_was_trained_on_it() -> None:
    events = [
        *one_attempt(0, 1, 0, None),
        event(110, "end", step=100, outcome="preempted"),
        *one_attempt(110, 2, 100, 100),
        event(170, "end", 2, step=150, outcome="preempted"),
        *one_attempt(170, 3, 40, 40),
        event(240, "end", 3, step=100, outcome="complete"),
    ]
    found = goodput(events)
    assert [row.steps_lost for row in found.rows] == [60, 50, 0]
    assert found.rows[1].useful_s == pytest.approx(0)
    assert found.lost_replay_s == pytest.approx(60 + 50)


def test_an_attempt_that_left_neither_end_nor_death_ends_with_its_last_event() -> None:
    events = [
        *one_attempt(0, 1, 0, None),
        event(60, "commit", step=50),
        event(90, "save_failed", step=80, reason="periodic", error="disk full"),
        event(91, "agreement", kind="stop", step=99, seconds=0.1),
        *one_attempt(200, 2, 50, 50),
        event(220, "commit", 2, step=60),
    ]
    found = goodput(events)
    assert found.rows[0].last_step == 80, "an agreement names a step that may never have been reached"
    assert found.steps_lost == 30
    assert found.lost_restart_s == pytest.approx(210 - 91)
    assert found.rows[1].outcome == "unknown"
    assert [entry["what"] for entry in timeline(events)] == ["died"]


def test_an_attempt_that_never_trained_is_restart_and_the_next_one_ends_the_outage() -> None:
    events = [
        *one_attempt(0, 1, 0, None),
        event(60, "commit", step=50),
        event(60, "end", step=50, outcome="preempted"),
        event(70, "attempt", 2, resumed_from=50, step=50),
        event(75, "end", 2, step=50, outcome="failed"),
        *one_attempt(90, 3, 50, 50),
        event(150, "end", 3, step=100, outcome="complete"),
    ]
    found = goodput(events)
    assert found.lost_restart_s == pytest.approx(40)
    assert found.useful_s == pytest.approx(100)
    first, second = timeline(events)
    assert first["resume_s"] == pytest.approx(40)
    assert second["what"] == "failed"
    assert second["resume_s"] == pytest.approx(25)
    assert second["steps_lost"] == 0


def test_a_run_that_failed_and_was_not_resumed_keeps_what_it_committed() -> None:
    events = [
        *one_attempt(0, 1, 0, None),
        event(60, "commit", step=50),
        event(110, "end", step=100, outcome="failed"),
    ]
    found = goodput(events)
    assert found.steps_lost == 50
    assert found.useful_s == pytest.approx(50)
    (entry,) = timeline(events)
    assert (entry["what"], entry["resume_s"], entry["resumed_at_step"]) == ("failed", None, None)


def test_a_run_that_is_still_going_has_lost_nothing_yet() -> None:
    events = [*one_attempt(0, 1, 0, None), event(60, "commit", step=50), event(70, "wait", step=60, seconds=0)]
    found = goodput(events)
    assert found.steps_lost == 0
    assert found.useful_s == pytest.approx(60)
    assert timeline(events) == []
    dead = [*events, event(80, "exit")]
    assert goodput(dead).steps_lost == 10
    assert [entry["what"] for entry in timeline(dead)] == ["died"]


def test_training_without_a_completed_step_is_lost_once_the_attempt_is_dead() -> None:
    events = [*one_attempt(0, 1, 0, None), event(40, "rescue", step=0, cause="peer died"), *one_attempt(50, 2, 0, None)]
    found = goodput(events)
    assert found.lost_replay_s == pytest.approx(30)
    assert found.useful_s == pytest.approx(0)
    assert timeline(events)[0]["what"] == "rescued"
    assert timeline(events)[0]["detail"] == "peer died"


@pytest.mark.parametrize("first", ["rescue", "notice"])
def test_a_dead_rank_is_what_happened_whether_the_broken_connection_or_torchruns_signal_is_seen_first(first) -> None:
    rescue = event(40, "rescue", step=7, cause="RuntimeError: Connection closed by peer", dead=[0])
    notice = event(40, "notice", source="signal", detail="SIGTERM", step=7, dead=[0])
    repeated = event(40.1, "notice", source="signal", detail="SIGTERM", repeated=True)
    seen = [rescue, repeated] if first == "rescue" else [notice]
    events = [*one_attempt(0, 1, 0, None), *seen, *one_attempt(50, 2, 7, 7)]
    assert timeline(events)[0]["detail"] == "rank 0 died"


def test_a_torn_line_about_the_first_batch_does_not_hide_the_training() -> None:
    events = [line for line in UNINTERRUPTED if line["event"] != "training"]
    found = goodput(events)
    assert found.startup_s == pytest.approx(3)
    assert found.useful_s == pytest.approx(108)


def test_a_clock_that_is_set_back_makes_nothing_negative_and_stops_no_count() -> None:
    shifted = [line if line["t"] < START + 105 else {**line, "t": line["t"] - 86_400} for line in PREEMPTED]
    found = goodput(shifted)
    assert parts(found) == pytest.approx(found.total_s)
    assert found.lost_restart_s == pytest.approx(8.0), "from the first line on the new clock, the time counts again"
    assert found.useful_s == pytest.approx(91.5 + 100)


def test_two_hosts_whose_clocks_differ_do_not_push_the_time_forward() -> None:
    lines = [event(10 + n, "wait", rank=n % 2, step=n, seconds=0.0, why="x") for n in range(100)]
    skewed = [{**line, "t": line["t"] - 60 * line["rank"]} for line in lines]
    events = [*one_attempt(0, 1, 0, None), *skewed, event(111, "end", step=100, outcome="complete")]
    assert goodput(events).total_s == pytest.approx(111)


def test_a_later_attempt_in_the_same_process_does_not_reach_back_to_its_start() -> None:
    events = [
        *one_attempt(0, 1, 0, None),
        event(60, "end", step=50, outcome="rescued"),
        event(70, "attempt", 2, process_started=START, resumed_from=50, step=50),
        event(75, "training", 2, step=50),
        event(125, "end", 2, step=100, outcome="complete"),
    ]
    found = goodput(events)
    assert found.useful_s == pytest.approx(100)
    assert found.lost_restart_s == pytest.approx(15)


def test_an_absurd_start_of_the_process_is_not_believed() -> None:
    found = goodput([{**line, "process_started": 0.0} for line in UNINTERRUPTED[1:]])
    assert found.total_s == pytest.approx(108)


def test_a_run_that_was_launched_and_never_heard_of_is_all_startup() -> None:
    found = goodput([event(0, "launch"), event(30, "exit")])
    assert (found.startup_s, found.total_s, found.ratio, found.attempts) == (30, 30, 0, 0)


def test_no_events_make_no_time() -> None:
    found = goodput([])
    assert (found.total_s, found.ratio, found.rows) == (0, 0, ())
    assert timeline([]) == []


def test_goodput_reads_what_the_journal_writes(tmp_path: Path) -> None:
    class Clock:
        now = START

        def monotonic(self) -> float:
            return self.now

        def wall(self) -> float:
            return self.now

    clock = Clock()
    for number, lines in ((1, KILLED[:4]), (2, KILLED[4:])):
        with Journal(tmp_path / "j", run_id="r", attempt=number, rank=0, clock=clock) as journal:
            for line in lines:
                clock.now = line["t"]
                own = ("t", "event", "run", "attempt", "rank")
                journal.record(line["event"], **{name: value for name, value in line.items() if name not in own})
    assert goodput(read_journal(tmp_path / "j")) == goodput(KILLED)


# --- for any events at all --------------------------------------------------------------------------------------

LAUNCHER = ["launch", "paused", "resumed", "exit"]
NAMES = [
    *LAUNCHER,
    *("attempt", "training", "notice", "agreement", "staged", "commit", "save_failed", "wait", "rescue", "end", "died"),
    "something else",
]
times = st.floats(0, 500).map(lambda t: START + t) | st.floats(0, 4e9)
odd = st.none() | st.booleans() | st.text(max_size=3) | st.floats() | st.lists(st.integers(), max_size=1)
steps = st.integers(0, 200)
durations = st.floats(0, 100)
lines = st.fixed_dictionaries(
    {"t": times, "event": st.sampled_from(NAMES)},
    optional={
        "attempt": st.integers(1, 4) | odd,
        "rank": st.integers(0, 2) | odd,
        "run": st.sampled_from(["r", "s"]) | odd,
        "step": steps | odd,
        "resumed_from": st.none() | steps | odd,
        "process_started": times | odd,
        "last_seen": times | odd,
        "seconds": durations | odd,
        "stall_s": durations | odd,
        "outcome": st.sampled_from(["complete", "preempted", "rescued", "failed"]) | odd,
    },
)


@settings(UNHURRIED, max_examples=300)
@given(st.lists(lines, max_size=25), st.booleans())
@example([{"t": START, "event": "training", "attempt": 1}, {"t": START + 1, "event": "died", "attempt": 2}], False)
def test_the_parts_add_up_to_the_total_for_any_events(events: list[dict[str, Any]], sort: bool) -> None:
    if sort:
        events = sorted(events, key=lambda line: float(line["t"]))
    found = goodput(events)
    values = (
        found.useful_s,
        found.startup_s,
        found.lost_restart_s,
        found.lost_replay_s,
        found.lost_stall_s,
        found.lost_idle_s,
    )
    assert all(value >= 0 and math.isfinite(value) for value in values)
    assert math.isclose(parts(found), found.total_s, rel_tol=1e-12, abs_tol=1e-6)
    assert 0.0 <= found.ratio <= 1.0
    with_idle = goodput(events, count_idle=True)
    assert math.isclose(with_idle.total_s, found.total_s + found.lost_idle_s, rel_tol=1e-12, abs_tol=1e-6)
    assert 0.0 <= with_idle.ratio <= found.ratio
    assert found.steps_lost >= 0
    for entry in timeline(events):
        assert entry["resume_s"] is None or entry["resume_s"] >= 0
        assert entry["notice_to_commit_s"] is None or entry["notice_to_commit_s"] >= 0
        json.dumps(entry)


@settings(UNHURRIED, max_examples=200)
@given(st.lists(st.tuples(st.floats(0, 50), lines), min_size=1, max_size=25))
def test_on_a_clock_that_only_goes_forward_no_second_is_lost_or_made(
    pieces: list[tuple[float, dict[str, Any]]],
) -> None:
    now = START
    events = []
    for wait_s, line in pieces:
        now += wait_s
        events.append({**line, "t": now, "process_started": None})
    worked = [line["t"] for line in events if line["event"] not in LAUNCHER and type(line.get("attempt")) is int]
    launches = [line["t"] for line in events if line["event"] == "launch"]
    # The end of one more attempt closes the account: from the first sign of life to it is the whole time.
    last = {"t": now + 1.0, "event": "end", "attempt": 99, "run": "r", "outcome": "complete"}
    begin = min([*worked[:1], *launches, last["t"]])
    found = goodput([*events, last], count_idle=True)
    assert found.total_s == pytest.approx(last["t"] - begin, abs=1e-5)
