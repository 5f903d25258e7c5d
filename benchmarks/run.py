"""Measure what holdfast promises in numbers: ``python benchmarks/run.py [--quick] [--only NAME] [--json FILE]``.

With ``--smoke`` each benchmark runs once at its smallest size and no number is judged.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace

from bench import Bench, Row

BENCHMARKS = ("startup", "boundary", "stall", "durable", "notice", "agreement", "incremental", "find", "load")

SIZE_GIB = 1.5
QUICK_GIB = {"stall": SIZE_GIB, "incremental": SIZE_GIB}
"""Sizes of ``--quick``, for those whose target is about a rate: a small state pays for what each save costs anyway."""


def main() -> int:
    options = parse(sys.argv[1:])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    rows: dict[str, list[Row]] = {}
    with working_folder(options.folder) as folder:
        facts = machine(folder)
        print(" · ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
        for name in options.only or BENCHMARKS:
            size = options.size or size_gib(name, options)
            bench = Bench(os.path.join(folder, name), options.quick, int(size * 2**30), options.smoke)
            rows[name] = measured(name, bench)
    show(rows)
    if options.json:
        report = {"machine": facts, "quick": options.quick, "smoke": options.smoke, "size_gib": options.size}
        report["rows"] = {name: [asdict(row) for row in found] for name, found in rows.items()}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    return 0 if all(row.met is not False for found in rows.values() for row in found) else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what holdfast promises in numbers; one table.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="smaller states and fewer rounds: minutes become seconds")
    size.add_argument(
        "--smoke", action="store_true", help="tiny states and one round: check that it runs, judge nothing"
    )
    parser.add_argument("--only", action="append", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--json", metavar="FILE", help="write all numbers there too")
    parser.add_argument(
        "--size",
        type=float,
        metavar="GIB",
        help=f"size of the state (default {SIZE_GIB}; smoke 0.015; quick 0.25, but for {' and '.join(QUICK_GIB)})",
    )
    parser.add_argument("--folder", default=".", help="the disk to measure; a folder is made there (default: here)")
    return parser.parse_args(arguments)


def size_gib(name: str, options: argparse.Namespace) -> float:
    """The size of the state where none was asked for."""
    if options.smoke:
        return 0.015
    return QUICK_GIB.get(name, 0.25) if options.quick else SIZE_GIB


@contextlib.contextmanager
def working_folder(parent: str) -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="holdfast-bench-", dir=parent)
    try:
        yield os.path.abspath(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measured(name: str, bench: Bench) -> list[Row]:
    """One benchmark, in a process of its own: none leaves memory, threads or handlers to the next."""
    print(f"{name} …", end=" ", flush=True)
    began = time.monotonic()
    os.makedirs(bench.folder)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            rows = pool.submit(_measure, name, bench).result()
            if bench.smoke:
                rows = [replace(row, target="", met=None) for row in rows]
        except Exception as error:
            traceback.print_exc()
            rows = [Row(name, f"failed: {type(error).__name__}: {error}", met=False)]
    shutil.rmtree(bench.folder, ignore_errors=True)
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    return rows


def _measure(name: str, bench: Bench) -> list[Row]:
    rows: list[Row] = importlib.import_module(name).measure(bench)
    return rows


def machine(folder: str) -> dict[str, str]:
    """What the numbers depend on."""
    import torch

    with open("/proc/meminfo", encoding="ascii") as file:
        memory_kib = int(file.readline().split()[1])
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_kib / 2**20:.0f} GiB",
        "file system": _file_system(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _file_system(folder: str) -> str:
    found = ("", "unknown")
    with open("/proc/mounts", encoding="utf-8") as file:
        for line in file:
            _, place, kind, *_ = line.split()
            inside = folder == place or folder.startswith(place.rstrip("/") + "/")
            if inside and len(place) >= len(found[0]):
                found = (place, kind)
    return found[1]


def show(rows: dict[str, list[Row]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("what", "measured", "target", "met?"):
        table.add_column(heading, overflow="fold")
    for found in rows.values():
        for row in found:
            met = "" if row.met is None else "yes" if row.met else "[red]no[/red]"
            table.add_row(escape(row.what), escape(row.measured), escape(row.target), met)
        table.add_section()
    console = Console()
    console = console if console.is_terminal else Console(width=150)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
