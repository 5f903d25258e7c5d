"""Every patch table against the oldest promised, the installed and the newest released version of its framework.

Upstream drift is one failure here that names what is gone, before a user meets it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import re
import sys
import tomllib
from pathlib import Path

import pytest

import holdfast
from holdfast.adapters.registry import ADAPTERS
from holdfast.base.patching import PatchSet
from holdfast.base.source_names import Sources
from tests.contracts.wheels import NotDownloadedError, unpacked

ROOT = Path(__file__).parents[2]
TABLES: list[PatchSet] = [
    table
    for module in sorted(one.name for one in pkgutil.walk_packages(holdfast.__path__, "holdfast.", lambda _: None))
    if module.rpartition(".")[2] == "patches"
    for table in importlib.import_module(module).TABLES
]
FRAMEWORKS = sorted({table.framework for table in TABLES} - {"python"})


def missing_in(folders: list[str], framework: str, version: str) -> list[str]:
    sources = Sources(folders)
    tables = [table for table in TABLES if table.framework == framework]
    assert tables
    return [
        f"{framework} {version} lacks {target}"
        for table in tables
        for target in table.required
        if sources.defines(target) is False
    ]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_installed_version_has_every_name(framework: str) -> None:
    try:
        version = importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"pip install {framework} to check its table")
    assert missing_in(sys.path, framework, version) == []


@pytest.mark.parametrize("which", ["oldest", "newest"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.core(0)
def test_the_oldest_and_the_newest_version_have_every_name(tmp_path: Path, framework: str, which: str) -> None:
    wanted = next(table.oldest for table in TABLES if table.framework == framework) if which == "oldest" else None
    try:
        version, folder = unpacked(framework, wanted, tmp_path)
    except NotDownloadedError as error:
        pytest.skip(str(error))
    assert missing_in([str(folder)], framework, version) == []


def test_each_target_stands_once_in_a_table_and_says_why_it_is_touched() -> None:
    for table in TABLES:
        keys = [(patch.target, patch.scope) for patch in table.patches]
        assert len(keys) == len(set(keys)), table.framework
        assert all(patch.why for patch in table.patches), table.framework
        assert all(re.fullmatch(r"[\w.]+:[\w.]+", target) for target in table.targets), table.framework


def test_the_floors_of_tables_registry_and_extras_are_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    promised = {name: least for adapter in ADAPTERS for name, least in adapter.packages.items()}
    lines = " ".join(line for extra in project.values() for line in extra)
    extras = dict(re.findall(r"([\w-]+)(?:\[[\w,]+])?>=([\d.]+)", lines))
    pinned = dict(re.findall(r"([\w-]+)(?:\[[\w,]+])?==([\d.]+)", " ".join(project["dev"])))
    for table in TABLES:
        if table.framework in promised:
            assert promised[table.framework] == table.oldest, table.framework
        if table.framework in extras:
            assert extras[table.framework] == table.oldest, table.framework
        if table.framework in pinned:
            assert pinned[table.framework] == table.newest, table.framework
