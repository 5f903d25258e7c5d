"""Every benchmark runs, prints its table and imports only what exists. No number is judged: that is ``make bench``."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
PARTS = ("startup", "boundary", "stall", "durable", "notice", "agreement", "incremental", "find", "load")
COMMANDS = {
    "run": "torch",
    "operator_jobs": "kubernetes_asyncio",
    "peer_keras": "keras",
    "peer_lightning": "lightning",
    "peer_plain": "torch",
    "peer_ray": "ray",
    "peer_ray_train": "ray",
    "peer_transformers": "transformers",
}
"""Scripts that are started by their name, and the package that each one needs."""
MODULES = sorted(path.stem for path in FOLDER.glob("*.py"))
NAMES_PER_ROW = {"what", "measured", "target", "met", "values"}


@dataclass
class Smoke:
    code: int
    output: str
    rows: dict[str, list[dict[str, Any]]]


def run(name: str, *options: str, folder: Path, limit_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    is_module = "from tests." in (FOLDER / f"{name}.py").read_text()  # it shares the drills: python -m benchmarks.name
    command = [sys.executable, *(["-m", f"benchmarks.{name}"] if is_module else [FOLDER / f"{name}.py"]), *options]
    env = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=limit_s)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    """All parts of ``benchmarks/run.py``, once, at their smallest size."""
    folder = tmp_path_factory.mktemp("smoke")
    done = run("run", "--smoke", "--json", "numbers.json", folder=folder)
    assert (folder / "numbers.json").exists(), done.stdout + done.stderr
    left = {path.name for path in folder.iterdir()} - {"numbers.json"}
    assert left == set(), "a benchmark leaves files"
    rows = json.loads((folder / "numbers.json").read_text())["rows"]
    return Smoke(done.returncode, done.stdout + done.stderr, rows)


@pytest.mark.slow
def test_the_parts_tested_here_are_those_that_the_command_runs(smoke: Smoke) -> None:
    assert tuple(smoke.rows) == PARTS


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_each_part_runs_and_has_its_rows_in_the_table(smoke: Smoke, part: str) -> None:
    rows = smoke.rows[part]
    assert rows
    for row in rows:
        assert set(row) == NAMES_PER_ROW
        assert not row["measured"].startswith("failed"), smoke.output
        assert row["what"].strip() in smoke.output


@pytest.mark.slow
def test_a_run_without_failures_exits_with_0(smoke: Smoke) -> None:
    assert smoke.code == 0, smoke.output


@pytest.mark.slow
def test_the_plain_loop_is_followed_and_replayed_at_the_smallest_size(tmp_path: Path) -> None:
    done = run("peer_plain", "--rounds", "2", "--steps", "20", "--replay", "50", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_what_it_accepts(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(COMMANDS[name]) is None:
        pytest.skip(f"not installed: {COMMANDS[name]}")
    done = run(name, "--help", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout


@pytest.mark.parametrize("module", MODULES)
def test_each_name_that_a_benchmark_imports_from_holdfast_exists(module: str) -> None:
    """Also those that are imported within functions, which ``--help`` does not reach."""
    missing = [f"{source}.{name}" for source, name in imports_of(FOLDER / f"{module}.py") if not exists(source, name)]
    assert missing == []


def imports_of(path: Path) -> list[tuple[str, str]]:
    """All ``from holdfast… import name`` and ``import holdfast…`` of a file, with ``""`` as the name for the latter."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "holdfast":
            found += [(str(node.module), alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "holdfast"]
    return found


def exists(source: str, name: str) -> bool:
    try:
        module = importlib.import_module(source)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("holdfast"):
            return False
        pytest.skip(f"not installed: {error.name}")
    return not name or hasattr(module, name) or importlib.util.find_spec(f"{source}.{name}") is not None
