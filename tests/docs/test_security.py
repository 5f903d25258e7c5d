"""Each promise in SECURITY.md names a test that attacks it, and that test is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def promises() -> list[str]:
    """The rows of the tables whose last column names tests."""
    rows: list[str] = []
    inside = False
    for line in TEXT.splitlines():
        inside = line.startswith("|") and (inside or line.endswith("| attacked by |"))
        if inside and not line.endswith("| attacked by |") and set(line) - set("|-"):
            rows.append(line)
    return rows


@pytest.mark.core
def test_every_promise_names_a_test() -> None:
    assert len(promises()) > 20
    assert [row for row in promises() if not NAMED.search(row.rsplit(" | ", 1)[1])] == []


@pytest.mark.core
@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED.findall(TEXT))))
def test_the_test_is_there(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert name in functions


def test_every_attack_in_the_repository_stands_for_a_promise() -> None:
    named = {path for path, _ in NAMED.findall(TEXT)}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "attacks").glob("test_*.py")}
    assert files <= named
