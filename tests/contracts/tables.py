"""Frameworks in which a name is missing, and what a patch table has changed in them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import os
import subprocess
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.base import patching
from holdfast.base.patching import PatchSet

_CACHE = ".__slotnames__"
"""Python leaves it on each class of which an object has been copied."""


def owner_of(target: str) -> tuple[Any, str]:
    """What holds the name that a target names last, and the name."""
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name


@contextlib.contextmanager
def without(target: str) -> Iterator[None]:
    """While the block runs, the framework lacks the target: neither its class nor its instances have the name."""
    if target.endswith(".__init__"):  # every class has one: the class itself is gone
        target = target.removesuffix(".__init__")
    owner, name = owner_of(target)
    holders = [owner] if isinstance(owner, types.ModuleType) else [kind for kind in owner.__mro__ if kind is not object]
    names_used_in = patching._names_used_in
    with pytest.MonkeyPatch.context() as patch:
        for holder in holders:
            if name in vars(holder):
                patch.delattr(holder, name)
        patch.setattr(patching, "_names_used_in", lambda kind: names_used_in(kind) - {name})
        yield


def snapshot(tables: Iterable[PatchSet]) -> dict[str, Any]:
    """By name, every attribute of the modules and classes that the tables touch, and every target that is inherited."""
    found = {}
    for target in dict.fromkeys(
        target for table in tables for target in (*table.targets, *(patch.target for patch in table.patches))
    ):
        with contextlib.suppress(ImportError, AttributeError):  # a class that is missing, a module that is not there
            owner, _ = owner_of(target)
            prefix = target[: max(target.rfind("."), target.rfind(":")) + 1]
            found.update({f"{prefix}{name}": value for name, value in vars(owner).items()})
            found.setdefault(target, inspect.getattr_static(owner, target.removeprefix(prefix), None))
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what is another object than before."""
    nothing = object()
    names = [name for name in dict.fromkeys([*before, *after]) if not name.endswith(_CACHE)]
    return sorted(name for name in names if before.get(name, nothing) is not after.get(name, nothing))


@contextlib.contextmanager
def warnings_of_holdfast() -> Iterator[list[str]]:
    """What holdfast logs while the block runs, from warnings on."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    listener, log = Listener(logging.WARNING), logging.getLogger("holdfast")
    log.addHandler(listener)
    try:
        yield heard
    finally:
        log.removeHandler(listener)


def alone(scenario: Callable[[], Any]) -> Any:
    """The result of a function of a test module, from a fresh process: Ray's own threads do not live through a fork."""
    module, name = scenario.__module__, scenario.__name__
    code = f"import json; from {module} import {name}; print(json.dumps({name}()))"
    ours = ("HOLDFAST_", "RAY_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def forked(scenario: Callable[[], Any]) -> Any:
    """The result of a function, as JSON hands it on, from a process that is forked for it."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            os.dup2(2, 1)  # what a framework prints is not a result
            with open(writing, "w", encoding="utf-8") as file:
                json.dump(scenario(), file)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with open(reading, encoding="utf-8") as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"{scenario} ended with {os.waitstatus_to_exitcode(status)}"
    return json.loads(text)
