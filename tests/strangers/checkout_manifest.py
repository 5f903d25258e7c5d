"""A manifest: which commands of a repository are tried, with which data, and how they must fare.

TOML, one ``[[row]]`` for each command; ``[defaults]`` holds fields that all rows share. A field that does not exist or
has a value of another kind is an error that names the file, the row, the field, the value and what is accepted.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.strangers.rows import DURATIONS, Row, Verdict

VERDICTS = {"exact": Verdict.EXACT, "inexact": Verdict.INEXACT, "unprotected": Verdict.UNPROTECTED}


class ManifestError(ValueError):
    """A manifest that cannot be used."""


@dataclass(frozen=True)
class Entry:
    """A row of a manifest: what the battery runs, and what it needs of the checkout."""

    row: Row
    parts: tuple[str, ...] = ()
    """Paths of the checkout that are copied; empty: every file that git lists."""


@dataclass(frozen=True)
class Manifest:
    """What is tried of one repository."""

    path: Path
    repository: str
    """Its address, or the name under which it is shown."""
    entries: tuple[Entry, ...]
    packages: tuple[str, ...] = ()
    """Requirements that are installed, without what they depend on, in a folder on PYTHONPATH."""
    setup: tuple[tuple[str, ...], ...] = ()
    """Commands that are run once in that folder."""

    @property
    def name(self) -> str:
        """``owner/name`` of an address, or the name as it stands."""
        return owner_and_name(self.repository)


def owner_and_name(address: str) -> str:
    """The last two parts of an address: ``https://host/a/b.git`` and ``git@host:a/b`` are both ``a/b``."""
    if not re.search(r"://|:|^/", address):
        return address
    return "/".join(re.split(r"[/:]", address.removesuffix("/").removesuffix(".git"))[-2:])


def read(path: Path) -> Manifest:
    """The manifest in this file."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path} is not TOML: {error}") from error
    top = _Table(data, str(path), path.parent)
    found = top.take(_TOP)
    rows = data.get("row", [])
    if not rows:
        raise ManifestError(f"{path} has no [[row]]: each command that is tried has one, with 'name' and 'command'")
    defaults = _Table(found.pop("defaults", {}), f"{path}, [defaults]", path.parent).take(_DEFAULTS)
    entries = []
    for number, values in enumerate(found.pop("row"), 1):
        where = f"{path}, row {number}"
        if isinstance(values.get("name"), str):
            where += f" ({values['name']!r})"
        entries.append(_entry(_Table(values, where, path.parent), defaults))
    names = [entry.row.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ManifestError(f"{path}: 'name' is {name!r} in {names.count(name)} rows; each has a name of its own")
    return Manifest(path, entries=tuple(entries), **{"repository": path.stem, **found})


def _entry(table: _Table, defaults: dict[str, Any]) -> Entry:
    own = table.take(_FIELDS)
    values = {**defaults, **own}
    values["env"] = {**defaults.get("env", {}), **own.get("env", {})}
    values["ignore"] = (*DURATIONS, *values.get("ignore", ()))
    for name in ("name", "command"):
        if name not in values and (name == "name" or "not_run" not in values):
            raise ManifestError(f"{table.where}: {name!r} is missing; {_FIELDS[name].accepted}")
    if values.get("verdict", Verdict.EXACT) is not Verdict.EXACT and not values.get("says"):
        raise ManifestError(f"{table.where}: 'says' is missing; a pattern of the message that this verdict needs")
    if ("at_line" in own) + ("steps" in own) > 1:
        raise ManifestError(f"{table.where}: 'at_line' and 'steps' are both given; accepted: one of the two")
    parts, about = values.pop("parts", ()), values.pop("about", "")
    return Entry(Row(**values, idiom=about), parts)


# ---------------------------------------------------------------------- fields


@dataclass(frozen=True)
class _Kind:
    """What a field accepts, and what becomes of it; None from ``convert``: not accepted."""

    accepted: str
    convert: Callable[[Any, Path], Any]


class _Table:
    """Values of a TOML table, and where it stands."""

    def __init__(self, values: Any, where: str, folder: Path) -> None:
        if not isinstance(values, dict):
            raise ManifestError(f"{where}: {values!r} is not a table of fields")
        self.values, self.where, self._folder = values, where, folder

    def take(self, kinds: dict[str, _Kind]) -> dict[str, Any]:
        """All of them, converted."""
        found = {}
        for name, value in self.values.items():
            if name not in kinds:
                raise ManifestError(f"{self.where}: no field {name!r} (= {value!r}); accepted: {', '.join(kinds)}")
            found[name] = kinds[name].convert(value, self._folder)
            if found[name] is None:
                raise ManifestError(f"{self.where}: {name!r} is {value!r}; accepted: {kinds[name].accepted}")
        return found


def _text(value: Any, _: Path) -> str | None:
    return value if isinstance(value, str) and value else None


def _name(value: Any, _: Path) -> str | None:
    return value if isinstance(value, str) and re.fullmatch(r"[\w.-]+", value) else None


def _flag(value: Any, _: Path) -> bool | None:
    return value if isinstance(value, bool) else None


def _number(value: Any, _: Path) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _seconds(value: Any, _: Path) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None


def _attempts(value: Any, folder: Path) -> int | None:
    number = _number(value, folder)
    return number if number is not None and number >= 2 else None


def _words(value: Any, _: Path) -> tuple[str, ...] | None:
    try:
        return tuple(shlex.split(value)) or None
    except (AttributeError, TypeError, ValueError):
        return None


def _command(value: Any, folder: Path) -> tuple[str, ...] | None:
    """A file beside the manifest is meant before one in the working folder; ``python`` may stand in front."""
    words = _words(value, folder)
    if words and words[0] in ("python", "python3"):
        words = words[1:]
    if words and words[0] == "torchrun":
        words = ("-m", "torch.distributed.run", *words[1:])
    if words and (folder / words[0]).is_file():
        words = (str((folder / words[0]).resolve()), *words[1:])
    return words or None


def _commands(value: Any, folder: Path) -> tuple[tuple[str, ...], ...] | None:
    return _each(value, folder, _command)


def _script(value: Any, folder: Path) -> tuple[str, ...] | None:
    """A command that runs in the checkout: what lies beside the manifest does not count."""
    return _command(value, folder / "\0") if isinstance(value, str) and "\0" not in value else None


def _texts(value: Any, folder: Path) -> tuple[str, ...] | None:
    return _each(value, folder, _text)


def _patterns(value: Any, folder: Path) -> tuple[str, ...] | None:
    return _each(value, folder, _pattern)


def _pattern(value: Any, _: Path) -> str | None:
    try:
        re.compile(value)
    except (re.error, TypeError):
        return None
    return value


def _paths(value: Any, folder: Path) -> tuple[str, ...] | None:
    return _each(value, folder, _inside)


def _inside(value: Any, _: Path) -> str | None:
    if not isinstance(value, str) or not value or Path(value).is_absolute() or ".." in Path(value).parts:
        return None
    return value


def _each(value: Any, folder: Path, convert: Callable[[Any, Path], Any]) -> tuple[Any, ...] | None:
    if not isinstance(value, list):
        return None
    found = tuple(convert(each, folder) for each in value)
    return None if None in found else found


def _variables(value: Any, _: Path) -> dict[str, str] | None:
    fits = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    return value if fits else None


def _share(value: Any, _: Path) -> tuple[float, float] | None:
    fits = isinstance(value, list) and len(value) == 2 and all(isinstance(each, int | float) for each in value)
    return (float(value[0]), float(value[1])) if fits and 0 <= value[0] <= value[1] <= 1 else None


def _verdict(value: Any, _: Path) -> Verdict | None:
    return VERDICTS.get(value) if isinstance(value, str) else None


def _table(value: Any, _: Path) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _tables(value: Any, _: Path) -> list[Any] | None:
    return value if isinstance(value, list) and all(isinstance(each, dict) for each in value) else None


_PATTERN = _Kind("a regular expression", _pattern)
_PATTERNS = _Kind("a list of regular expressions", _patterns)
_COMMANDS = _Kind("a list of commands for Python, such as ['data/digits.py ../data']", _commands)

_TOP = {
    "repository": _Kind("the address of the repository, or its name", _text),
    "packages": _Kind("a list of requirements, such as ['gymnasium==1.2.0']", _texts),
    "setup": _COMMANDS,
    "defaults": _Kind("a table of fields", _table),
    "row": _Kind("tables, each headed by [[row]]", _tables),
}
_FIELDS = {
    "name": _Kind("letters, digits, '_', '-' and '.'", _name),
    "command": _Kind("what follows 'python', such as 'train.py --epochs 2'", _script),
    "folder": _Kind("a path inside the checkout, without '..'", _inside),
    "parts": _Kind("a list of paths inside the checkout, without '..'", _paths),
    "prepare": _COMMANDS,
    "env": _Kind("a table of texts, such as { PYTHONPATH = 'src' }", _variables),
    "seed": _Kind("true or false", _flag),
    "lines": _PATTERN,
    "leave_out": _PATTERNS,
    "unordered": _Kind("true or false", _flag),
    "ignore": _PATTERNS,
    "ignore_files": _Kind("a list of patterns of file names, such as ['runs/*']", _texts),
    "errors_differ": _Kind("true or false", _flag),
    "verdict": _Kind(", ".join(VERDICTS), _verdict),
    "says": _PATTERN,
    "resumes": _PATTERN,
    "worker": _PATTERN,
    "at_line": _PATTERN,
    "steps": _Kind("two numbers between 0 and 1, the smaller one first, such as [0.35, 0.85]", _share),
    "code": _Kind("a whole number", _number),
    "attempts": _Kind("a whole number from 2 on", _attempts),
    "limit_s": _Kind("seconds, more than 0", _seconds),
    "not_run": _Kind("a text that says why it does not run", _text),
    "about": _Kind("a line of text", _text),
}
_DEFAULTS = {name: kind for name, kind in _FIELDS.items() if name not in ("name", "command", "not_run")}
