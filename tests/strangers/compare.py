"""Compares what two runs of a script printed and left on disk."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

from tests.strangers import contents

OURS = ("holdfast-runs/*", "*/.holdfast/*", ".holdfast/*", "*/holdfast-runs/*")
"""Where holdfast keeps its own files."""
_NEVER = ("*.pyc", "*/__pycache__/*", "__pycache__/*", ".strangers/*", "log", "log.printed-*")
_EVENTS = "*tfevents*"
_TEXT = (".txt", ".csv", ".json", ".jsonl", ".log", ".yaml", ".md", ".tsv")


class Text:
    """Makes lines of two runs comparable: working folders and what the row ignores are taken out."""

    def __init__(self, ignore: Iterable[str], lines: str = "", leave_out: Iterable[str] = ()) -> None:
        self._ignore = [re.compile(pattern) for pattern in ignore]
        self._leave_out = [re.compile(pattern) for pattern in leave_out]
        self._lines = re.compile(lines)

    def line(self, line: str, folder: Path) -> str:
        line = line.replace(str(folder), "<folder>").rpartition("\r")[2]
        for pattern in self._ignore:
            line = pattern.sub("~", line)
        return line.rstrip()

    def all(self, lines: Iterable[str], folder: Path) -> list[str]:
        """The lines but those that are left out."""
        kept = (line for line in lines if not any(pattern.search(line) for pattern in self._leave_out))
        return [self.line(line, folder) for line in kept]

    def evidence(self, lines: Iterable[str], folder: Path) -> list[str]:
        """The lines that count."""
        return self.all((line for line in lines if self._lines.search(line)), folder)


def lines_differ(expected: Sequence[str], found: Sequence[str]) -> str:
    """The first difference; empty if there is none."""
    for number, (one, other) in enumerate(zip_longest(expected, found)):
        if one != other:
            return f"line {number + 1}: {_short(one)} became {_short(other)}"
    return ""


def resumed_lines_differ(expected: Sequence[str], attempts: Sequence[Sequence[str]]) -> str:
    """What is wrong with the lines of an interrupted run, attempt by attempt; empty: nothing.

    An attempt prints a stretch of the expected lines, the last attempt up to their end. There is no gap between two
    attempts; a replay prints some of the lines, or all, again.
    """
    until = 0  # so many lines have been printed by some attempt
    for number, lines in enumerate(attempts):
        last = number == len(attempts) - 1
        begins = range(min(until, len(expected)), -1, -1)
        found = [begin for begin in begins if list(expected[begin : begin + len(lines)]) == list(lines)]
        if last:
            found = [begin for begin in found if begin + len(lines) == len(expected)]
        if not found:
            return f"attempt {number + 1}: {_where(expected, lines, until)}"
        until = max(until, found[0] + len(lines))
    return ""


def _where(expected: Sequence[str], lines: Sequence[str], until: int) -> str:
    if not lines:
        return f"no line, and {_short(expected[-1])} was expected"
    begin = max((n for n, line in enumerate(expected[: until + 1]) if line == lines[0]), default=0)
    return lines_differ(expected[begin:], lines) or "lines are missing"


def files_differ(
    expected: Path, found: Path, text: Text, ignore: Iterable[str] = (), *, more: Iterable[str] = ()
) -> list[str]:
    """The files that are not the same in both folders, and how. ``more``: globs of what ``found`` may have besides."""
    ignored = (*OURS, *_NEVER, *ignore)
    ones, others = (_files(folder, ignored) for folder in (expected, found))
    problems = [f"{name} is missing" for name in sorted(ones.keys() - others.keys())]
    besides = [name for name in sorted(others.keys() - ones.keys()) if not _matches(name, more)]
    problems += [f"{name} is there too" for name in besides]
    for name in sorted(ones.keys() & others.keys()):
        one, other = ones[name], others[name]
        if one.is_symlink() or other.is_symlink():
            same = one.is_symlink() and other.is_symlink() and _target(one, expected) == _target(other, found)
            problems += [] if same else [f"{name} is a link to something else"]
        elif fnmatch.fnmatch(name, _EVENTS):
            problems += _named(name, lines_differ(_events(one), _events(other)))
        elif one.suffix in _TEXT or b"\0" not in one.read_bytes()[:4096]:
            lines = [
                [text.line(line, folder) for line in path.read_text(errors="replace").split("\n")]
                for path, folder in ((one, expected), (other, found))
            ]
            problems += _named(name, lines_differ(*lines))
        elif one.read_bytes() != other.read_bytes() and not contents.same(one, expected, other, found):
            sizes = one.stat().st_size, other.stat().st_size
            problems.append(f"{name} differs ({sizes[0]} and {sizes[1]} bytes)")
    return problems


def _files(folder: Path, ignored: Sequence[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (path.is_symlink() or path.is_file()) and not _matches(name, ignored):
            # The name of an event file says when and where it was begun; readers join those of a folder.
            found.setdefault(re.sub(r"tfevents\.\d+\..*", "tfevents", name), path)
    return found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _target(link: Path, folder: Path) -> str:
    return str(link.readlink()).replace(str(folder), "<folder>")


def _named(name: str, difference: str) -> list[str]:
    return [f"{name}: {difference}"] if difference else []


def _events(path: Path) -> list[str]:
    """The scalars in the TensorBoard files of this file's folder, each tag's in their order."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[str]] = {}
    for each in sorted(path.parent.glob(_EVENTS)):
        data, at = each.read_bytes(), 0
        while at + 12 <= len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(f"{value.tag} {event.step} {value.simple_value:.9g}")
    return [line for tag in sorted(found) for line in found[tag]]


def _short(line: str | None) -> str:
    return "nothing" if line is None else repr(line if len(line) <= 100 else f"{line[:100]}…")
