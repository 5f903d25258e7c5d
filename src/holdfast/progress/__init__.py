"""What a run tells the world: the progress file, the journal, and the goodput that follows from it."""

from __future__ import annotations

from holdfast.progress.file import (
    MAX_BYTES,
    UNKNOWN,
    Checkpointing,
    Progress,
    ProgressFile,
    ProgressFileError,
    Unknown,
    parse_progress,
    read_progress,
    render,
)
from holdfast.progress.goodput import AttemptRow, Goodput, goodput, timeline
from holdfast.progress.journal import Journal, parse_event, read_journal, redact, redact_uri

__all__ = [
    "MAX_BYTES",
    "UNKNOWN",
    "AttemptRow",
    "Checkpointing",
    "Goodput",
    "Journal",
    "Progress",
    "ProgressFile",
    "ProgressFileError",
    "Unknown",
    "goodput",
    "parse_event",
    "parse_progress",
    "read_journal",
    "read_progress",
    "redact",
    "redact_uri",
    "render",
    "timeline",
]
