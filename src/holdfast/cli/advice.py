"""Lines of a script that may keep it from resuming exactly: what follows from the clock or from the order of a set,
and numbers that nobody seeds.

The source is read, not run. It is a help for who has been told already that something differs, so it may miss a line.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CLOCKS = {
    *(f"time.{name}{end}" for name in ("time", "monotonic", "perf_counter", "process_time") for end in ("", "_ns")),
    *(f"{place}datetime.{name}" for place in ("", "datetime.") for name in ("now", "utcnow")),
    "timeit.default_timer",
}
_ENTROPY = {"os.urandom", "uuid.uuid4", "secrets.token_hex", "secrets.randbelow", "secrets.choice", "os.getpid"}
_SEEDS = {
    "torch.manual_seed": "torch",
    "random.seed": "random",
    "np.random.seed": "numpy",
    "numpy.random.seed": "numpy",
    "set_seed": "all",
    "seed_everything": "all",
    "keras.utils.set_random_seed": "all",
    "tf.random.set_seed": "tf",
}
_TRACKED = {"holdfast.track", "track"}
_IN_ORDER = {"enumerate", "list", "tuple", "zip", "iter", "map", "dict.fromkeys"}
"""Functions that take the elements of a set in its order."""


@dataclass(frozen=True, slots=True)
class Hint:
    """One line, and what to do about it."""

    file: str
    line: int
    source: str
    do: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.source}\n    {self.do}"


def decisions(path: Path, name: str) -> list[Hint]:
    """Decisions of a file that follow from the clock, or from numbers that no seed decides."""
    text = _read(path)
    hints: dict[int, Hint] = {}
    for scope in _scopes(text):
        tainted: set[str] = set()
        for node in scope:  # in the order of the source: what is assigned before it is asked
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if _is_tainted(node.value, tainted):
                    tainted |= {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert) and _is_tainted(node.test, tainted):
                source = text.splitlines()[node.lineno - 1].strip()
                what = ast.get_source_segment(text, node.test) or "…"
                hints.setdefault(
                    node.lineno,
                    Hint(
                        name,
                        node.lineno,
                        source,
                        f"what is decided here is known to a resume as holdfast.track({what})",
                    ),
                )
    return list(hints.values())


def unlike(path: Path, name: str) -> list[Hint]:
    """Values of a file that are others at each start: of the clock, of a seed drawn anew, and by the order of a set."""
    text = _read(path)
    lines = text.splitlines()
    hints: dict[int, Hint] = {}

    def add(node: ast.stmt | ast.expr, do: str) -> None:
        hints.setdefault(node.lineno, Hint(name, node.lineno, lines[node.lineno - 1].strip(), do))

    for scope in _scopes(text):
        tainted: set[str] = set()
        sets: set[str] = set()
        for node in scope:
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = {target.id for target in targets if isinstance(target, ast.Name)}
                sets = sets | names if _is_set(node.value, sets) else sets - names
                if _is_tainted(node.value, tainted):
                    tainted |= names
                    if not all(isinstance(target, ast.Name) for target in targets):
                        what = ast.get_source_segment(text, node.value) or "…"
                        add(node, f"the clock decides this; a resume knows it as holdfast.track({what})")
            if isinstance(node, ast.Call):
                if any(_is(node, end) for end in _SEEDS) and any(_is_tainted(one, tainted) for one in node.args):
                    add(node, "seed it with a number that is the same at each start")
                if _is(node, "hash"):
                    add(node, "the hash of a text is another at each start: set PYTHONHASHSEED=0, or use hashlib")
                if _name(node.func) in _IN_ORDER and any(_is_set(one, sets) for one in node.args):
                    add(node, "the order of a set of texts is another at each start: sorted(…)")
            if isinstance(node, ast.For | ast.comprehension) and _is_set(node.iter, sets):
                add(node.iter, "the order of a set of texts is another at each start: sorted(…)")
    return [hints[line] for line in sorted(hints)]


def _is_set(node: ast.AST, sets: set[str]) -> bool:
    if isinstance(node, ast.Call):
        return _name(node.func) in ("set", "frozenset")
    return isinstance(node, ast.Set | ast.SetComp) or (isinstance(node, ast.Name) and node.id in sets)


def seeds_missing(path: Path, name: str) -> list[Hint]:
    """The first use of random numbers of a library that the file never seeds."""
    text = _read(path)
    nodes = [node for scope in _scopes(text) for node in scope]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    seeded = {kind for call in calls for end, kind in _SEEDS.items() if _is(call, end)}
    if "all" in seeded or not calls:
        return []
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found = []
    for kind, module, call in (
        ("torch", "torch", "torch.manual_seed(0)"),
        ("numpy", "numpy", "numpy.random.seed(0)"),
        ("random", "random", "random.seed(0)"),
    ):
        uses = module in imported and (kind == "torch" or any(_uses(node, kind) for node in calls))
        if uses and kind not in seeded:
            line = next(
                (
                    node.lineno
                    for node in nodes
                    if isinstance(node, ast.Import) and any(alias.name == module for alias in node.names)
                ),
                1,
            )
            found.append(Hint(name, line, text.splitlines()[line - 1].strip(), f"seed it: {call} after the imports"))
    return found


def imported(script: Path) -> list[Path]:
    """A script, and the modules and packages beside it that it imports."""
    found, waiting = [script], [script]
    while waiting:
        for node in ast.walk(ast.parse(_read(waiting.pop()))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                names = [module, *(f"{module}.{alias.name}".strip(".") for alias in node.names)]
            for name in names:
                path = script.parent.joinpath(*name.split(".")).with_suffix(".py")
                if name and path.is_file() and path not in found:
                    found.append(path)
                    waiting.append(path)
    return found


def _uses(call: ast.Call, kind: str) -> bool:
    name = _name(call.func)
    return name.startswith(f"{kind}.") if kind == "random" else ".random." in name


def _read(path: Path) -> str:
    try:
        text = path.read_text()
        ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return ""
    return text


def _scopes(text: str) -> Iterator[list[ast.AST]]:
    """The nodes of the module and of each function, in the order of the source."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    tree = ast.parse(text)
    waiting: list[ast.AST] = [tree]
    while waiting:
        scope, nodes = waiting.pop(0), []
        stack = list(ast.iter_child_nodes(scope))
        while stack:
            node = stack.pop(0)
            if isinstance(node, kinds):
                waiting.append(node)
            else:
                nodes.append(node)
                stack = [*ast.iter_child_nodes(node), *stack]
        yield sorted(nodes, key=lambda node: getattr(node, "lineno", 0))


def _is_tainted(expression: ast.AST, tainted: set[str]) -> bool:
    nodes = list(ast.walk(expression))
    if any(isinstance(node, ast.Call) and any(_is(node, name) for name in _TRACKED) for node in nodes):
        return False
    return any(
        (isinstance(node, ast.Call) and any(_is(node, name) for name in _CLOCKS | _ENTROPY))
        or (isinstance(node, ast.Name) and node.id in tainted)
        for node in nodes
    )


def _is(call: ast.Call, name: str) -> bool:
    called = _name(call.func)
    return called == name or called.endswith(f".{name}") or (called == name.rpartition(".")[2] and "." in name)


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
