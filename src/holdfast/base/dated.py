"""Names that contain the time at which a program was started: ``out/20261118-221648``, ``Nov18_22-16-48``.

Such a name is another one at each start. :func:`masked` takes the time out of a path, so that two starts of one command
can be recognised by what is left; :func:`siblings` finds the folders of a path's other starts.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

_DAY_S = 86_400
_SEPARATED = ("%Y{0}%m{0}%d", "%d{0}%m{0}%Y", "%m{0}%d{0}%Y", "%y{0}%m{0}%d", "%d{0}%m{0}%y", "%m{0}%d{0}%y")
_NAMED = ("%b{0}%d", "%d{0}%b", "%Y{0}%b{0}%d", "%d{0}%b{0}%Y", "%B{0}%d", "%d{0}%B")
_SHORT = ("%m{0}%d", "%d{0}%m")
"""Dates only if a time of day follows: four digits alone may be anything."""
_TIME = r"[-_T., @]*\d\d?[-_:.h]?\d\d(?:[-_:.m]?\d\d)?s?(?:[-_.,]?\d{1,6})?"
_TIME_ALONE = re.compile(r"\d\d[-_:.h]?\d\d(?:[-_:.m]?\d\d)?s?(?:[-_.,]\d{1,6})?")
_SECONDS = re.compile(r"(?<!\d)\d{10}(?:\d{3}|\d{6}|\d{9}|\.\d+)?(?!\d)")
_MOST = 10_000
"""Folders of one folder that are looked at."""


def masked(path: str, now: float | None = None) -> str | None:
    """``path`` with the time taken out of it; None if it does not contain the time, give or take a day."""
    parts = _parts(path, time.time() if now is None else now)
    return os.sep.join(_blank(part, spans) for part, spans in parts) if any(spans for _, spans in parts) else None


def dated_root(path: str, now: float | None = None) -> str | None:
    """``path`` up to its last folder whose name contains the time; None if there is none."""
    parts = _parts(path, time.time() if now is None else now)
    dated = [number for number, (_, spans) in enumerate(parts) if spans]
    return os.sep.join(part for part, _ in parts[: dated[-1] + 1]) if dated else None


def siblings(root: str, now: float | None = None) -> Iterator[str]:
    """Folders that are named like ``root``, a path with the time in it, but for the time. Not ``root`` itself."""
    parts = _parts(root, time.time() if now is None else now)
    first = next((number for number, (_, spans) in enumerate(parts) if spans), None)
    if first is not None:
        yield from _below(os.sep.join(part for part, _ in parts[:first]) or os.sep, parts[first:], root)


def _below(folder: str, parts: list[tuple[str, list[tuple[int, int]]]], root: str) -> Iterator[str]:
    if not parts:
        if folder != root:
            yield folder
        return
    part, spans = parts[0]
    if not spans:
        inner = os.path.join(folder, part)
        if os.path.isdir(inner):
            yield from _below(inner, parts[1:], root)
        return
    pattern = re.compile(_pattern(part, spans))
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry, _ in zip(entries, range(_MOST), strict=False) if _is_folder(entry)]
    except OSError:
        return
    for name in sorted(filter(pattern.fullmatch, names)):
        yield from _below(os.path.join(folder, name), parts[1:], root)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _parts(path: str, now: float) -> list[tuple[str, list[tuple[int, int]]]]:
    """The components of ``path``, and where in each of them the time stands."""
    found: list[tuple[str, list[tuple[int, int]]]] = []
    dates = _dates(now)
    for part in path.split(os.sep):
        spans = _spans(part, dates, now)
        if not spans and found and found[-1][1] and _TIME_ALONE.fullmatch(part):
            spans = [(0, len(part))]  # hydra: a folder of the day, and one of the time in it
        found.append((part, spans))
    return found


def _spans(part: str, dates: list[tuple[str, bool]], now: float) -> list[tuple[int, int]]:
    spans = [match.span() for match in _SECONDS.finditer(part) if abs(int(match[0][:10]) - now) < _DAY_S]
    for date, needs_time in dates:
        time_of_day = _TIME if needs_time else f"(?:{_TIME})?"
        match = re.search(rf"(?<!\d){re.escape(date)}{time_of_day}(?!\d)", part, re.IGNORECASE)
        if match is not None and not any(start < match.end() and match.start() < end for start, end in spans):
            spans.append(match.span())
    return sorted(spans)


def _dates(now: float) -> list[tuple[str, bool]]:
    """Today as names write it, and the days beside it: clocks have time zones. The longest first."""
    found: dict[str, bool] = {}
    for day in (time.localtime(now + shift * _DAY_S) for shift in (0, -1, 1)):
        for forms, needs_time in ((_SEPARATED, False), (_NAMED, False), (_SHORT, True)):
            for form in forms:
                for separator in ("", "-", "_", ".", " "):
                    found.setdefault(time.strftime(form.format(separator), day), needs_time)
    return sorted(found.items(), key=lambda one: -len(one[0]))


def _blank(part: str, spans: list[tuple[int, int]]) -> str:
    """``part`` with the time in it made unrecognisable."""
    for start, end in spans:
        part = f"{part[:start]}{re.sub('[A-Za-z]', '@', re.sub('[0-9]', '#', part[start:end]))}{part[end:]}"
    return part


def _pattern(part: str, spans: list[tuple[int, int]]) -> str:
    pattern, at = "", 0
    for start, end in spans:
        pattern += re.escape(part[at:start])
        pattern += re.sub("[A-Za-z]+", "[A-Za-z]+", re.sub(r"\d", "0", re.escape(part[start:end]))).replace("0", r"\d")
        at = end
    return pattern + re.escape(part[at:])
