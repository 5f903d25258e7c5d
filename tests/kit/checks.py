"""What must be true of a run's folder, whatever happened to the run."""

from __future__ import annotations

from holdfast.store import open_backend
from holdfast.store.checkpoints import verify, whole
from tests.kit.jobs import journal


def assert_whole(folder: str, minimum: int = 1):
    """Everything visible is whole, byte for byte; returns the newest."""
    found = list(whole([open_backend(str(folder))]))
    assert len(found) >= minimum, f"{folder} holds {len(found)} whole checkpoints"
    for checkpoint in found:
        assert verify(checkpoint) == []
    return found[0]


def last_completed_when_noticed(folder: str) -> int:
    """The step that was completed when the first notice of the last attempt came."""
    events = journal(folder)
    attempt = max(event["attempt"] for event in events)
    return min(
        event["step"]
        for event in events
        if event["event"] == "notice" and event["attempt"] == attempt and "step" in event
    )
