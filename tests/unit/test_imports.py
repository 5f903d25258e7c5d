"""What import-linter does not see: cycles that hide behind lazy and type-checking imports, and foreign names."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.glob("holdfast/**/*.py"))
}


def imports_of(module: str) -> set[str]:
    """Modules of holdfast that a module imports, wherever in its text."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in FILES}
        elif isinstance(node, ast.ImportFrom) and node.module in FILES:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in FILES else node.module)
    return found - {module}


def cycles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Groups of modules that reach each other (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[list[str]]:
        index[node] = low[node] = len(index)
        stack.append(node)
        for following in sorted(graph[node]):
            if following not in index:
                yield from visit(following)
                low[node] = min(low[node], low[following])
            elif following in stack:
                low[node] = min(low[node], index[following])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                yield group

    for node in graph:
        if node not in index:
            yield from visit(node)


def test_no_modules_import_each_other_not_even_lazily_or_for_types() -> None:
    # The package itself hands out its public names when they are asked for.
    graph = {module: imports_of(module) - {"holdfast"} for module in FILES if module != "holdfast"}
    assert [sorted(group) for group in cycles(graph)] == []


# ---------------------------------------------------------------------- foreign names

NOT_FOREIGN = {"holdfast", "_holdfast_startup", "__future__"}
PATCHES_OF_PROCESS = {
    ("holdfast.base.patching", "setattr(owner, name, value)"),
    ("holdfast.base.patching", "delattr(self.owner, self.name)"),
}
"""The one place that carries tables out."""


def assignments_to_foreign_names(module: str) -> Iterator[str]:
    """Statements that bind or delete a name inside something imported from another package."""
    tree = ast.parse(FILES[module].read_text())
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {
                alias.asname or alias.name.partition(".")[0]
                for alias in node.names
                if alias.name.partition(".")[0] not in NOT_FOREIGN
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in NOT_FOREIGN:
            foreign |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if _root(node.value) in foreign or (_is_code(node.attr) and _root(node.value) != "self"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            target = _root(node.args[0])
            if node.func.id in ("setattr", "delattr") and (target in foreign or _sets_code(node)):
                yield ast.unparse(node)


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_code(name: str) -> bool:
    """Names that only somebody who patches assigns to, whatever the object is called."""
    return name in ("__code__", "__class__", "__init__", "__call__", "__iter__", "__wrapped__", "__new__")


def _sets_code(call: ast.Call) -> bool:
    name = call.args[1] if len(call.args) > 1 else None
    return isinstance(name, ast.Constant) and isinstance(name.value, str) and _is_code(name.value)


@pytest.mark.parametrize("module", FILES)
def test_only_patch_tables_assign_to_names_of_other_libraries(module: str) -> None:
    if module.rpartition(".")[2] == "patches" or module == "holdfast.base.patching":
        return
    assert sorted(set(assignments_to_foreign_names(module)) - ALLOWED.get(module, set())) == []


ALLOWED: dict[str, set[str]] = {}


def test_the_check_itself_sees_what_patchers_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "patcher.py"
    path.write_text(
        "import torch\nfrom keras import Model as M\nimport holdfast.config as ours\n"
        "torch.save = 1\ndel M.fit\nsetattr(torch.nn.Module, name, 2)\nfunction.__code__ = 3\nours.x = 4\n"
        "self.__init__ = 5\nmine.value = 6\ntorch.a.b[0].c += 7\nsetattr(kind, '__iter__', 8)\n"
    )
    monkeypatch.setitem(FILES, "patcher", path)
    assert sorted(assignments_to_foreign_names("patcher")) == [
        "M.fit",
        "function.__code__",
        "setattr(kind, '__iter__', 8)",
        "setattr(torch.nn.Module, name, 2)",
        "torch.a.b[0].c",
        "torch.save",
    ]


# ---------------------------------------------------------------------- what importing costs


def test_patch_tables_are_data_that_only_the_standard_library_is_needed_for() -> None:
    """``holdfast doctor`` and the contract tests read them where no framework is installed."""
    import subprocess

    tables = [module for module in FILES if module.rpartition(".")[2] == "patches"]
    assert len(tables) >= 6
    code = (
        f"import sys, importlib\nfor name in {tables!r}: importlib.import_module(name)\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = set(ast.literal_eval(done.stdout))
    assert loaded <= set(sys.stdlib_module_names) | set(dir(builtins)) | {"holdfast", "_holdfast_startup", "__main__"}
