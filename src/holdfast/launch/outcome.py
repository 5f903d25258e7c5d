"""How an attempt ended, and what follows from it. Decides; carries nothing out."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field
from typing import Any


class Verdict(enum.Enum):
    DONE = "done"
    """The script has ended as it should."""
    RESTART = "restart"
    """It was stopped from outside, or came further than the attempt before it: start again, at once, any number of
    times."""
    RETRY = "retry"
    """It failed and came no further: start again a few times, then give up."""


@dataclass(slots=True)
class Ended:
    """All that is known about an attempt that is over."""

    code: int
    """Exit code of the process that the launcher started; negative: killed by that signal."""
    ranks: dict[int, int] = field(default_factory=dict)
    """Exit codes of the ranks that did not leave with 0, where torchrun told."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """What the journal says of it."""
    process: str = "the script"
    """What the launcher started, for people: the script, or torchrun."""

    @property
    def codes(self) -> dict[int, int]:
        return self.ranks or {0: self.code}

    @property
    def commits(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "commit"]

    @property
    def committed_step(self) -> int | None:
        """The newest step that it committed; None: it committed nothing."""
        return max((event["step"] for event in self.commits if isinstance(event.get("step"), int)), default=None)

    @property
    def outcomes(self) -> set[str]:
        return {str(event.get("outcome")) for event in self.events if event["event"] == "end"}

    @property
    def step(self) -> int | None:
        """The last step that it is known to have completed."""
        known = (event.get("step") for event in self.events if event["event"] != "agreement")
        return max((step for step in known if isinstance(step, int)), default=None)


def judge(ended: Ended, jit_code: int) -> Verdict:
    """``jit_code``: how a process leaves after a just-in-time save."""
    stopped = bool(ended.outcomes & {"preempted", "rescued"}) and "complete" not in ended.outcomes
    if ended.code == 0 and not stopped:
        return Verdict.DONE
    # A rank that a signal reaches before its first step has nothing to save and still was stopped from outside. A
    # script that leaves with that code and says nothing is not ours to believe: it could go on like that for ever.
    all_left = bool(ended.events) and all(code == jit_code for code in ended.codes.values())
    if all_left or "preempted" in ended.outcomes or ended.commits:
        return Verdict.RESTART
    return Verdict.RETRY


def exit_code(ended: Ended) -> int:
    """The script's own code, as a shell would show it."""
    failed = [code for code in ended.codes.values() if code not in (0, -signal.SIGTERM)]
    code = failed[0] if failed else ended.code
    return 128 - code if code < 0 else code


def what_happened(ended: Ended, jit_code: int) -> str:
    """In words, for people."""
    notice = next((event for event in ended.events if event["event"] == "notice"), None)
    cause = next((str(event["cause"]) for event in ended.events if event["event"] == "rescue" and "cause" in event), "")
    at = "" if ended.step is None else f" at step {ended.step}"
    killed = {rank: -code for rank, code in ended.codes.items() if code < 0 and code != -signal.SIGTERM}
    if killed:
        rank, number = next(iter(killed.items()))
        who = f"rank {rank}" if ended.ranks else ended.process
        return f"{who} was killed by {_name(number)}{at}"
    others = [code for code in ended.codes.values() if code not in (0, jit_code, -signal.SIGTERM)]
    if notice is not None and not others:
        return f"preempted ({notice.get('detail', 'notice')}){at}"
    if others or cause:
        rank = next((rank for rank, code in ended.codes.items() if code in others), 0)
        who = f"rank {rank}" if ended.ranks else ended.process
        code = others[0] if others else ended.code
        return f"{who} failed with exit code {code}{at}" + (f" ({cause})" if cause else "")
    return f"stopped{at}"


def what_is_saved(ended: Ended) -> str:
    """In words: the save that the end of the attempt led to."""
    last = next((event for event in reversed(ended.commits) if event.get("reason") in ("jit", "rescue")), None)
    if last is None:
        return ""
    notice = next((event for event in ended.events if event["event"] == "notice"), None)
    since = last["t"] - notice["t"] if notice is not None else last.get("since_request_s", 0.0)
    return f"saved step {last['step']} in {max(0.0, since):.1f} s"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
