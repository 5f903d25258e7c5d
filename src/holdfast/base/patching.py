"""Patch tables: what holdfast replaces and reads in other libraries, applied all or nothing.

A :class:`PatchSet` is one adapter's whole table. It is data: importing it costs the standard library, so ``holdfast
doctor`` and the contract tests can check a table without importing the framework. The functions that stand in for the
framework's own are looked up by name in what is handed to :meth:`PatchSet.apply` or :meth:`PatchSet.applied`.

Guarantees:

- Every target of the table is resolved before the first one is touched. If a required one is missing, the framework
  stays as it is and :class:`MissingTargetsError` names everything that is missing, the version and the tested range.
- A target is patched at most once, however often it is applied; after ``importlib.reload`` the new one is patched.
- Undoing puts back what was there. If somebody else has wrapped the replacement since, their wrapper is never dropped:
  the replacement stays in the chain, and one of a scope passes every call through.

A target is written ``module:name`` or ``module:Class.name``. Every replacement carries its target as ``__holdfast__``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import platform
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.errors import HoldfastError

MARK = "__holdfast__"
PROCESS = "process"
"""The scope of patches that last as long as the process."""

_ABSENT: Any = object()


class MissingTargetsError(HoldfastError, AttributeError):
    """A library lacks names that its patch table needs."""

    def __init__(self, table: PatchSet, missing: Sequence[str]) -> None:
        self.table, self.missing = table, tuple(missing)
        super().__init__(
            f"{table.framework} {table.version() or '(unknown version)'} lacks {', '.join(missing)}; tested with "
            f"{table.framework} {table.oldest} to {table.newest}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One name of another library that is replaced."""

    target: str
    """``module:name`` or ``module:Class.name``, where it is defined."""
    wrap: str
    """Name of the function, in what is handed to ``apply``, that takes the original and returns its replacement."""
    why: str
    """Purpose of the patch, in a few words."""
    scope: str = PROCESS
    """When it is in place: for good (``PROCESS``), or inside ``applied(scope)``."""
    required: bool = True
    """The adapter cannot work without it. Optional ones exist in some versions only."""
    loaded: bool = False
    """Patch it only where its module has been imported already; never import it for this."""
    in_place: bool = False
    """Change what the function does instead of what its name refers to: scripts may have imported it by name. A
    function that cannot be changed, a builtin or a closure, has its name replaced."""
    direct: bool = False
    """Inside a scope: install the replacement without the guard that silences it afterwards, since it looks at its
    caller's frame or is called at each step. It must itself pass calls through once its scope is over."""
    imported: bool = False
    """Replace it too where modules have imported it by name already."""
    adds: bool = False
    """The name is holdfast's own, beside those of its owner: the framework need not have it, and undoing removes it.
    ``wrap`` is called with what is there, or None, and returns what is placed."""


@dataclass(frozen=True, slots=True)
class Reads:
    """One private name of another library that is read or called, never replaced."""

    target: str
    """As in :class:`Patch`; for an attribute that only instances have, its class and name."""
    required: bool = True
    loaded: bool = False
    """Needed only where its module has been imported already, such as that of a backend; never import it for this."""


@dataclass(slots=True)
class _Site:
    """A place where a patch is in force."""

    owner: Any
    name: str
    own: Any
    """The value that the owner itself held under that name; ``_ABSENT`` where it inherited it."""
    placed: Any
    off: bool = False

    def undo(self) -> None:
        self.off = True
        namespace = vars(self.owner)
        if namespace.get(self.name, _ABSENT) is not self.placed:
            return  # wrapped by somebody else since, or reloaded
        if self.own is not _ABSENT:
            _set(self.owner, self.name, self.own)
        elif isinstance(self.owner, type | types.ModuleType):
            delattr(self.owner, self.name)
        else:
            namespace.pop(self.name, None)


@dataclass(slots=True)
class Applied:
    """Patches that are in place."""

    originals: dict[str, Any] = field(default_factory=dict)
    """By target, what was there before."""
    _sites: list[_Site] = field(default_factory=list)
    _in_place: list[tuple[types.FunctionType, types.CodeType]] = field(default_factory=list)

    def undo(self) -> None:
        """Put back what was there. May be called again."""
        while self._sites:
            self._sites.pop().undo()
        while self._in_place:
            function, code = self._in_place.pop()
            function.__code__ = code
            for name in (MARK, "__wrapped__"):
                vars(function).pop(name, None)


@dataclass(slots=True, kw_only=True, eq=False)
class PatchSet:
    """The table of one adapter for one framework."""

    framework: str
    """Distribution of the framework, as pip knows it."""
    oldest: str
    """Oldest version that is promised and tested."""
    newest: str
    """Newest version that the whole suite has run with."""
    patches: tuple[Patch, ...]
    reads: tuple[Reads, ...] = ()
    entry: str = ""
    """Target of the function that trains: with ``HOLDFAST_ENABLED=require`` it refuses when the rest is missing."""
    _applied: Applied | None = field(default=None, init=False)

    # ------------------------------------------------------------------ facts

    @property
    def targets(self) -> tuple[str, ...]:
        """Every name of the framework that the table touches, once."""
        patched = [patch.target for patch in self.patches if not patch.adds]
        return tuple(dict.fromkeys([*patched, *(read.target for read in self.reads)]))

    @property
    def required(self) -> tuple[str, ...]:
        """The names without which it is not applied, whatever has been imported."""
        return tuple(dict.fromkeys(one.target for one in self._needed() if not one.loaded))

    def _needed(self) -> list[Patch | Reads]:
        """Names of the framework that it needs, be they imported or not."""
        every: list[Patch | Reads] = [*(patch for patch in self.patches if not patch.adds), *self.reads]
        return [one for one in every if one.required]

    def version(self) -> str | None:
        """Version of the framework that is installed here; ``python`` is the interpreter with its library."""
        if self.framework == "python":
            return platform.python_version()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(self.framework)
        return None

    def missing(self) -> list[str]:
        """Required targets that this process cannot find; imports their modules, but for those that are ``loaded``."""
        needed = [
            one.target for one in self._needed() if not (one.loaded and _module_of(one.target) not in sys.modules)
        ]
        placed = {patch.target for patch in self.patches if patch.scope == PROCESS}
        return [target for target in dict.fromkeys(needed) if not exists(target, on_instances=target not in placed)]

    def renamed(self, framework: str, roots: Mapping[str, str]) -> PatchSet:
        """The same table for a framework that is published under two names. ``roots``: old and new module prefix."""

        def moved(target: str) -> str:
            for old, new in roots.items():
                if target.startswith((f"{old}.", f"{old}:")):
                    return new + target[len(old) :]
            return target

        return PatchSet(
            framework=framework,
            oldest=self.oldest,
            newest=self.newest,
            patches=tuple(replace(patch, target=moved(patch.target)) for patch in self.patches),
            reads=tuple(replace(read, target=moved(read.target)) for read in self.reads),
            entry=moved(self.entry),
        )

    def original(self, target: str) -> Any:
        """The value of ``target`` before :meth:`apply`."""
        assert self._applied is not None, f"the table of {self.framework} is not applied"
        return self._applied.originals[target]

    # ------------------------------------------------------------------ in and out

    def apply(self, wrappers: object) -> None:
        """Put all patches of the process in place, or none: :class:`MissingTargetsError`.

        ``wrappers`` has, under the name that each patch gives as ``wrap``, the function that makes the replacement.
        """
        applied = self._place(PROCESS, wrappers)
        if self._applied is None:
            self._applied = applied
        else:  # once more, after a reload
            self._applied.originals.update(applied.originals)
            self._applied._sites += applied._sites
            self._applied._in_place += applied._in_place

    def undo(self) -> None:
        """Take away what :meth:`apply` has put in place."""
        applied, self._applied = self._applied, None
        if applied is not None:
            applied.undo()

    def begin(self, scope: str, wrappers: object, *, to: object = None, thread: bool = False) -> Applied:
        """Put the patches of ``scope`` in place until :meth:`Applied.undo`.

        ``to``: on this one instance, instead of on its class. ``thread``: for calls of the calling thread alone.
        """
        return self._place(scope, wrappers, to=to, thread=threading.get_ident() if thread else None)

    @contextlib.contextmanager
    def applied(self, scope: str, wrappers: object, *, to: object = None, thread: bool = False) -> Iterator[Applied]:
        """While the block runs, the patches of ``scope`` are in place; see :meth:`begin`."""
        applied = self.begin(scope, wrappers, to=to, thread=thread)
        try:
            yield applied
        finally:
            applied.undo()

    def refuse(self, error: Exception) -> bool:
        """Let the function that trains raise ``error``; returns whether there is such a function."""
        if not self.entry or not exists(self.entry):
            return False

        def refuse(original: Any) -> Any:
            def refused(*args: Any, **kwargs: Any) -> Any:
                raise error

            return refused

        patch = Patch(target=self.entry, wrap="refuse", why="HOLDFAST_ENABLED=require")
        _place_one(patch, refuse, Applied(), to=None, thread=None)
        return True

    def _place(self, scope: str, wrappers: object, *, to: object = None, thread: int | None = None) -> Applied:
        if scope == PROCESS and (missing := self.missing()):
            raise MissingTargetsError(self, missing)
        chosen = []
        for patch in self.patches:
            if patch.scope == scope and not (patch.loaded and _module_of(patch.target) not in sys.modules):
                there = patch.adds or (to is None and exists(patch.target, on_instances=False))
                if patch.required and to is None and not there:
                    raise MissingTargetsError(self, [patch.target])
                if there if to is None else hasattr(to, patch.target.rpartition(".")[2]):
                    chosen.append((patch, getattr(wrappers, patch.wrap)))
        applied = Applied()
        try:
            for patch, wrap in chosen:
                _place_one(patch, wrap, applied, to=to, thread=thread)
            _place_where_imported([patch for patch, _ in chosen if patch.imported], applied)
        except BaseException:
            applied.undo()
            raise
        return applied


def exists(target: str, *, on_instances: bool = True) -> bool:
    """Look for the target in this process; imports its module.

    ``on_instances``: an attribute that only the instances of a class have is found too, by its uses in the class.
    """
    try:
        owner, name = _owner_of(target)
    except (ImportError, AttributeError):
        return False
    if inspect.getattr_static(owner, name, _ABSENT) is not _ABSENT or hasattr(owner, name):
        return True
    return on_instances and isinstance(owner, type) and name in _names_used_in(owner)


@functools.cache
def _names_used_in(kind: type) -> frozenset[str]:
    """Attributes that the methods of a class use: those that only its instances have are among them."""
    found: set[str] = set()
    for base in kind.__mro__:
        found.update(vars(base).get("__annotations__", ()), vars(base).get("__slots__", ()))
        for value in vars(base).values():
            function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", None) or value))
            code = getattr(function, "__code__", None)
            if code is not None:
                found.update(code.co_names)
    return frozenset(found)


def _module_of(target: str) -> str:
    return target.partition(":")[0]


def _owner_of(target: str) -> tuple[Any, str]:
    """The object that holds the last name of a target, and that name."""
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name


def _place_one(patch: Patch, wrap: Callable[[Any], Any], applied: Applied, *, to: object, thread: int | None) -> None:
    owner, name = (to, patch.target.rpartition(".")[2]) if to is not None else _owner_of(patch.target)
    absent = (None,) if patch.adds else ()
    current: Any = getattr(owner, name, *absent) if to is not None else inspect.getattr_static(owner, name, *absent)
    kind = type(current) if isinstance(current, staticmethod | classmethod) else None
    original = current.__func__ if kind is not None else current
    if patch.scope == PROCESS and getattr(original, MARK, None) == patch.target:
        return
    applied.originals[patch.target] = original
    site = _Site(owner, name, vars(owner).get(name, _ABSENT), None)
    guarded = (patch.scope != PROCESS and not patch.direct) or thread is not None
    if patch.in_place and isinstance(original, types.FunctionType) and not original.__closure__:
        before = _copy_of(original)
        replacement = wrap(before)
        if guarded:
            replacement = _guarded(replacement, before, site, thread)
        _change(original, before, replacement, patch, applied)
        applied._sites.append(site)
        return
    replacement = wrap(original)
    if patch.adds and replacement is original:
        return
    if inspect.isroutine(original) and callable(replacement) and not isinstance(replacement, type):
        if guarded:
            replacement = _guarded(replacement, original, site, thread)
        replacement = _marked(replacement, original, patch.target)
    site.placed = kind(replacement) if kind is not None else replacement
    _set(owner, name, site.placed)
    applied._sites.append(site)


def _place_where_imported(patches: Sequence[Patch], applied: Applied) -> None:
    """Replace the names under which modules hold what these patches have replaced."""
    if not patches:
        return
    owners = {id(_owner_of(patch.target)[0]) for patch in patches}
    placed = {}
    for patch in patches:
        owner, name = _owner_of(patch.target)
        placed[id(applied.originals[patch.target])] = vars(owner)[name]
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType) or id(module) in owners or module.__name__ in _DEFINE:
            continue
        if placed.keys().isdisjoint(map(id, list(vars(module).values()))):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in placed:
                applied._sites.append(_Site(module, name, value, placed[id(value)]))
                setattr(module, name, placed[id(value)])


_DEFINE = ("_io", "posix", "nt")
"""Modules of builtins, which others show under names of their own."""


def _guarded(replacement: Any, original: Any, site: _Site, thread: int | None) -> Any:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if site.off or (thread is not None and threading.get_ident() != thread):
            return original(*args, **kwargs)
        return replacement(*args, **kwargs)

    return guarded


def _marked(replacement: Any, original: Any, target: str) -> Any:
    try:
        functools.update_wrapper(replacement, original)
        setattr(replacement, MARK, target)
    except (AttributeError, TypeError):  # a bound method or a builtin: it takes no attributes, so it gets a function

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return replacement(*args, **kwargs)

        functools.update_wrapper(wrapped, original)
        setattr(wrapped, MARK, target)
        return wrapped
    return replacement


_HERE = "the replacement"


def _call(*args: Any, **kwargs: Any) -> Any:
    replacement: Any = "the replacement"  # a constant, so that its code needs no name from anybody's module
    return replacement(*args, **kwargs)


def _copy_of(function: types.FunctionType) -> types.FunctionType:
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _change(
    function: types.FunctionType, before: types.FunctionType, replacement: Any, patch: Patch, applied: Applied
) -> None:
    """Let the function itself call the replacement, for whoever has imported it already."""
    applied._in_place.append((function, function.__code__))
    code = _call.__code__
    function.__code__ = code.replace(co_consts=tuple(replacement if one == _HERE else one for one in code.co_consts))
    vars(function)["__wrapped__"] = before
    vars(function)[MARK] = patch.target


def _set(owner: Any, name: str, value: Any) -> None:
    """Assign, past a ``__setattr__`` of the owner's own."""
    if isinstance(owner, type | types.ModuleType):
        setattr(owner, name, value)
    else:
        vars(owner)[name] = value
