"""The real CRDs, and what the API server would say against an object of theirs."""

from __future__ import annotations

import copy
import functools
import lzma
import re
from typing import Any

import jsonpatch
import pytest
import yaml

from tests.kit import ROOT

ADDONS = ROOT.parent / "shared/kube/addons"


@functools.cache
def crds() -> dict[str, dict[str, Any]]:
    """The real ones, by name."""
    if not ADDONS.is_dir():
        pytest.skip(f"needs the CRDs of the real controllers in {ADDONS}")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = {}
    for name in ("trainer", "jobset", "kuberay"):
        with lzma.open(ADDONS / f"{name}.yaml.xz") as file:
            for one in yaml.load_all(file, loader):
                if one and one["kind"] == "CustomResourceDefinition":
                    found[one["metadata"]["name"]] = {
                        **one,
                        "metadata": {**one["metadata"], "resourceVersion": "7"},
                    }
    return found


def crd(name: str) -> dict[str, Any]:
    return copy.deepcopy(crds()[name])


def schema_of(name: str) -> dict[str, Any]:
    return crds()[name]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def complaints(thing: Any, known: dict[str, Any], where: str = "") -> list[str]:
    """What the API server would prune from or refuse in a custom resource."""
    if known.get("x-kubernetes-preserve-unknown-fields") or known.get("x-kubernetes-int-or-string"):
        return []
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": int | float}
    if not isinstance(thing, types[known["type"]]) or (known["type"] == "integer" and isinstance(thing, bool)):
        return [f"{where}: {thing!r} is no {known['type']}"]
    found = []
    if "enum" in known and thing not in known["enum"]:
        found.append(f"{where}: {thing!r} is not one of {known['enum']}")
    if isinstance(thing, str):
        if not known.get("minLength", 0) <= len(thing) <= known.get("maxLength", len(thing)):
            found.append(f"{where}: {thing!r} has {len(thing)} characters")
        if "pattern" in known and not re.search(known["pattern"], thing):
            found.append(f"{where}: {thing!r} does not match {known['pattern']}")
    if isinstance(thing, int) and not known.get("minimum", thing) <= thing <= known.get("maximum", thing):
        found.append(f"{where}: {thing} is out of range")
    if isinstance(thing, dict):
        found += [f"{where}.{name} is missing" for name in known.get("required", []) if name not in thing]
        for name, value in thing.items():
            inner = known.get("properties", {}).get(name) or known.get("additionalProperties")
            if inner is None and not (known.get("properties") is None and "additionalProperties" not in known):
                found.append(f"{where}.{name} is not known")
            elif inner is not None:
                found += complaints(value, inner, f"{where}.{name}")
    if isinstance(thing, list):
        for index, value in enumerate(thing):
            found += complaints(value, known["items"], f"{where}[{index}]")
        keys = known.get("x-kubernetes-list-map-keys")
        if keys:
            names = [tuple(str(value.get(key)) for key in keys) for value in thing]
            found += [f"{where}: {name} is there twice" for name in {*names} if names.count(name) > 1]
    return found


def patched(thing: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    return jsonpatch.apply_patch(thing, operations)
