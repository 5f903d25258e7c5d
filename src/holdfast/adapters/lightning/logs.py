"""What a fit writes beside holdfast's checkpoints: loggers' files and the checkpoints of ``ModelCheckpoint``.

A resumed fit continues the version that its first attempt has begun, so that a run has one folder and one curve. What
the lost part of the last attempt has written, after the boundary that training resumes from, is taken back: it is
written once more. So each line is there once, and a checkpoint gets the name that it has in an undisturbed run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import warnings
from typing import Any

from holdfast.adapters.lightning import records
from holdfast.store.local import write_durable

log = logging.getLogger("holdfast")

_RECORD = "lightning.json"
"""In a run's home folder: the versions of its loggers."""
_FILES = "lightning-files.jsonl"
"""In a run's home folder: files that ModelCheckpoint has written and removed."""
_ASIDE = ".holdfast-kept"
_ATTRIBUTES = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""Of a ModelCheckpoint; its ``state_dict`` leaves them out."""

Note = tuple[float, tuple[int, ...], int, tuple[tuple[Any, ...], ...]]
"""At a boundary: the time, rows of each CSV logger, entries in the list of files, attributes of ModelCheckpoints."""


class Logs:
    """The loggers and the ModelCheckpoints of one fit."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._leads = bool(trainer.is_global_zero)
        self._home: str | None = None
        self._entries: list[dict[str, str]] = []
        self._events: list[str] = []
        """Event files of earlier attempts."""
        self._csv: list[Any] = []
        self._checkpoints: list[Any] = []

    # ------------------------------------------------------------------ the start

    def continue_versions(self, home: str) -> None:
        """Before Lightning makes its loggers' folders: a checkpoint of an earlier attempt is there."""
        known = _read(os.path.join(home, _RECORD)).get("loggers", [])
        for logger, before in zip(self._trainer.loggers, known, strict=False):
            if before.get("kind") != type(logger).__name__ or not _is_file_logger(logger):
                continue
            if logger._experiment is not None or before["root"] != os.path.abspath(logger.root_dir):
                continue
            if logger._version is None:
                logger._version = before["version"]
            if logger._version == before["version"] and self._leads:
                self._continue(logger)

    def _continue(self, logger: Any) -> None:
        if _is(logger, "TensorBoardLogger"):
            with contextlib.suppress(OSError):
                folder = logger.log_dir
                names = sorted(name for name in os.listdir(folder) if ".tfevents." in name)
                self._events += [os.path.join(folder, name) for name in names]
            return
        # Making the writer removes the file.
        path = os.path.join(logger.log_dir, "metrics.csv")
        kept = f"{path}{_ASIDE}"
        if os.path.exists(path):
            os.replace(path, kept)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
            writer = logger.experiment
        if os.path.exists(kept):
            os.replace(kept, path)
        header, rows = records.read_csv(path)
        writer.metrics_keys = header
        writer._holdfast_rows = len(rows)

    def begin(self, home: str) -> None:
        """The loggers are made, and training is about to start."""
        self._home = home
        trainer = self._trainer
        self._checkpoints = [one for one in trainer.callbacks if all(hasattr(one, name) for name in _ATTRIBUTES)]
        if not self._leads:
            return
        self._csv = [
            logger for logger in trainer.loggers if _is(logger, "CSVLogger") and logger._experiment is not None
        ]
        known = [
            {"kind": type(logger).__name__, "root": os.path.abspath(logger.root_dir), "version": logger._version}
            if _is_file_logger(logger)
            else {}
            for logger in trainer.loggers
        ]
        with contextlib.suppress(OSError, TypeError):  # a full disk: the versions are not continued then
            write_durable(os.path.join(home, _RECORD), json.dumps({"loggers": known}).encode())
        self._entries = _lines(os.path.join(home, _FILES))

    # ------------------------------------------------------------------ on the way

    def saved(self, path: Any) -> None:
        """A ModelCheckpoint writes ``path``."""
        self._enter("saved", path)

    def removed(self, path: Any) -> None:
        self._enter("removed", path)

    def _enter(self, what: str, path: Any) -> None:
        if self._home is None or not self._leads:
            return
        entry = {what: os.path.abspath(os.fspath(path))}
        self._entries.append(entry)
        with contextlib.suppress(OSError), open(os.path.join(self._home, _FILES), "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def note(self) -> Note:
        """The moment, at a step boundary. On the way of every step."""
        return (
            time.time(),
            tuple([getattr(logger._experiment, "_holdfast_rows", 0) for logger in self._csv]),
            len(self._entries),
            tuple([tuple([getattr(one, name) for name in _ATTRIBUTES]) for one in self._checkpoints]),
        )

    def content(self, note: Note) -> dict[str, Any]:
        """What a checkpoint holds of the moment ``note``."""
        at, counts, entries, attributes = note
        content: dict[str, Any] = {"attributes": [list(values) for values in attributes]}
        if not self._leads:
            return content  # this rank stands in for rank 0, whose files it does not know
        tables = []
        for logger, count in zip(self._csv, counts, strict=True):
            writer = logger._experiment
            waiting = list(writer.metrics)
            written = getattr(writer, "_holdfast_rows", 0) - len(waiting)
            rows = [{key: _plain(value) for key, value in row.items()} for row in waiting[: max(0, count - written)]]
            tables.append({"rows": count, "written": written, "waiting": json.dumps(rows)})
        return {**content, "at": at, "tables": tables, "files": entries}

    def flush(self) -> None:
        """On the training thread, before a save: what is logged up to here is on disk when the checkpoint is."""
        for logger in self._trainer.loggers if self._leads else ():
            if _is(logger, "TensorBoardLogger") and logger._experiment is not None:
                with contextlib.suppress(Exception):  # what a logger cannot write does not end a save
                    logger._experiment.flush()

    # ------------------------------------------------------------------ a resume

    def rewind(self, content: dict[str, Any], step: int) -> None:
        """Take back what was written after the boundary that training resumes from."""
        for one, values in zip(self._checkpoints, content.get("attributes", ()), strict=False):
            for name, value in zip(_ATTRIBUTES, values, strict=True):
                setattr(one, name, value)
        if not self._leads:
            return
        try:
            if "at" in content:
                for logger, table in zip(self._csv, content["tables"], strict=False):
                    self._rewind_table(logger, table)
                self._remove_stale(content["files"])
            for path in self._events:
                records.rewind_events(path, content.get("at"), step)
        except (OSError, ValueError) as error:
            log.warning("what the last attempt has logged after step %d stays in its files: %s", step, error)

    def _rewind_table(self, logger: Any, table: dict[str, Any]) -> None:
        writer = logger._experiment
        header, rows = records.read_csv(writer.metrics_file_path)
        count = table["rows"]
        waiting = json.loads(table["waiting"])[max(0, len(rows) - table["written"]) :] if len(rows) < count else []
        if len(rows) > count:
            records.write_csv(writer.metrics_file_path, header, rows[:count])
        writer.metrics_keys = header if count else []
        writer.metrics = waiting
        writer._holdfast_rows = min(len(rows), count) + len(waiting)

    def _remove_stale(self, count: int) -> None:
        assert self._home is not None
        alive: set[str] = set()
        for entry in self._entries[:count]:
            alive.discard(entry.get("removed", ""))
            alive.add(entry.get("saved", ""))
        for path in {entry.get("saved", "") for entry in self._entries[count:]} - alive:
            if os.path.isfile(path) or os.path.islink(path):
                os.unlink(path)
                log.info("removed %s, which was saved after the step that training resumes from", path)
        self._entries = self._entries[:count]
        text = "".join(json.dumps(entry) + "\n" for entry in self._entries)
        write_durable(os.path.join(self._home, _FILES), text.encode())


def _is(logger: Any, name: str) -> bool:
    return any(kind.__name__ == name and "lightning" in kind.__module__ for kind in type(logger).__mro__)


def _is_file_logger(logger: Any) -> bool:
    return _is(logger, "CSVLogger") or _is(logger, "TensorBoardLogger")


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else float(value)


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
            return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def _lines(path: str) -> list[dict[str, str]]:
    found = []
    with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
        for line in file:
            try:
                found.append({str(key): str(value) for key, value in json.loads(line).items()})
            except (ValueError, AttributeError):  # the writer was killed here
                break
    return found
