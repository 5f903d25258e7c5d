"""Where the time of a run went, from its journal.

Goodput is the time that trained steps which survived, over all time. Guarantees, for any events at all,
whatever is missing, doubled, torn or out of order:

- The parts add up: useful + startup + restart + replay + stall is the total, and no part is negative.
- The ratio lies between 0 and 1.

That holds by construction. The run is cut at two instants per attempt, its first batch and its end, each
kept inside the attempt's own window (from its first event to the first event of the next one). Before
the first batch lies startup or restart, after it training; training is divided into stalls, lost steps
and the rest. Every second falls into one piece.

Wall clocks are the only clocks that two machines share, and they jump. Events are read in the order of
the file, which is the order in which they were appended; a small step back is the skew between two
ranks and counts as no time, a large one is a clock that was set, or one that is far off, and shifts all
that the same rank wrote after it.

Lost steps are turned into seconds by the mean speed of their attempt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_LAUNCHER_EVENTS = frozenset({"launch", "paused", "resumed", "exit"})
_END_OF_PAUSE = frozenset({"resumed", "launch", "attempt", "training"})
# An agreement names the step that the ranks will reach, the others the step that was reached.
_STEP_IS_AHEAD = frozenset({"agreement"})
_OUTCOMES = ("complete", "preempted", "rescued", "failed")
_RANK_SKEW_S = 5.0
_LONGEST_BEFORE_FIRST_EVENT_S = 86400.0
_LATEST_TIME = 1e11


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRow:
    """One life of the run."""

    attempt: int
    started: float
    """Time of its first event, in seconds since the epoch, as its machine had it."""
    outcome: str
    """``complete``, ``preempted``, ``rescued`` or ``failed`` as it said itself; ``died``; ``unknown`` while nothing
    followed it: it may still run."""
    first_step: int
    """The step it went on from."""
    last_step: int
    """The last step it is known to have completed."""
    steps_lost: int
    before_s: float
    """From the end of the attempt before it (for the first: from the launch) to its first batch, pauses excluded."""
    useful_s: float
    replay_s: float
    stall_s: float
    idle_s: float
    """Paused on purpose before it."""
    noticed: bool
    """It was told that it would be stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Where the time went. ``useful + startup + restart + replay + stall == total``."""

    total_s: float
    useful_s: float
    ratio: float
    """``useful_s / total_s``; 0 when no time has passed."""
    startup_s: float
    """From the launch to the first batch of the first attempt."""
    lost_restart_s: float
    """From the end of an attempt to the first batch of the next."""
    lost_replay_s: float
    """Training of steps that did not survive and had, or will have, to be trained again."""
    lost_stall_s: float
    """Training stood still for a copy or a wait."""
    lost_idle_s: float
    """Paused on purpose, or finished and started again later; no part of the total unless it was asked to be."""
    steps_lost: int
    attempts: int
    preemptions: int
    """Attempts that were given notice and stopped before the run was complete; pauses are not counted."""
    rows: tuple[AttemptRow, ...]


def goodput(events: Iterable[Mapping[str, Any]], *, count_idle: bool = False) -> Goodput:
    """Account for every second of the run; with ``count_idle`` pauses are a part of the total."""
    history = _read(events)
    rows = tuple(_row(history, index) for index in range(len(history.attempts)))
    if rows:
        startup_s = rows[0].before_s
    else:  # launched, and nothing heard of it since
        startup_s = history.until - history.origin
    restart_s = math.fsum(row.before_s for row in rows[1:])
    useful_s = math.fsum(row.useful_s for row in rows)
    replay_s = math.fsum(row.replay_s for row in rows)
    stall_s = math.fsum(row.stall_s for row in rows)
    idle_s = math.fsum(row.idle_s for row in rows)
    total_s = math.fsum((startup_s, restart_s, useful_s, replay_s, stall_s, idle_s if count_idle else 0.0))
    return Goodput(
        total_s=total_s,
        useful_s=useful_s,
        ratio=min(1.0, useful_s / total_s) if total_s > 0 else 0.0,
        startup_s=startup_s,
        lost_restart_s=restart_s,
        lost_replay_s=replay_s,
        lost_stall_s=stall_s,
        lost_idle_s=idle_s,
        steps_lost=sum(row.steps_lost for row in rows),
        attempts=len(rows),
        preemptions=sum(1 for index, row in enumerate(rows) if row.noticed and _what(history, index) in _TAKEN_AWAY),
        rows=rows,
    )


def timeline(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per interruption, oldest first.

    ``what`` is ``paused``, ``preempted``, ``rescued``, ``failed`` or ``died``; ``detail`` says more in the words of
    the event; ``t`` is when it began, in seconds since the epoch. ``notice_to_commit_s`` is None without a notice
    or without a checkpoint after it; ``resume_s``, from the end to the next first batch without the pause in
    between, is None while nothing resumed.
    """
    history = _read(events)
    entries = []
    for index, attempt in enumerate(history.attempts):
        what = _what(history, index)
        if what in ("complete", "unknown"):
            continue
        later = _next_trained(history, index)
        resume_s = None
        if later is not None:
            resume_s = later.trained - attempt.ended - history.idle_between(attempt.ended, later.trained)
        entries.append(
            {
                "attempt": attempt.number,
                "what": what,
                "detail": attempt.detail,
                "t": attempt.interrupted,
                "step": attempt.last_step,
                "notice_to_commit_s": attempt.notice_to_commit_s(),
                "steps_lost": _steps_lost(history, index),
                "resumed_at_step": None if later is None else later.first_step,
                "resume_s": None if resume_s is None else max(0.0, resume_s),
            }
        )
    return entries


_TAKEN_AWAY = frozenset({"preempted", "rescued", "failed", "died"})


@dataclass(slots=True, eq=False)
class _Attempt:
    run: str
    number: int
    opened: float
    """First event. This and all instants below are in seconds of the run, after correction of the clock."""
    started: float
    shift: float = 0.0
    """What turns a wall time that this attempt wrote into seconds of the run."""
    process_started: float | None = None
    last_event: float = 0.0
    began: float | None = None
    """First batch."""
    end_said: float | None = None
    outcomes: set[str] = field(default_factory=set)
    last_seen: float | None = None
    """What the next attempt found out about this one's death."""
    was_found_dead: bool = False
    rescued: bool = False
    start_step: int | None = None
    resumed_step: int | None = None
    highest_step: int | None = None
    committed_step: int | None = None
    notices: list[tuple[float, int | None]] = field(default_factory=list)
    notice_wall: float | None = None
    last_wall: float = 0.0
    commits: list[tuple[float, int | None]] = field(default_factory=list)
    stalls: list[tuple[float, tuple[str, int | None, str], int | None, float]] = field(default_factory=list)
    """When it ended, which one it was, the rank that reports it, seconds."""
    detail: str = ""

    trained: float = 0.0
    """First batch, or the end where there was none; inside the attempt's window."""
    ended: float = 0.0

    @property
    def first_step(self) -> int:
        for step in (self.start_step, self.resumed_step):
            if step is not None:
                return step
        return 0

    @property
    def resumed_at(self) -> int | None:
        """The step whose state it loaded; None: it never said."""
        return self.resumed_step if self.resumed_step is not None else self.start_step

    @property
    def last_step(self) -> int:
        return max(self.first_step, self.highest_step or 0)

    @property
    def outcome(self) -> str | None:
        return next((outcome for outcome in _OUTCOMES if outcome in self.outcomes), None)

    @property
    def interrupted(self) -> float:
        return self.notice_wall if self.notice_wall is not None else self.last_wall

    def stall_s(self) -> float:
        """Seconds that training stood still; a wait before the first batch is a part of the start."""
        stalls: dict[tuple[str, int | None, str], dict[int | None, float]] = {}
        for t, which, rank, seconds in self.stalls:
            if t >= self.trained:
                by_rank = stalls.setdefault(which, {})
                by_rank[rank] = by_rank.get(rank, 0.0) + seconds
        # The ranks stand still together: of what several report about one stall, the longest counts.
        return math.fsum(max(by_rank.values()) for by_rank in stalls.values())

    def notice_to_commit_s(self) -> float | None:
        if not self.notices:
            return None
        noticed, step = self.notices[0]
        for t, committed in self.commits:
            # A periodic save that was already on its way may land after the notice; it is not the answer to it.
            if t >= noticed and (step is None or committed is None or committed >= step):
                return t - noticed
        return None

    def place(self, until: float) -> None:
        """Fix the two cuts inside the window that ends with the next attempt's first event."""
        end = self.end_said
        if end is None:
            end = self.last_event
            if self.last_seen is not None:
                end = max(end, self.last_seen)
        self.ended = min(max(end, self.opened), until)
        began = self.began
        if began is None:
            # The line about the first batch may be the torn one. Steps beyond the first prove training.
            began = self.opened if self.last_step > self.first_step else self.ended
        self.trained = min(max(began, self.opened), self.ended)


@dataclass(slots=True)
class _History:
    attempts: list[_Attempt] = field(default_factory=list)
    launches: list[float] = field(default_factory=list)
    exits: list[float] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    idle: list[tuple[float, float]] = field(default_factory=list)
    """Sorted and disjoint."""
    origin: float = 0.0
    until: float = 0.0

    def idle_between(self, begin: float, end: float) -> float:
        return math.fsum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in self.idle)


def _row(history: _History, index: int) -> AttemptRow:
    attempt = history.attempts[index]
    before = history.attempts[index - 1].ended if index else history.origin
    idle_s = min(history.idle_between(before, attempt.trained), attempt.trained - before)
    training_s = attempt.ended - attempt.trained
    stall_s = min(attempt.stall_s(), training_s)
    steps_lost = _steps_lost(history, index)
    steps = attempt.last_step - attempt.first_step
    if steps > 0:
        lost_part = min(1.0, steps_lost / steps)
    else:
        lost_part = 1.0 if _is_over_without_result(history, index) else 0.0
    replay_s = (training_s - stall_s) * lost_part
    return AttemptRow(
        attempt=attempt.number,
        started=attempt.started,
        outcome=attempt.outcome or ("died" if _is_dead(history, index) else "unknown"),
        first_step=attempt.first_step,
        last_step=attempt.last_step,
        steps_lost=steps_lost,
        before_s=max(0.0, attempt.trained - before - idle_s),
        useful_s=max(0.0, training_s - stall_s - replay_s),
        replay_s=replay_s,
        stall_s=stall_s,
        idle_s=idle_s,
        noticed=bool(attempt.notices),
    )


def _followers(history: _History, index: int) -> list[_Attempt]:
    """The attempts that went on with the work of this one: none after the run was complete, none of another run."""
    attempt = history.attempts[index]
    followers: list[_Attempt] = []
    for later in history.attempts[index + 1 :]:
        if (followers[-1] if followers else attempt).outcome == "complete":
            break
        if later.run == attempt.run:
            followers.append(later)
    return followers


def _steps_lost(history: _History, index: int) -> int:
    attempt = history.attempts[index]
    if attempt.outcome == "complete":
        return 0
    followers = _followers(history, index)
    if followers:
        # The lowest of all that came later, not only of the next: a checkpoint can turn out corrupt after
        # it was resumed from once, and then what was trained on top of it goes with it.
        resumed = [later.resumed_at for later in followers if later.resumed_at is not None]
        survived = min(resumed) if resumed else attempt.last_step
    elif attempt.outcome is None and not _is_dead(history, index):
        survived = attempt.last_step
    else:
        # Over, and nothing resumed yet: what is committed is what there is to resume from.
        survived = attempt.committed_step or 0
    return max(0, attempt.last_step - max(attempt.first_step, survived))


def _is_over_without_result(history: _History, index: int) -> bool:
    return history.attempts[index].outcome != "complete" and _is_dead(history, index)


def _is_dead(history: _History, index: int) -> bool:
    """Whether the attempt is known to be over. One that fell silent last may still run."""
    attempt = history.attempts[index]
    if attempt.end_said is not None or attempt.was_found_dead or index + 1 < len(history.attempts):
        return True
    return any(t >= attempt.last_event for t in history.exits)


def _what(history: _History, index: int) -> str:
    attempt = history.attempts[index]
    outcome = attempt.outcome
    if outcome == "complete":
        return outcome
    if not _is_dead(history, index):
        return "unknown"
    until = history.attempts[index + 1].opened if index + 1 < len(history.attempts) else math.inf
    outcome = outcome or ("rescued" if attempt.rescued else "died")
    # On a busy machine a rank may not answer in time: the others then save as if it were dead, and it is still a pause.
    if outcome in ("preempted", "rescued") and any(attempt.opened <= start <= until for start, _ in history.pauses):
        return "paused"
    return outcome


def _next_trained(history: _History, index: int) -> _Attempt | None:
    return next(
        (later for later in _followers(history, index) if later.began is not None or later.ended > later.trained), None
    )


def _read(events: Iterable[Mapping[str, Any]]) -> _History:
    history = _History()
    attempts: dict[tuple[str, int], _Attempt] = {}
    paused_at: float | None = None
    for t, shift, event in _on_one_clock(events):
        name = event["event"]
        history.until = t
        if name == "paused":
            paused_at = t if paused_at is None else paused_at
        elif paused_at is not None and name in _END_OF_PAUSE:
            history.pauses.append((paused_at, t))
            paused_at = None
        if name == "launch":
            # The first one is written once the run is known, and says itself when the start really was.
            at = _seconds(event.get("at"))
            since = 0.0 if at is None else t - (at + shift)
            history.launches.append(t - since if 0.0 < since <= _LONGEST_BEFORE_FIRST_EVENT_S else t)
        elif name == "exit":
            history.exits.append(t)
        number = event.get("attempt")
        if name in _LAUNCHER_EVENTS or isinstance(number, bool) or not isinstance(number, int):
            continue
        run = event.get("run")
        key = (run if isinstance(run, str) else "", number)
        attempt = attempts.get(key)
        if attempt is None:
            attempt = attempts[key] = _Attempt(run=key[0], number=number, opened=t, started=float(event["t"]))
            history.attempts.append(attempt)
        attempt.shift = shift
        attempt.last_event = t
        attempt.last_wall = float(event["t"])
        if name == "died":
            place = history.attempts.index(attempt)
            if place:
                _note_death(history.attempts[place - 1], event, t)
        else:
            _note(attempt, event, t)
    if paused_at is not None:
        history.pauses.append((paused_at, history.until))
    _place(history)
    return history


def _note(attempt: _Attempt, event: Mapping[str, Any], t: float) -> None:
    name = event["event"]
    step = _step(event.get("step"))
    if name == "attempt":
        if "resumed_from" in event:
            resumed = _step(event["resumed_from"])
            attempt.resumed_step = 0 if event["resumed_from"] is None else resumed
        if step is not None and attempt.start_step is None:
            attempt.start_step = step
        process_started = _seconds(event.get("process_started"))
        if process_started is not None:
            since = t - (process_started + attempt.shift)
            if 0.0 < since <= _LONGEST_BEFORE_FIRST_EVENT_S:
                attempt.process_started = t - since
    elif name == "training":
        if attempt.began is None:
            attempt.began = t
            attempt.start_step = step if step is not None else attempt.start_step
    elif name == "notice":
        attempt.notices.append((t, step))
        if attempt.notice_wall is None:
            attempt.notice_wall = float(event["t"])
            # torchrun tells the others to leave once a rank is dead: that is what happened, not the signal.
            attempt.detail = (attempt.rescued and attempt.detail) or _death(event) or _words(event, "source", "detail")
    elif name == "commit":
        attempt.commits.append((t, step))
        attempt.committed_step = max(attempt.committed_step or 0, step or 0)
    elif name in ("staged", "wait"):
        seconds = _seconds(event.get("stall_s" if name == "staged" else "seconds"))
        if seconds is not None:
            which = (name, step, str(event.get("why" if name == "wait" else "reason")))
            attempt.stalls.append((t, which, _rank(event), seconds))
    elif name == "rescue":
        attempt.rescued = True
        attempt.detail = attempt.detail or _death(event) or _words(event, "cause")
    elif name == "save_failed":
        attempt.detail = attempt.detail or _words(event, "error")
    elif name == "end":
        attempt.end_said = t
        attempt.outcomes.add(str(event.get("outcome")))
        attempt.detail = attempt.detail or _words(event, "error")
    if step is not None and name not in _STEP_IS_AHEAD:
        attempt.highest_step = max(attempt.highest_step or 0, step)


def _note_death(dead: _Attempt, event: Mapping[str, Any], t: float) -> None:
    dead.was_found_dead = True
    step, last_seen = _step(event.get("step")), _seconds(event.get("last_seen"))
    if step is not None:
        dead.highest_step = max(dead.highest_step or 0, step)
    if last_seen is not None:
        dead.last_seen = min(last_seen + dead.shift, t)


def _place(history: _History) -> None:
    attempts = history.attempts
    if not attempts:
        return
    first = attempts[0]
    # The start of the process counts for the first attempt only: a later one may be a new attempt within
    # an old process, and what lies between two attempts is restart anyway.
    history.origin = min([first.opened, *history.launches])
    if first.process_started is not None:
        history.origin = min(history.origin, first.process_started)
    for attempt, later in zip(attempts, [*attempts[1:], None], strict=True):
        attempt.place(math.inf if later is None else later.opened)
        if later is not None and (attempt.outcome == "complete" or attempt.run != later.run):
            relaunched = next((t for t in history.launches if attempt.ended <= t <= later.opened), later.opened)
            history.idle.append((attempt.ended, relaunched))
    history.idle = _union([*history.idle, *history.pauses])


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    result: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


def _on_one_clock(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, float, Mapping[str, Any]]]:
    """Each event with its time in seconds of the run, which never go back, and the shift that made it so."""
    base: float | None = None
    shifts: dict[int | None, float] = {}
    now = 0.0
    for event in events:
        t = _seconds(event.get("t"))
        if t is None or not isinstance(event.get("event"), str):
            continue
        if base is None:
            base = -t  # counted from the first event: small numbers keep their microseconds
        # A shift for each rank: with one for all, two hosts whose clocks differ would push each other forward
        # with every line.
        rank = _rank(event)
        shift = shifts.get(rank, base)
        if t + shift < now - _RANK_SKEW_S:
            shift = shifts[rank] = now - t
        now = max(now, t + shift)
        yield now, shift, event


def _rank(event: Mapping[str, Any]) -> int | None:
    rank = event.get("rank")
    return rank if isinstance(rank, int) else None


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LATEST_TIME:
        return None
    return float(value)


def _step(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        return None
    return int(value)


def _death(event: Mapping[str, Any]) -> str:
    dead = event.get("dead")
    return f"rank {dead[0]} died" if isinstance(dead, list) and dead else ""


def _words(event: Mapping[str, Any], *names: str) -> str:
    return ": ".join(str(event[name]) for name in names if event.get(name) not in (None, ""))
