"""Names that a library's source defines: a patch table is checked against them without importing the library.

Imports of a framework take seconds, and an old version may not even import beside the other packages of today. So
``holdfast doctor`` and the contract tests read its source instead. The answer is True, False, or None where the source
cannot tell: a base class that is compiled, a module that computes its names.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Iterator, Sequence

_DEPTH = 12
"""Re-exports and base classes that are followed."""


class Sources:
    """The source files below some folders of ``sys.path``, or of an unpacked wheel."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = [folder for folder in folders if folder]
        self._parsed = functools.lru_cache(maxsize=None)(self._parse)

    def defines(self, target: str) -> bool | None:
        """Look up ``module:name`` or ``module:Class.name``."""
        module, _, path = target.partition(":")
        return self._has(module, path.split("."), _DEPTH)

    # ------------------------------------------------------------------ modules

    def _file_of(self, module: str) -> str | None:
        relative = module.replace(".", os.sep)
        for folder in self._folders:
            for path in (os.path.join(folder, relative, "__init__.py"), os.path.join(folder, f"{relative}.py")):
                if os.path.isfile(path):
                    return path
        return None

    def _is_compiled(self, module: str) -> bool:
        if module in sys.builtin_module_names:
            return True
        package = module.rpartition(".")[0]
        if package and self._is_compiled(package):
            return True
        relative = module.replace(".", os.sep)
        for folder in self._folders:
            parent, name = os.path.split(os.path.join(folder, relative))
            if os.path.isdir(parent) and any(
                entry.startswith(f"{name}.") and entry.endswith((".so", ".pyd", ".dylib"))
                for entry in os.listdir(parent)
            ):
                return True
        return False

    def _parse(self, module: str) -> tuple[ast.Module, bool] | None:
        """The module's syntax tree, and whether it is a package."""
        path = self._file_of(module)
        if path is None:
            return None
        with open(path, "rb") as file:
            return ast.parse(file.read()), os.path.basename(path) == "__init__.py"

    def _has(self, module: str, path: list[str], depth: int) -> bool | None:
        found = self._parsed(module)
        if found is None:
            return None if self._is_compiled(module) else False
        if depth == 0:
            return None
        tree, is_package = found
        name, rest = path[0], path[1:]
        unknown = False
        classes: list[bool | None] = []
        """What each of several classes of this name says: a module defines one or the other, by some condition."""
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef) and node.name == name:
                classes.append(True if not rest else self._class_has(module, node, rest, depth))
                if classes[-1]:
                    return True
                continue
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return not rest
            if name in _assigned(node):
                return True if not rest else None
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    origin = _absolute(module, is_package, node)
                    if alias.name == "*":
                        answer = self._has(origin, path, depth - 1)
                        if answer:
                            return True
                        unknown = unknown or answer is None
                    elif (alias.asname or alias.name) == name:
                        if self._file_of(origin.partition(".")[0]) is None:  # of a package that is not here
                            return None if rest else True
                        answer = self._has(origin, [alias.name, *rest], depth - 1)
                        if answer is False and not rest and self._file_of(f"{origin}.{alias.name}"):
                            return True
                        return answer
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if (alias.asname or alias.name.partition(".")[0]) == name and not rest:
                        return True
        if classes:
            return None if None in classes else False
        if is_package and self._file_of(f"{module}.{name}"):
            return True if not rest else self._has(f"{module}.{name}", rest, depth - 1)
        return None if unknown or _computes_names(tree) else False

    # ------------------------------------------------------------------ classes

    def _class_has(self, module: str, node: ast.ClassDef, path: list[str], depth: int) -> bool | None:
        name, rest = path[0], path[1:]
        if name.startswith(mangled := f"_{node.name.lstrip('_')}__"):  # written without the name of its class
            name = f"__{name.removeprefix(mangled)}"
        for part in _statements(node.body):
            if isinstance(part, ast.ClassDef) and part.name == name:
                return True if not rest else self._class_has(module, part, rest, depth)
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name == name:
                return not rest
            if name in _assigned(part):
                return True
        if not rest and (path[0] in _set_on_self(node) or hasattr(object, name)):
            return True
        answers = [self._base_has(module, base, path, depth - 1) for base in node.bases]
        if True in answers:
            return True
        return None if None in answers else False

    def _base_has(self, module: str, base: ast.expr, path: list[str], depth: int) -> bool | None:
        if isinstance(base, ast.Subscript):
            base = base.value
        if depth == 0:
            return None
        if isinstance(base, ast.Name):
            if base.id in ("object", "ABC", "Generic", "Protocol"):
                return False
            return self._has(module, [base.id, *path], depth)
        if isinstance(base, ast.Attribute):  # module.Class: follow the module, where its name was imported
            *outer, last = ast.unparse(base).split(".")
            return self._through(module, outer, [last, *path], depth)
        return None

    def _through(self, module: str, outer: list[str], path: list[str], depth: int) -> bool | None:
        found = self._parsed(module)
        if found is None:
            return None
        tree, is_package = found
        for node in _statements(tree.body):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if (alias.asname or alias.name) == ".".join(outer):
                        return self._or_unknown(alias.name, path, depth)
                    if alias.asname is None and alias.name.partition(".")[0] == outer[0]:
                        return self._or_unknown(".".join(outer), path, depth)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == outer[0]:
                        origin = f"{_absolute(module, is_package, node)}.{alias.name}"
                        return self._or_unknown(".".join([origin, *outer[1:]]), path, depth)
        return None

    def _or_unknown(self, module: str, path: list[str], depth: int) -> bool | None:
        return self._has(module, path, depth) if self._file_of(module) else None


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, those inside ``if``, ``try`` and ``with`` too; the last definition comes first."""
    for node in reversed(body):
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handlers = [one for handler in node.handlers for one in handler.body]
            yield from _statements([*handlers, *node.orelse, *node.finalbody, *node.body])
        elif isinstance(node, ast.With):
            yield from _statements(node.body)
        else:
            yield node


def _assigned(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Assign):
        targets = [
            one for target in node.targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
        return {target.id for target in targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


@functools.lru_cache(maxsize=256)
def _set_on_self(node: ast.ClassDef) -> frozenset[str]:
    """Attributes that the methods of a class set on ``self``."""
    found = set()
    for part in ast.walk(node):
        if (
            isinstance(part, ast.Attribute)
            and isinstance(part.ctx, ast.Store)
            and isinstance(part.value, ast.Name)
            and part.value.id == "self"
        ):
            private = part.attr.startswith("__") and not part.attr.endswith("__")
            found.add(f"_{node.name.lstrip('_')}{part.attr}" if private else part.attr)
    return frozenset(found)


def _absolute(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*base, *([node.module] if node.module else [])])


def _computes_names(tree: ast.Module) -> bool:
    """True for a module with a ``__getattr__``."""
    return any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
