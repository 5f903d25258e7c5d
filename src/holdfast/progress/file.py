"""The progress file: what a run is doing now, for ``kubectl``, the command line and the dashboard.

Guarantees:

- Whoever reads it sees one whole state: it is written beside and renamed. There is no fsync, since the
  file is rewritten every few steps and nothing is restored from it; after a power cut it may be missing
  or empty, which :func:`read_progress` reports as such.
- What the run does not know is left out. A loss that is not a number becomes the text ``nan`` and
  breaks neither JSON nor the reader.
- Writing never raises for disk trouble; each distinct error is logged once until a write succeeds.
- The remaining time comes from the speed of this attempt alone, on the monotonic clock. The steps of an
  earlier attempt ran on another machine, and the time between attempts trained nothing.
- The reader believes nothing: the file lies on storage that others can write to. What it returns has
  the known keys only, with the right types, bounded texts and neither control characters nor markup.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, Final

from holdfast.base.clock import SYSTEM_CLOCK, Clock
from holdfast.base.small_files import RefusedFileError, read_small
from holdfast.base.words import is_plain
from holdfast.errors import HoldfastError
from holdfast.progress.journal import WarnOnce, redact_uri

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 64 * 1024

_MAX_COUNT = 2**63 - 1
_MAX_PATH = 4096
_MAX_NAME = 256
_MAX_SHORT = 64
_STALE_TEMP_S = 3600.0


class ProgressFileError(HoldfastError, ValueError):
    """A progress file is torn, too large, not JSON, or holds something that no run writes."""


class Unknown(Enum):
    """The type of :data:`UNKNOWN`."""

    UNKNOWN = "unknown"


UNKNOWN: Final = Unknown.UNKNOWN
"""Not known, where None already means something."""


@dataclass(kw_only=True, slots=True)
class Checkpointing:
    """What is known about the run's checkpoints. None: not known."""

    enabled: bool | None = None
    latest_checkpoint: str | None = None
    """Path or URI of the newest whole checkpoint; a URI is written without userinfo and query."""
    checkpoints_created: int | None = None
    latest_checkpoint_time: float | None = None
    """When it was committed, in seconds since the epoch."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """What is known about the run. None: not known, and left out of the file."""

    epoch: float | None = None
    """The epoch under way, counted as the framework counts it; a fraction is cut off."""
    total_epochs: float | None = None
    step: int | None = None
    """Optimizer steps completed, over all attempts."""
    total_steps: int | None = None
    """Steps of the whole run; zero and negative values, which some frameworks use for "no limit", are unknown."""
    loss: float | None = None
    """The training loss logged last."""
    accuracy: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    learning_rate: float | None = None
    resumed_from: str | Unknown | None = UNKNOWN
    """Name of the checkpoint that this attempt went on from; None: it started from scratch."""
    checkpointing: Checkpointing = field(default_factory=Checkpointing)


def render(progress: Progress, percent: float | None, eta_s: float | None, now: float) -> dict[str, Any]:
    """The progress as the file and ``status.trainingProgress`` hold it; ``now`` in seconds since the epoch."""
    saved = progress.checkpointing
    checkpointing = _known(
        enabled=saved.enabled,
        latestCheckpoint=_location_text(saved.latest_checkpoint, _MAX_PATH),
        checkpointsCreated=_count(saved.checkpoints_created),
        latestCheckpointTime=_time_text(saved.latest_checkpoint_time),
    )
    resumed_from = progress.resumed_from
    name = None if resumed_from is UNKNOWN else _location_text(resumed_from, _MAX_NAME)
    rendered = _known(
        epoch=_count(progress.epoch),
        totalEpochs=_count(progress.total_epochs) or None,
        step=_count(progress.step),
        totalSteps=_count(progress.total_steps) or None,
        loss=_decimal_text(progress.loss, 4),
        accuracy=_decimal_text(progress.accuracy, 4),
        validationLoss=_decimal_text(progress.validation_loss, 4),
        validationAccuracy=_decimal_text(progress.validation_accuracy, 4),
        learningRate=_decimal_text(progress.learning_rate, 6),
        percentComplete=_percent_text(percent),
        estimatedTimeRemaining=_duration_text(eta_s),
        lastUpdateTime=_time_text(now),
        resumedFrom=name,
        checkpointing=checkpointing or None,
    )
    if resumed_from is None:
        rendered["resumedFrom"] = None
    return rendered


def _known(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _count(value: float | None) -> int | None:
    if value is None or not 0 <= value < math.inf:
        return None
    return min(int(value), _MAX_COUNT)


def _decimal_text(value: float | None, places: int) -> str | None:
    """``places`` decimals; four significant digits where that would leave fewer than two."""
    if value is None:
        return None
    number = float(value)
    size = abs(number)
    if not math.isfinite(number):
        return str(number)
    if size == 0.0:
        return f"{0.0:.{places}f}"
    if size < 1e-12 or size >= 1e15:
        return f"{number:.3e}"
    magnitude = math.floor(math.log10(size))
    digits = places if places + magnitude >= 1 else 3 - magnitude
    whole, _, decimals = f"{number:.{digits}f}".partition(".")
    return f"{whole}.{decimals[:places]}{decimals[places:].rstrip('0')}"


def _percent_text(percent: float | None) -> str | None:
    if percent is None or not math.isfinite(percent):
        return None
    # 100.0 is for a run that is complete, not for one that rounds to it.
    shown = 100.0 if percent >= 100.0 else min(max(percent, 0.0), 99.9)
    return f"{shown:.1f}"


def _duration_text(seconds: float | None) -> str | None:
    if seconds is None or not math.isfinite(seconds):
        return None
    whole = math.ceil(max(seconds, 0.0))
    if whole < 60:
        return f"{whole}s"
    minutes = (whole + 30) // 60
    if minutes < 60:
        return f"{minutes}m"
    if minutes < 24 * 60:
        return _two_units(*divmod(minutes, 60), "h", "m")
    return _two_units(*divmod((minutes + 30) // 60, 24), "d", "h")


def _two_units(large: int, small: int, large_unit: str, small_unit: str) -> str:
    return f"{large}{large_unit} {small}{small_unit}" if small else f"{large}{large_unit}"


def _time_text(wall: float | None) -> str | None:
    if wall is None:
        return None
    try:
        moment = datetime.fromtimestamp(math.floor(wall), UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return moment.isoformat().replace("+00:00", "Z")


def _location_text(location: str | None, limit: int) -> str | None:
    """Without secrets, and only if a reader will take it: one that is cut or patched would name something else."""
    if location is None:
        return None
    location = redact_uri(location)
    return location if len(location) <= limit and not _is_unsafe(location) else None


def _is_unsafe(text: str) -> bool:
    """What a terminal would act on, and the brackets of markup, which a page could act on."""
    return not is_plain(text) or "<" in text or ">" in text


class _Pace:
    """Steps per second of this attempt, over the last five minutes or eight updates, whichever is longer."""

    _WINDOW_S = 300.0
    _SPACING_S = 5.0
    _FEWEST = 8

    def __init__(self) -> None:
        self._last_step: int | None = None
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, now: float, step: int) -> None:
        if self._last_step is None or step < self._last_step:
            # The first update is no sample: the steps up to the second one include the warm-up
            # (compilation, caches, first allocation) and would make the run look slower than it is.
            self._last_step = step
            self._samples.clear()
            return
        if step == self._last_step:
            return
        self._last_step = step
        samples = self._samples
        # Fast steps would fill the window with the last moments: the newest sample moves along until
        # it is far enough from the one before it.
        if len(samples) > self._FEWEST and now - samples[-2][0] < self._SPACING_S:
            samples.pop()
        samples.append((now, step))
        while len(samples) > self._FEWEST and samples[1][0] <= now - self._WINDOW_S:
            samples.popleft()

    def remaining_s(self, steps: int) -> float | None:
        if len(self._samples) < 2:
            return None
        (begin, first), (end, last) = self._samples[0], self._samples[-1]
        return steps * (end - begin) / (last - first) if end > begin else None


class ProgressFile:
    """Writes the progress of one attempt. Rank 0 alone has one."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: Clock = SYSTEM_CLOCK,
        *,
        last_words: str | None = None,
        tell: Callable[[bytes], None] | None = None,
    ) -> None:
        """``last_words``: a file that is there already and gets the progress too, such as a container's termination
        log, which is read after the container has ended. ``tell``: gets what is written."""
        self.path = Path(path)
        self._last_words = last_words
        self._tell = tell
        self._clock = clock
        # A commit reports from a writer's thread while training reports from its own.
        self._lock = threading.Lock()
        self._pace = _Pace()
        self._swept = False
        self._trouble = WarnOnce(
            logger, "the progress file", "check the space and the rights there, or set TRAINING_PROGRESS_FILE"
        )

    def write(self, progress: Progress) -> None:
        """Replace the file by this progress; disk trouble is logged, not raised."""
        with self._lock:
            percent, eta_s = self._estimate(progress)
            rendered = render(progress, percent, eta_s, self._clock.wall())
            data = json.dumps(rendered, allow_nan=False, indent=2).encode() + b"\n"
            if self._tell is not None:
                self._tell(data)
            written = self._tried(self.path, self._replace, data)
            if self._last_words is not None:
                written = self._tried(self._last_words, self._overwrite_last_words, data) and written
            if written:
                self._trouble.succeeded()

    def _tried(self, path: object, put: Callable[[bytes], None], data: bytes) -> bool:
        try:
            put(data)
        except OSError as error:
            self._trouble.failed(path, error)
            return False
        return True

    def _overwrite_last_words(self, data: bytes) -> None:
        """In place, since it is mounted into the container by itself; a torn one is found by its reader."""
        assert self._last_words is not None
        with open(self._last_words, "wb") as file:
            file.write(data)

    def _estimate(self, progress: Progress) -> tuple[float | None, float | None]:
        step, total = _count(progress.step), _count(progress.total_steps)
        if step is None:
            return None, None
        self._pace.note(self._clock.monotonic(), step)
        if not total:
            return None, None
        if step >= total:
            return 100.0, 0.0
        # In whole numbers: 29 of 100 is 29.0, and not the 28.9 that floats cut it to.
        return step * 1000 // total / 10, self._pace.remaining_s(total - step)

    def _replace(self, data: bytes) -> None:
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        self._sweep(folder)
        # mkstemp opens with O_EXCL and O_NOFOLLOW under a random name: a link or a file that someone
        # planted under that name is never written through.
        fd, temp = tempfile.mkstemp(prefix=self._temp_prefix, suffix=".tmp", dir=folder)
        try:
            with os.fdopen(fd, "wb") as file:
                try:
                    os.fchmod(fd, 0o644)
                except PermissionError:
                    pass  # a file system without modes of its own decides who may read
                file.write(data)
            os.replace(temp, self.path)
        except BaseException:
            try:
                os.unlink(temp)
            except OSError:
                pass  # the first error is the one to tell
            raise

    @property
    def _temp_prefix(self) -> str:
        return f".{self.path.name}."

    def _sweep(self, folder: Path) -> None:
        """Remove what attempts that were killed between creation and rename left behind."""
        if self._swept:
            return
        self._swept = True
        with os.scandir(folder) as entries:
            for entry in entries:
                if not (entry.name.startswith(self._temp_prefix) and entry.name.endswith(".tmp")):
                    continue
                try:
                    # The age keeps the file of a predecessor that is still on its way out.
                    if self._clock.wall() - entry.stat(follow_symlinks=False).st_mtime > _STALE_TEMP_S:
                        os.unlink(entry.path)
                except OSError:
                    continue


def read_progress(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The progress at ``path``, checked. :class:`ProgressFileError` says what is wrong with it.

    A file that is missing or may not be read raises the usual OSError.
    """
    try:
        return parse_progress(read_small(path, max_bytes), max_bytes)
    except (RefusedFileError, ProgressFileError) as error:
        raise ProgressFileError(f"progress file {os.fspath(path)!r}: {error}") from None


def parse_progress(data: bytes, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The progress in ``data``, checked: known keys only; null, except for ``resumedFrom``, is as good as absent."""
    if len(data) > max_bytes:
        raise ProgressFileError(f"larger than the {max_bytes} bytes that max_bytes allows")
    if not data.strip():
        raise ProgressFileError("empty: it was torn before its first byte reached the disk")
    try:
        loaded = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise ProgressFileError("nested too deeply to be a progress file") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError among them
        # Only the kind and the place: the text of a decoding error may quote what the file holds.
        place = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise ProgressFileError(f"not JSON in UTF-8{place}: torn, or written by something else") from None
    return _checked(loaded, _SCHEMA, "")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_Check = Callable[[Any, str], Any]


def _checked(value: Any, schema: dict[str, _Check], prefix: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(prefix or "the top level", value, "an object")
    result: dict[str, Any] = {}
    for key, check in schema.items():
        if key in value and (value[key] is not None or key == "resumedFrom"):
            result[key] = check(value[key], f"{prefix}{key}")
    return result


def _wrong(key: str, value: Any, expected: str) -> ProgressFileError:
    shown = ascii(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ProgressFileError(f"{key} is {shown} ({type(value).__name__}), expected {expected}")


def _check_count(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
        raise _wrong(key, value, "a whole number from 0 up")
    return value


def _check_bool(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


def _check_text(limit: int) -> Callable[[Any, str], str]:
    def check(value: Any, key: str) -> str:
        if not isinstance(value, str) or len(value) > limit or _is_unsafe(value):
            raise _wrong(key, value, f"a text of at most {limit} characters without control characters, < and >")
        return value

    return check


_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|inf|nan)")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?(?:Z|[+-][0-9]{2}:[0-9]{2})")


def _check_number_text(value: Any, key: str) -> str:
    if not isinstance(value, str) or len(value) > _MAX_SHORT or not _NUMBER.fullmatch(value):
        raise _wrong(key, value, 'a number as text, such as "0.4523"')
    return value


def _check_time(value: Any, key: str) -> str:
    try:
        if isinstance(value, str) and _TIME.fullmatch(value):
            datetime.fromisoformat(value)
            return value
    except ValueError:
        pass
    raise _wrong(key, value, 'a time such as "2024-01-15T10:30:00Z"')


def _check_resumed_from(value: Any, key: str) -> str | None:
    return None if value is None else _check_text(_MAX_NAME)(value, key)


_CHECKPOINTING: dict[str, _Check] = {
    "enabled": _check_bool,
    "latestCheckpoint": _check_text(_MAX_PATH),
    "checkpointsCreated": _check_count,
    "latestCheckpointTime": _check_time,
}
_SCHEMA: dict[str, _Check] = {
    "epoch": _check_count,
    "totalEpochs": _check_count,
    "step": _check_count,
    "totalSteps": _check_count,
    "loss": _check_number_text,
    "accuracy": _check_number_text,
    "validationLoss": _check_number_text,
    "validationAccuracy": _check_number_text,
    "learningRate": _check_number_text,
    "percentComplete": _check_number_text,
    "estimatedTimeRemaining": _check_text(_MAX_SHORT),
    "lastUpdateTime": _check_time,
    "resumedFrom": _check_resumed_from,
    "checkpointing": lambda value, key: _checked(value, _CHECKPOINTING, f"{key}."),
}
