"""Loggers' files, cut back to a moment: tables of metrics, and TensorBoard's event files."""

from __future__ import annotations

import csv
import os
import struct
from collections.abc import Iterator

Row = dict[str, str]

_TIME = 0x09
"""Key of an event's first field, the time."""
_STEP = 0x10
"""Key of the second, the step."""
_HPARAMS, _HP_METRIC = b"_hparams_/", b"hp_metric"
"""In events that each attempt writes at its start; the second one may be logged later, too."""


def read_csv(path: str) -> tuple[list[str], list[Row]]:
    """Header and rows; empty if there is no such file. A last line that was cut off is left out."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return [], []
    end = text.rfind("\n") + 1
    reader = csv.DictReader(text[:end].splitlines(keepends=True))
    return list(reader.fieldnames or ()), list(reader)


def write_csv(path: str, header: list[str], rows: list[Row]) -> None:
    """Replace a table; without rows there is none."""
    if not rows:
        os.unlink(path)
        return
    temporary = f"{path}.holdfast.tmp"
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=header)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)


def rewind_events(path: str, at: float | None, step: int) -> None:
    """Drop the events after the time ``at``; None: of steps from ``step`` on. Those of hyperparameters go, too."""
    kept, count, started = [], 0, False
    for record, event in _events(path):
        count += 1
        when, of_step = _moment(event)
        first = not started and _HP_METRIC in event
        started = started or first
        if _HPARAMS not in event and not first and (when <= at if at is not None else of_step < step):
            kept.append(record)
    if len(kept) == count:
        return
    temporary = f"{path}.holdfast.tmp"
    with open(temporary, "wb") as file:
        file.writelines(kept)
    os.replace(temporary, path)


def _events(path: str) -> Iterator[tuple[bytes, bytes]]:
    """Records of an event file, and the event in each. A record that was cut off ends it."""
    with open(path, "rb") as file:
        while len(head := file.read(12)) == 12:
            size = struct.unpack("<Q", head[:8])[0]
            if size > os.fstat(file.fileno()).st_size:
                return
            rest = file.read(size + 4)
            if len(rest) < size + 4:
                return
            yield head + rest, rest[:size]


def _moment(event: bytes) -> tuple[float, int]:
    """The time of an event, and its step."""
    when, step, at = 0.0, 0, 0
    if event[:1] == bytes([_TIME]) and len(event) >= 9:
        when, at = struct.unpack("<d", event[1:9])[0], 9
    if event[at : at + 1] == bytes([_STEP]):
        shift = 0
        for byte in event[at + 1 : at + 11]:
            step |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
    return when, step
