"""What two runs of a script have left, compared: checkpoints value by value, printed lines, files.

Two undisturbed runs tell what differs by itself, such as times; that is left out when a third one is compared. Nothing
of a framework is imported: safetensors, JSON and torch's archives are read as they lie.
"""

from __future__ import annotations

import hashlib
import json
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

from holdfast.store.checkpoints import Checkpoint, whole
from holdfast.store.local import LocalBackend

Values = dict[str, Any]
"""By place: a number, a text, or a digest of many bytes."""

PARAMETERS, OPTIMIZER, RANDOM = "parameters", "optimizer state", "random state"
READS, REST = "values that the script read out of tensors", "other state"
KINDS = (PARAMETERS, OPTIMIZER, RANDOM, READS, REST)
_METADATA = "__metadata__"
_OWN = ".passes"
"""A count of holdfast's own: a resumed run begins its pass once more."""
_TOKEN = re.compile(r"\s+|[^\s]+")
_NEVER = re.compile(r"(^|/)(__pycache__|\.holdfast|holdfast-runs|wandb)(/|$)|\.pyc$|tfevents")


def newest(locations: Sequence[Path]) -> Checkpoint | None:
    for location in locations:
        if location.is_dir():
            found = next(whole([LocalBackend(str(location))]), None)
            if found is not None:
                return found
    return None


# ---------------------------------------------------------------------- checkpoints


def values_of(checkpoint: Checkpoint, plain: Callable[[str], str]) -> Values:
    """Everything that a checkpoint holds. ``plain`` takes the names of folders out of texts."""
    assert isinstance(checkpoint.backend, LocalBackend)
    found: Values = {}
    for entry in checkpoint.manifest.files:
        data = (Path(checkpoint.backend.root) / (entry.ref or f"{checkpoint.name}/{entry.path}")).read_bytes()
        for name, value in _values(entry.path, data):
            if not name.endswith(_OWN):
                found[f"{entry.path}{name}"] = plain(value) if isinstance(value, str) else value
    return found


def _values(path: str, data: bytes) -> Iterator[tuple[str, Any]]:
    if path.endswith(".safetensors"):
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        for text in header.pop(_METADATA, {}).values():
            yield from _leaves(_read_json(text))
        for name, tensor in header.items():
            begin, end = (8 + length + offset for offset in tensor["data_offsets"])
            yield f" {name}", (tensor["dtype"], tuple(tensor["shape"]), _digest(data[begin:end]))
    elif path.endswith(".json"):
        yield from _leaves(_read_json(data.decode(errors="replace")))
    elif zipfile.is_zipfile(BytesIO(data)):
        with zipfile.ZipFile(BytesIO(data)) as archive:
            for name in archive.namelist():
                inner, content = name.partition("/")[2], archive.read(name)
                if inner == "data.pkl":
                    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
                        yield f" {number}", f"{opcode.name} {argument!r}"
                elif inner.startswith("data/"):
                    yield f" {inner}", _digest(content)
    else:
        yield "", _digest(data)


def _leaves(value: Any, path: str = " ") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def kind_of(place: str) -> str:
    """What a value of a checkpoint belongs to."""
    file = place.partition(" ")[0]
    if file.startswith(("model", "parameters", "lightning.ckpt", "pytorch_model")):
        return PARAMETERS
    if file.startswith("optimizer"):
        return OPTIMIZER
    if "follow.seen" in place:
        return READS
    return RANDOM if "random" in place or "rng" in place else REST


def different(one: Values, other: Values, noise: set[str]) -> list[str]:
    """Places where they are not the same, but for ``noise``."""
    absent = object()
    places = [place for place in {**one, **other} if place not in noise]
    return [place for place in places if one.get(place, absent) != other.get(place, absent)]


# ---------------------------------------------------------------------- lines


class Lines:
    """The lines of an undisturbed run, as a pattern: what another such run prints otherwise may be anything."""

    def __init__(self, one: Sequence[str], other: Sequence[str]) -> None:
        self.first, self.second = list(one), list(other)
        self.same_number = len(one) == len(other)
        self._patterns = [_pattern(*pair) for pair in zip(one, other, strict=False)]
        self.noisy = sum(1 for pair in zip(one, other, strict=False) if pair[0] != pair[1])

    def fits(self, number: int, line: str) -> bool:
        if number >= len(self._patterns):
            return number < len(self.first) and self.first[number] == line
        return self._patterns[number].fullmatch(line) is not None

    def difference(self, attempts: Sequence[Sequence[str]]) -> str:
        """The first line of an interrupted run that is not as expected; empty: none.

        Each attempt prints a stretch of the lines, the last one up to their end; a replay prints some of them again.
        Before that, each may print again what comes before its loop."""
        until = 0
        for number, lines in enumerate(attempts):
            end = self._end(lines, until, last=number == len(attempts) - 1)
            if end is None:
                return self._first(lines, until)
            until = max(until, end)
        return ""

    def _end(self, lines: Sequence[str], until: int, *, last: bool) -> int | None:
        """Where the stretch of an attempt ends; None: there is no such stretch."""
        for again in range(len(lines) + 1):
            if again and not self.fits(again - 1, lines[again - 1]):
                return None
            rest = lines[again:]
            begins = [len(self.first) - len(rest)] if last else range(min(until, len(self.first)), -1, -1)
            begin = next((begin for begin in begins if begin <= until and self._all_fit(begin, rest)), None)
            if begin is not None:
                return begin + len(rest)
        return None

    def _all_fit(self, begin: int, lines: Sequence[str]) -> bool:
        return 0 <= begin <= len(self.first) - len(lines) and all(
            self.fits(begin + number, line) for number, line in enumerate(lines)
        )

    def _first(self, lines: Sequence[str], until: int) -> str:
        if not lines:
            return f"nothing was printed, and {self.first[-1]!r} was expected" if self.first else ""
        begin = next((n for n in range(min(until, len(self.first) - 1), -1, -1) if self.fits(n, lines[0])), 0)
        for number, (line, expected) in enumerate(zip_longest(lines, self.first[begin:]), begin):
            if line is None or expected is None or not self.fits(number, line):
                return f"line {number + 1}: {expected!r} became {line!r}"
        return "lines are missing"


def _pattern(one: str, other: str) -> re.Pattern[str]:
    """A line whose words that differ may be anything."""
    if one == other:
        return re.compile(re.escape(one))
    ones, others = _TOKEN.findall(one), _TOKEN.findall(other)
    if len(ones) != len(others):
        return re.compile(r".*")
    words = [
        re.escape(a) if a == b else r"\s+" if a.isspace() and b.isspace() else r"\S+"
        for a, b in zip(ones, others, strict=True)
    ]
    return re.compile("".join(words))


# ---------------------------------------------------------------------- files


def files_of(folder: Path, plain: Callable[[str], str]) -> Values:
    """The files below a folder, by digest."""
    found: Values = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not path.is_symlink() and not _NEVER.search(name):
            data = path.read_bytes()
            found[name] = _digest(data if b"\0" in data[:4096] else plain(data.decode(errors="replace")).encode())
    return found
