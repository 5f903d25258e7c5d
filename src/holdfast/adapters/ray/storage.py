"""Where a run of Ray Train keeps its just-in-time checkpoints, and which of them the workers go on from.

They lie beside Ray's own, in the folder ``holdfast`` of the run's folder. A training function that reports
checkpoints of its own may begin with one of these, and the loop that is recorded from there on is another
one. So each beginning has a location of its own: ``holdfast`` where the function began from scratch,
``holdfast/from-<checkpoint>`` where it began with that checkpoint. A note for every checkpoint that is reported
says at which step of which recording that was; so it is known what is newer, the script's own or ours.

Where the script loads just-in-time checkpoints itself, such a checkpoint is one that it begins with, like its own.

A training function that has reported checkpoints of its own, and fails by an exception of its own, begins with its
newest one, as it would without holdfast: a replay would only raise the same exception again. Such failures are counted
in the run's folder, and what is saved after the n-th lies in ``holdfast/after-failure-<n>``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.errors import ConfigError
from holdfast.store import open_backend
from holdfast.store.checkpoints import whole

log = logging.getLogger("holdfast")

FOLDER = "holdfast"
_NOTES = "reports"
_FAILURES = "failures"
_UNNAMED = re.compile(r"ray_train_run-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
_SCHEMES = {"s3": "s3://", "gcs": "gs://", "abfs": "az://"}
_OURS = "jit:"
"""Begins the name of a just-in-time checkpoint that the training function begins with; its location follows."""


def is_unnamed(context: Any) -> bool:
    """Whether Ray made the run's name up, from the time of its start: no other job will have it."""
    return _UNNAMED.fullmatch(context.get_experiment_name()) is not None


def location_of(context: Any) -> str:
    """The location of the run's just-in-time checkpoints, from the storage path that Ray was given."""
    storage = context.get_storage()
    kind = storage.storage_filesystem.type_name
    path = f"{storage.experiment_fs_path}/{FOLDER}"
    if kind == "local":
        storage._check_validation_file()  # raises where this node does not see the folder that the driver made
        return path
    if kind in _SCHEMES:
        return _SCHEMES[kind] + path
    raise ConfigError(
        f"RunConfig(storage_path={context.train_run_context.run_config.storage_path!r}) is on a file system of kind "
        f"{kind!r}, which holdfast cannot write to; set HOLDFAST_DIR to a path that all workers share, or to an "
        f"s3://, gs:// or az:// URI"
    )


def uri_of(checkpoint: Any) -> str:
    """Where a checkpoint of Ray's lies, as a path or a URI."""
    kind = checkpoint.filesystem.type_name
    return str(checkpoint.path) if kind == "local" else f"{_SCHEMES.get(kind, kind + '://')}{checkpoint.path}"


def run_id_of(context: Any) -> str:
    """The run's identity: jobs of one name in one storage path take over from each other."""
    storage = context.get_storage()
    return f"ray-{hashlib.sha256(storage.experiment_fs_path.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class Note:
    """What is known of a checkpoint that the training function reported."""

    base: str | None
    """The checkpoint that the function had begun with; None: it had begun from scratch."""
    step: int
    """The last step that was complete, counted from that beginning."""
    failures: int = 0
    """Failures of the training function before that beginning."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the training function begins."""

    location: str
    """Of the just-in-time checkpoints that belong to this beginning."""
    base: str | None
    """Name of the checkpoint that it begins with, a reported one or one of ours; None: from scratch."""
    step: int | None = None
    """Of the newest just-in-time checkpoint, up to which it is resumed; None: there is none."""
    before: int = 0
    """Steps that one of ours, if it begins with that, holds already: they are counted on from there."""
    failures: int = 0
    """Failures of the training function so far, after each of which it began with a checkpoint of its own."""


class Reports:
    """The notes of one run, in its folder in Ray's storage."""

    def __init__(self, context: Any) -> None:
        self._storage = context.get_storage()
        self._folder = f"{self._storage.experiment_fs_path}/{FOLDER}/{_NOTES}"

    def name_of(self, checkpoint: Any) -> str:
        """The name under which Ray keeps a checkpoint."""
        folder = f"{self._storage.experiment_fs_path}/"
        name: str = checkpoint.path
        if name.startswith(folder):
            return name[len(folder) :].strip("/").replace("/", "+")
        return hashlib.sha256(name.encode()).hexdigest()[:16]

    def write(self, name: str, note: Note) -> None:
        self._write(name, json.dumps(asdict(note)))

    def read(self, name: str) -> Note | None:
        try:
            return Note(**json.loads(self._read(name)))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def any(self) -> bool:
        """Whether a checkpoint was ever reported."""
        from pyarrow.fs import FileSelector  # type: ignore[import-untyped]

        found = self._storage.storage_filesystem.get_file_info(FileSelector(self._folder, allow_not_found=True))
        return any(info.path.endswith(".json") for info in found)

    def failures(self) -> int:
        """How often the training function has failed by an exception of its own, with a checkpoint to begin with."""
        try:
            return int(self._read(_FAILURES, ""))
        except (FileNotFoundError, ValueError):
            return 0

    def write_failures(self, count: int) -> None:
        """All workers that fail may write this: each of them knows the same number."""
        self._write(_FAILURES, str(count), "")

    def _write(self, name: str, text: str, ending: str = ".json") -> None:
        filesystem = self._storage.storage_filesystem
        filesystem.create_dir(self._folder)
        with filesystem.open_output_stream(f"{self._folder}/{name}{ending}") as stream:
            stream.write(text.encode())

    def _read(self, name: str, ending: str = ".json") -> bytes:
        with self._storage.storage_filesystem.open_input_stream(f"{self._folder}/{name}{ending}") as stream:
            return bytes(stream.read())

    def checkpoint(self, name: str) -> Any:
        """A checkpoint of Ray's by its name; None if it is not there any more."""
        from ray.train import Checkpoint

        if name.startswith(_OURS):
            return Checkpoint(name.removeprefix(_OURS))
        path = f"{self._storage.experiment_fs_path}/{name}"
        filesystem = self._storage.storage_filesystem
        if filesystem.get_file_info(path).type.name == "NotFound":
            return None
        return Checkpoint(path=path, filesystem=filesystem)


def choose_origin(
    root: str, latest: str | None, reports: Reports, *, world: int = 1, hand_over: bool = False
) -> Origin:
    """Where to begin, given the newest checkpoint that was reported: there, or where its recording began.

    The latter, if a just-in-time checkpoint of as many workers is at least as new. ``hand_over``: instead of being
    resumed up to that one, the training function begins with it.
    """
    failures = 0 if hand_over else reports.failures()
    if failures:
        root = f"{root.rstrip('/')}/after-failure-{failures}"
    origin = _newest(root, latest, reports, None if hand_over else world, failures)
    origin = dataclasses.replace(origin, failures=failures)
    while hand_over and origin.step is not None:
        name = f"{_OURS}{origin.location}/checkpoint-{origin.step}"
        origin = dataclasses.replace(_at(root, name, None), before=origin.step)
    return origin


def _newest(root: str, latest: str | None, reports: Reports, world: int | None, failures: int) -> Origin:
    if latest is None:
        return _at(root, None, None)
    own = _at(root, latest, world)
    note = reports.read(latest)
    if own.step is not None or note is None or note.failures != failures:
        return own
    earlier = _at(root, note.base, world)
    if earlier.step is None or earlier.step < note.step:
        return own
    if note.base is not None and reports.checkpoint(note.base) is None:
        log.warning(
            "%s/checkpoint-%d cannot be used: the training function had begun with %s, which Ray has removed since. "
            "Going on from %s, the newest that was reported; CheckpointConfig(num_to_keep=…) keeps more",
            earlier.location,
            earlier.step,
            note.base,
            latest,
        )
        return own
    return earlier


def _at(root: str, base: str | None, world: int | None) -> Origin:
    """The beginning with ``base``. ``world``: a recording of another number of workers is left alone."""
    location = root
    if base is not None:
        ours = base.startswith(_OURS)
        name = f"jit-{hashlib.sha256(base.encode()).hexdigest()[:12]}" if ours else base
        location = f"{root.rstrip('/')}/from-{name}"
    newest = next(iter(whole([open_backend(location)])), None)
    if newest is not None and world not in (None, newest.manifest.world_size):
        log.warning(
            "%s was saved by %d workers, and these are %d: it cannot be replayed",
            newest.location,
            newest.manifest.world_size,
            world,
        )
        location = f"{location.rstrip('/')}/of-{world}-workers"
        newest = next(iter(whole([open_backend(location)])), None)
    return Origin(location, base, None if newest is None else newest.step)
