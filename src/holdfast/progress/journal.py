"""The journal: one JSON line per event of a run, by every rank and every attempt, in one file.

Guarantees:

- Lines never interleave. A line is one ``write`` on a descriptor opened with ``O_APPEND``; on a local
  file system the kernel serialises such writes, whatever their length. (NFS does not: two clients may
  overwrite each other there. The reader then skips what is no longer a line.)
- A torn line costs itself only. A kill or a full disk can leave half a line; whoever writes next, this
  rank or another, sees that the file does not end with a newline and starts its own line with one.
- Writing never raises for disk trouble: a run is not lost for its diary. Each distinct error is logged
  once, until a write succeeds again.
- Secrets do not reach the file: every field passes through :func:`redact`.

Lines are not fsynced one by one, since an event must cost microseconds; :meth:`Journal.sync` is called
where an event has to survive a power cut. ``record`` takes a lock and therefore does not belong in a
signal handler.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import numbers
import os
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.base.clock import SYSTEM_CLOCK, Clock
from holdfast.base.small_files import open_regular
from holdfast.locations import bare

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 * 1024
"""Longest line that is written; the reader takes sixteen times that before it skips a line."""

MAX_BYTES = 64 << 20
"""What is read of a journal: hundreds of thousands of events."""

_KEPT_IN_MEMORY = 100
_MAX_TEXT = 4096
_MAX_DEPTH = 8
_COUNTS = frozenset({"attempt", "rank", "step", "resumed_from", "attempt_ended", "world"})
_TEXTS = frozenset({"run", "outcome", "reason", "detail", "source", "cause", "name", "location", "by", "error"})
_HIGHEST = 1 << 62
_LATEST = 1e11
"""Seconds since the epoch: three thousand years from now. Also the longest duration, under a name that ends with _s."""
_OWN_FIELDS = frozenset({"time", "t", "event", "run", "attempt", "rank"})

REDACTED = "***"

# "token" but not "tokenizer": the name of a tokenizer is no secret.
_SECRET_NAME = (
    r"(?:secret|token(?!i[sz])|passw(?:or)?d|passphrase|credential|key[ _-]?id"
    r"|access[ _-]?key|api[ _-]?key|private[ _-]?key|authorization|signature)"
)
_SECRET_KEY = re.compile(_SECRET_NAME, re.IGNORECASE)
_SECRET_OPTION = re.compile(rf"--?[\w.-]*{_SECRET_NAME}[\w.-]*", re.IGNORECASE)
_ASSIGNMENT = re.compile(
    rf"(?<![\w.-])([\w.-]*{_SECRET_NAME}[\w.-]*[\"']?\s*[=:]\s*)"
    r"(\"[^\"]*\"|'[^']*'|(?:(?:bearer|basic)\s+)?\S+)",
    re.IGNORECASE,
)
_KEY_MATERIAL = re.compile(r"\b(?:(?:AKIA|ASIA)[A-Z0-9]{16}|hf_\w{20,}|gh[pousr]_\w{20,})")
_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]*)?")
_AFTER_SCHEME = re.compile(r"(?<=[a-z0-9+.-])://", re.IGNORECASE)
_WORD = re.compile(r"\S*")


def redact(value: Any) -> Any:
    """A copy of ``value`` that JSON can hold, without user names, passwords, query strings and keys.

    URIs lose their userinfo and their query wherever they stand in a text, so that error messages are
    covered too. Values under a name that speaks of a secret, ``name=value`` in a text and the argument
    after ``--name`` in a list become ``***``. Numbers under ``…tokens…`` are counts and stay.
    """
    return _redact(value, 0)


def redact_uri(text: str) -> str:
    """``text`` with every URI in it cut down to scheme, host and path."""
    position = 0
    # One by one and not with a single substitution: "s3://a:b@c/d,s3://e:f@g/h" is one word with two URIs.
    while found := _AFTER_SCHEME.search(text, position):
        position = found.end()
        word = _WORD.match(text, position)
        assert word is not None
        text = text[:position] + bare(word[0]) + text[word.end() :]
    return text


def _redact_text(text: str) -> str:
    if len(text) > _MAX_TEXT:
        # The last word goes too: a secret that is cut in half is not recognised any more.
        text = re.sub(r"\S*\Z", "…", text[: _MAX_TEXT - 1], count=1)
    text = redact_uri(text)
    text = _ASSIGNMENT.sub(lambda found: found[1] + (found[2] if _is_count(found[1], found[2]) else REDACTED), text)
    return _KEY_MATERIAL.sub(REDACTED, text)


def _redact(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, str):
        return _redact_text(value)
    if depth >= _MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {_text(key): _redact_named(_text(key), item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items: list[Any] = []
        option = ""
        for item in value:
            follows = option and not (isinstance(item, str) and item.startswith("--"))
            items.append(_redact_named(option, item, depth + 1) if follows else _redact(item, depth + 1))
            option = item if isinstance(item, str) and _SECRET_OPTION.fullmatch(item) else ""
        return items
    return _redact_text(_text(value))


def _redact_named(name: str, value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool) or _SECRET_KEY.search(name) is None or _is_count(name, value):
        return _redact(value, depth)
    return REDACTED


def _is_count(name: str, value: Any) -> bool:
    """``tokens_per_s`` and ``--max-tokens`` speak of text, not of access."""
    if "tokens" not in name.lower():
        return False
    return isinstance(value, numbers.Real) or (isinstance(value, str) and _NUMBER.fullmatch(value) is not None)


def _text(value: object) -> str:
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


class WarnOnce:
    """Logs each distinct disk error once; a success makes them new again."""

    def __init__(self, log: logging.Logger, what: str, knob: str) -> None:
        self._log = log
        self._what = what
        self._knob = knob
        self._said: set[tuple[str, int | None]] = set()

    def failed(self, path: object, error: OSError) -> None:
        # The error's own text may hold a random temporary name and would never repeat: its number does.
        kind = (type(error).__name__, error.errno)
        if kind not in self._said:
            self._said.add(kind)
            reason = error.strerror or str(error) or type(error).__name__
            self._log.warning("cannot write %s %s: %s. Training goes on; %s", self._what, path, reason, self._knob)

    def succeeded(self) -> None:
        self._said.clear()


class Journal:
    """Appends events of one rank in one attempt. Without a path it only keeps the last 100 in memory."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        run_id: str,
        attempt: int,
        rank: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.run_id = run_id
        self.attempt = attempt
        self.rank = rank
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: deque[dict[str, Any]] = deque(maxlen=_KEPT_IN_MEMORY)
        self._fd: int | None = None
        self._name_is_durable = False
        self._trouble = WarnOnce(logger, "the journal", "check the space and the rights there, or move HOLDFAST_DIR")

    def record(self, event: str, /, **fields: Any) -> None:
        """Append one event. A field named like one of the journal's own gets an underscore after its name."""
        now = self._clock.wall()
        line: dict[str, Any] = {
            "time": _timestamp(now),
            "t": now,
            "event": event,
            "run": self.run_id,
            "attempt": self.attempt,
            "rank": self.rank,
        }
        own = dict(line)
        for name, value in redact(fields).items():
            line[name + "_" if name in _OWN_FIELDS else name] = value
        try:
            data = json.dumps(line, allow_nan=False, separators=(",", ":")).encode()
            too_long = len(data) >= MAX_LINE_BYTES
        except ValueError:  # an integer of thousands of digits
            too_long = True
        if too_long:
            line = {**own, "truncated": True}
            data = json.dumps(line, separators=(",", ":")).encode()
        with self._lock:
            self._recent.append(line)
            if self.path is not None:
                self._append(self.path, data + b"\n")

    def recent(self) -> list[dict[str, Any]]:
        """The last 100 events of this object, oldest first, whether or not they reached the disk."""
        with self._lock:
            return list(self._recent)

    def sync(self) -> None:
        """Make what was recorded so far survive a power cut."""
        with self._lock:
            if self._fd is None or self.path is None:
                return
            try:
                os.fsync(self._fd)
                if not self._name_is_durable:
                    _fsync_folder(self.path.parent)
                    self._name_is_durable = True
            except OSError as error:
                self._trouble.failed(self.path, error)

    def close(self) -> None:
        """Let go of the file. A record after this opens it again: a late commit is worth its line."""
        with self._lock:
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, path: Path, data: bytes) -> None:
        try:
            if self._fd is None:
                self._fd = _open_for_append(path)
            # Looked at before every line and not only at the start: a peer can be killed inside its
            # write at any time. If a peer appends between the look and our write, the worst outcome is
            # one empty line, or one line lost behind the peer's torn one.
            if not _ends_with_newline(self._fd):
                data = b"\n" + data
            written = os.write(self._fd, data)
            if written < len(data):
                # The rest is not sent after it: another rank's line may stand there by now.
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were taken")
        except OSError as error:
            self._drop()
            self._trouble.failed(path, error)
        else:
            self._trouble.succeeded()

    def _drop(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                os.close(fd)
            except OSError as error:
                self._trouble.failed(self.path, error)


def read_journal(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The events in the order of the file; what is torn, garbled or no event is skipped.

    A journal that does not exist yet has no events. Of one that is larger than any run makes it, the newest
    ``MAX_BYTES`` are read. Any other error of the disk is raised, and what is no file of ours is refused
    (:mod:`holdfast.base.small_files`).
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return
    limit = 16 * MAX_LINE_BYTES
    with os.fdopen(fd, "rb") as file:
        beyond = os.fstat(fd).st_size - MAX_BYTES
        inside_long_line = beyond > 0
        file.seek(max(0, beyond))
        while line := file.readline(limit):
            whole = line.endswith(b"\n")
            if not inside_long_line and (event := parse_event(line)) is not None:
                yield event
            inside_long_line = not whole


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The event in one line; None if it is torn, or no event.

    The journal may lie on storage that others write to. What every reader looks at has the type that is documented by
    ``_COUNTS``, ``_TEXTS`` and ``_LATEST``; a field of such a name with another value is left out.
    """
    # A power cut can leave zeros where the size of the file reached the disk and its bytes did not.
    line = line.strip(b"\0 \t\r\n")
    if not line:
        return None
    try:
        event = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    t = event.get("t")
    if isinstance(t, bool) or not isinstance(t, (int, float)) or not 0 <= t <= _LATEST:
        return None
    return {name: value for name, value in event.items() if _is_of_its_kind(name, value)}


def _is_of_its_kind(name: str, value: Any) -> bool:
    if value is None:
        return True
    if name in _COUNTS:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _HIGHEST
    if name in _TEXTS:
        return isinstance(value, str)
    if name.endswith("_s"):
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LATEST
    return True


def _open_for_append(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    # NOFOLLOW: on shared storage a link planted here would let us append to someone else's file.
    # NONBLOCK: a pipe planted here must not hold the run. Read access is for the look at the last byte.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def _ends_with_newline(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size == 0 or os.pread(fd, 1, size - 1) == b"\n"


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _timestamp(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
