"""Where a run of Ray Train keeps its just-in-time checkpoints: beside Ray's own, in the run's folder."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from holdfast.errors import ConfigError

FOLDER = "holdfast"
_UNNAMED = re.compile(r"ray_train_run-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
_SCHEMES = {"s3": "s3://", "gcs": "gs://", "abfs": "az://"}


def is_unnamed(context: Any) -> bool:
    """Whether Ray made the run's name up, from the time of its start: no other job will have it."""
    return _UNNAMED.fullmatch(context.get_experiment_name()) is not None


def location_of(context: Any) -> str:
    """The location of the run's just-in-time checkpoints, from the storage path that Ray was given."""
    storage = context.get_storage()
    kind = storage.storage_filesystem.type_name
    path = f"{storage.experiment_fs_path}/{FOLDER}"
    if kind == "local":
        return path
    if kind in _SCHEMES:
        return _SCHEMES[kind] + path
    raise ConfigError(
        f"RunConfig(storage_path={context.train_run_context.run_config.storage_path!r}) is on a file system of kind "
        f"{kind!r}, which holdfast cannot write to; set HOLDFAST_DIR to a path that all workers share, or to an "
        f"s3://, gs:// or az:// URI"
    )


def run_id_of(context: Any) -> str:
    """The run's identity: jobs of one name in one storage path take over from each other."""
    storage = context.get_storage()
    return f"ray-{hashlib.sha256(storage.experiment_fs_path.encode()).hexdigest()[:12]}"
