"""On which step all ranks save.

A *round* begins when any rank calls it (a preemption notice, or a periodic save that is due by the
clock). Every rank has one thread blocked on the call of the next round and nothing else to do until
then. On the call it posts the step that its rank can stop at soonest; the last to post decides: the
highest step of all. Every rank can reach that step, since it needs only collectives that all still
take part in, and none has passed it, since a boundary reached during a round waits for the decision.

A rank that stays silent is dead: its posting thread needs nothing of its training thread. Where all silent
ranks are seen to be dead nobody waits for them. Then, or when a rank says that it is broken, the decision is
to rescue: each survivor saves what it has.

All races are settled by ``put_once``: whoever writes first, all ranks read the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from holdfast.agree.board import Board

Kind = Literal["stop", "save"]
_FOREVER_S = 7 * 24 * 3600.0
_LOOK_S = 0.2
"""Until the first look at who is silent."""


@dataclass(frozen=True, slots=True)
class Call:
    """Why a round was called."""

    round: int
    kind: Kind
    """``stop``: save and leave. ``save``: save and go on."""
    rank: int
    """Who called."""
    source: str = ""
    detail: str = ""
    kill_wait_s: float = 0.0
    """Seconds that are left of the wait when the call is written."""
    grace_s: float = 0.0
    """Seconds until the deadline when the call is written. Durations, since the ranks' clocks differ."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do. A value; the engine carries it out."""

    step: int
    rescue: bool = False
    """The step cannot be reached together: each rank that can saves its own last boundary."""
    silent: tuple[int, ...] = ()
    """Ranks that posted nothing."""
    seconds: float = 0.0
    """From the first post seen by this rank to the decision."""


class Agreement:
    """One rank's part in the rounds of a job."""

    def __init__(self, board: Board, rank: int, world: int, silence_s: float) -> None:
        self.board = board
        self.rank = rank
        self.world = world
        self._silence_s = silence_s
        self.round = 0

    def call(self, call: Call) -> None:
        """Begin the round, unless another rank has."""
        self.board.put_once(f"{call.round}/call", json.dumps(asdict(call)).encode())

    def wait_for_call(self) -> Call:
        """Block until the current round is called. Raises ``BoardLostError`` when the board is gone."""
        while (value := self.board.wait(f"{self.round}/call", _FOREVER_S)) is None:
            continue
        return Call(**json.loads(value))

    def decide(self, step: int, *, broken: bool = False, dead: Callable[[], Iterable[int]] = tuple) -> Decision:
        """Post the step at which this rank can stop soonest, and return what all do.

        ``broken``: this rank will take part in no further step, so the others cannot finish theirs either.
        ``dead``: ranks that are seen to be gone.
        """
        began = time.monotonic()
        count = self.board.append(f"{self.round}/posts", json.dumps([self.rank, step, broken]).encode())
        key = f"{self.round}/decision"
        value: bytes | None
        if count == self.world:
            value = self.board.put_once(key, self._outcome())
        else:
            value = self.board.wait(key, min(_LOOK_S, self._silence_s))
            if value is None and not ((gone := set(dead())) and self._silent(self._posts()) <= gone):
                value = self.board.wait(key, self._silence_s - _LOOK_S)
            if value is None:
                value = self.board.put_once(key, self._outcome())
        self.round += 1
        fields = json.loads(value)
        return Decision(fields["step"], fields["rescue"], tuple(fields["silent"]), time.monotonic() - began)

    def _posts(self) -> list[tuple[int, int, bool]]:
        return [json.loads(entry) for entry in self.board.entries(f"{self.round}/posts")]

    def _silent(self, posts: list[tuple[int, int, bool]]) -> set[int]:
        return set(range(self.world)) - {rank for rank, _, _ in posts}

    def _outcome(self) -> bytes:
        posts = self._posts()
        silent = sorted(self._silent(posts))
        broken = any(broken for _, _, broken in posts)
        step = max(step for _, step, _ in posts)
        return json.dumps({"step": step, "rescue": bool(silent) or broken, "silent": silent}).encode()
