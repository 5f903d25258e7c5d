"""What a job leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.progress import read_journal


def journal(folder: str) -> list[dict]:
    """The events of a run, oldest first; none where there is no journal yet."""
    try:
        return list(read_journal(Path(folder, ".holdfast", "journal.jsonl")))
    except OSError:
        return []


def last_events(folder: str) -> str:
    """For the message of a test that found a job hanging."""
    events = [event for event in journal(folder) if event["event"] != "skipped"]
    return "\n".join(json.dumps(event) for event in events[-20:])
