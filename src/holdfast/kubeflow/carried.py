"""holdfast itself, on its way into images that do not have it: a zip file in a ConfigMap, on Python's path.

The ConfigMap belongs to the TrainJob and goes with it. In a pod whose image has holdfast the image's own is used, of
whatever version; in one that has none, this copy starts just as an installed one would.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import logging
import os
import secrets
import zipfile
from typing import Any

from kubernetes.client import ApiException

import holdfast

log = logging.getLogger("holdfast")

FOLDER = "/opt/holdfast-carried"
FILE = "holdfast.zip"
VOLUME = "holdfast-carried"
MOUNT = {"name": VOLUME, "mountPath": FOLDER, "readOnly": True}
_LEFT_OUT = ("operator", "testing", "kubeflow", "dashboard", "__pycache__")
_LARGEST = 900_000
"""Bytes of a ConfigMap, below the API server's 1 MiB."""

_START = '''\
"""Python imports this at its start: it looks for holdfast, and starts this copy where there is no other."""
import importlib.machinery
import importlib.util
import os
import sys


def _look():
    here = __file__.rpartition("/")[0]
    elsewhere = [path for path in sys.path if path != here]
    finder = importlib.machinery.PathFinder
    if finder.find_spec("holdfast", elsewhere) is not None:
        sys.path[:] = elsewhere
        return elsewhere
    place = os.environ.get("HOLDFAST_DIR") or os.environ.get("CHECKPOINT_URI") or ""
    needed = ["xxhash", "obstore"] if "://" in place else ["xxhash"]
    missing = [name for name in needed if finder.find_spec(name, elsewhere) is None]
    if missing:
        print("holdfast needs %s, which this image lacks. packages_to_install=%s brings it"
              % (" and ".join(missing), missing), file=sys.stderr)
    if "xxhash" in missing:
        sys.path[:] = elsewhere
        print("this training is not saved", file=sys.stderr)
    else:
        import _holdfast_startup

        _holdfast_startup.start()
    return elsewhere


def _go_on(elsewhere):
    other = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if other is not None and other.loader is not None:
        other.loader.exec_module(importlib.util.module_from_spec(other))


_go_on(_look())
'''


def add_path(environment: list[dict[str, Any]], runtime: str | None = None) -> None:
    """Put the zip file on the path of Python, behind what the job's own variable names, or that of its runtime."""
    entry = f"{FOLDER}/{FILE}"
    for variable in environment:
        if variable["name"] == "PYTHONPATH" and "value" in variable:
            variable["value"] = f"{variable['value']}:{entry}"
            return
    environment.append({"name": "PYTHONPATH", "value": f"{runtime}:{entry}" if runtime else entry})


def volume(name: str) -> dict[str, Any]:
    return {"name": VOLUME, "configMap": {"name": name}}


def name_for(job: str) -> str:
    """Of one submission alone: a job that is deleted takes its own with it, not that of the next one of its name."""
    return f"{job}-holdfast-{secrets.token_hex(4)}"


def create(core_api: Any, namespace: str, name: str) -> bool:
    """Make the ConfigMap for a TrainJob to come. False: not possible, so that the image must have holdfast."""
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "binaryData": {FILE: base64.b64encode(archive()).decode()},
    }
    try:
        core_api.create_namespaced_config_map(namespace, body)
    except ApiException as error:
        log.warning("holdfast could not be sent along (%s): the image must have it", error.reason)
        return False
    return True


def belongs_to(core_api: Any, namespace: str, name: str, job: dict[str, Any]) -> None:
    """From now on the ConfigMap goes when the TrainJob goes."""
    metadata = job["metadata"]
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": metadata["name"], "uid": metadata["uid"]}
    body = {"metadata": {"ownerReferences": [owner]}}
    try:
        core_api.patch_namespaced_config_map(name, namespace, body)
    except ApiException as error:
        log.warning("the ConfigMap %s stays when the job is deleted: %s", name, error.reason)


def remove(core_api: Any, namespace: str, name: str) -> None:
    with contextlib.suppress(Exception):  # what went wrong before is what counts
        core_api.delete_namespaced_config_map(name, namespace)


@functools.cache
def archive() -> bytes:
    """The package as a zip file that Python imports from."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(holdfast.__file__)))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        file.writestr("sitecustomize.py", _START)
        file.write(os.path.join(root, "_holdfast_startup.py"), "_holdfast_startup.py")
        for parent, folders, names in os.walk(os.path.join(root, "holdfast")):
            folders[:] = sorted(set(folders) - set(_LEFT_OUT))
            for name in sorted(names):
                if name.endswith(".py"):
                    path = os.path.join(parent, name)
                    file.write(path, os.path.relpath(path, root))
    data = buffer.getvalue()
    if len(data) > _LARGEST:
        raise AssertionError(f"the package has become too large to be carried: {len(data)} bytes")
    return data
