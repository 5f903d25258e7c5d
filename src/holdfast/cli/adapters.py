"""Adapters that act on scripts which do not know holdfast, and why: a part of ``holdfast doctor``."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import _holdfast_startup as startup
from holdfast.adapters.registry import ADAPTERS, Adapter, tables
from holdfast.base.source_names import Sources
from holdfast.cli.checks import OK, WARNING, Finding


@dataclass(frozen=True, slots=True)
class AdapterState:
    """Whether an adapter would act in a script that is started with this environment, and why."""

    name: str
    description: str
    acts: bool
    why: str
    installed: dict[str, str]
    """Distributions of its framework that are there, with their versions."""
    points: dict[str, str]
    """By distribution, how many of the names that the adapter needs are there, such as ``32 of 32``."""
    tested: dict[str, str]
    """By distribution, the oldest and the newest version that the adapter was tested with."""
    missing: tuple[str, ...] = ()
    """Names that the adapter needs and that are not there."""
    too_old: str = ""


def look_at_adapters(environ: dict[str, str]) -> list[AdapterState]:
    return [_look_at(adapter, environ) for adapter in ADAPTERS]


def _look_at(adapter: Adapter, environ: dict[str, str]) -> AdapterState:
    installed, too_old = {}, ""
    for package, least in adapter.packages.items():
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if _numbers(installed[package]) < _numbers(least):
            too_old = f"{package} {installed[package]} is older than {least}"
    acts, why = False, f"needs {' or '.join(adapter.packages)}: pip install 'holdfast[{adapter.extra}]'"
    points, tested, missing, whole = {}, {}, [], []
    sources = Sources(sys.path)
    for table in tables(adapter.name):
        if table.framework in installed:
            lacking = [target for target in table.required if sources.defines(target) is False]
            points[table.framework] = f"{len(table.required) - len(lacking)} of {len(table.required)}"
            tested[table.framework] = f"{table.oldest} to {table.newest}"
            missing += lacking
            whole += [] if lacking else [table.framework]
    if installed:
        acts, why = _switched(adapter, environ)
        if missing and len(whole) == 0:
            acts, why = False, f"{_versions(installed)} lacks {', '.join(missing)}"
    return AdapterState(
        adapter.name, adapter.description, acts, why, installed, points, tested, tuple(missing), too_old
    )


def _versions(installed: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in installed.items())


def _switched(adapter: Adapter, environ: dict[str, str]) -> tuple[bool, str]:
    told = {name: environ[name] for name in (startup.ENABLED, *adapter.switches) if environ.get(name)}
    variables = ", ".join(f"{name}={value}" for name, value in told.items())
    not_set = f"{' and '.join(adapter.switches)} {'is' if len(adapter.switches) == 1 else 'are'} not set"
    try:
        acts = adapter.acts(environ)
    except ValueError as error:
        return False, str(error)
    if acts and not startup.started:
        return False, "holdfast.pth was not read"
    if acts and not variables:
        return True, f"{not_set}: only for {adapter.unasked}"
    return acts, variables or not_set


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def check_adapters(states: list[AdapterState], environ: dict[str, str]) -> Iterator[Finding]:
    asked = any(environ.get(name) for adapter in ADAPTERS for name in adapter.switches)
    place = next((path for folder in sys.path if os.path.exists(path := os.path.join(folder, "holdfast.pth"))), None)
    if startup.started:
        yield Finding(OK, "startup", f"{place or 'holdfast.pth'} is read when Python starts")
    else:
        yield Finding(
            WARNING if asked else OK,
            "startup",
            "holdfast.pth was not read when this Python started",
            "no adapter acts without a change of the script; holdfast.Run works",
            "install the package with pip into this environment, and start Python without -S and -I",
        )
    for state in states:
        found = "; ".join(_described(state, name) for name in state.installed) or "not installed"
        verdict = "acts" if state.acts else "inactive"
        told = f"{state.description} ({found}): {verdict}, {state.why}"
        if state.missing:
            yield Finding(
                WARNING,
                f"adapter {state.name}",
                told,
                "training with it is not protected",
                f"install a tested version ({', '.join(f'{n} {v}' for n, v in state.tested.items())}); "
                "HOLDFAST_ENABLED=require refuses to train unprotected",
            )
        elif state.acts and state.too_old:
            yield Finding(
                WARNING, f"adapter {state.name}", told, f"{state.too_old}: never tried", "install a newer one"
            )
        else:
            yield Finding(OK, f"adapter {state.name}", told)


def _described(state: AdapterState, name: str) -> str:
    text = f"{name} {state.installed[name]}"
    if name in state.points:
        text += f", {state.points[name]} patch points, tested {state.tested[name]}"
    return text
