"""``python -m tests.strangers.checkout CHECKOUT [NAME …]``: the battery over a checkout of any repository.

A manifest says which commands are run and how they must fare (``checkout_manifest``). Each runs in copies of the
checkout, never in the checkout itself: without holdfast, with it, and interrupted. ``--table`` prints a Markdown table
with the commit, ``--page`` writes it into a page.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.strangers import checkout_table, report
from tests.strangers.__main__ import run
from tests.strangers.checkout_manifest import Entry, Manifest, ManifestError, owner_and_name, read
from tests.strangers.rows import Row

MANIFESTS = Path(__file__).parent / "manifests"
OWN = "strangers.toml"
"""The manifest of a repository that has one itself."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.strangers.checkout", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a folder with somebody's repository, or yours")
    parser.add_argument("names", nargs="*", help="beginnings of names of rows; none: all rows")
    parser.add_argument("--manifest", type=Path, help=f"default: its own {OWN}, else the known one that fits")
    parser.add_argument("--points", type=int, default=1, help="interruptions of each row")
    parser.add_argument("--seed", type=int, default=0, help="of the points at which a row is interrupted")
    parser.add_argument("--keep", type=Path, help="a folder in which everything stays that the runs leave")
    parser.add_argument("--verbose", action="store_true", help="all of what is wrong, with the end of each log")
    parser.add_argument("--table", action="store_true", help="print a Markdown table with the commit at the end")
    parser.add_argument("--page", type=Path, help="a Markdown page with a place for this table, which is written there")
    chosen = parser.parse_args()
    try:
        manifest = read(find(chosen.checkout, chosen.manifest))
        entries = choose(manifest, chosen.names)
        with tempfile.TemporaryDirectory(prefix="checkout-", ignore_cleanup_errors=True) as scratch:
            rows = prepared(chosen.checkout, manifest, entries, Path(scratch))
            results = run(rows, chosen)
    except ManifestError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"\n{report.summary(results)}; {sum(result.seconds for result in results):.0f} s in all runs together")
    commit = commit_of(chosen.checkout)
    table = checkout_table.Table.of(manifest, commit, results)
    if chosen.table:
        print(f"\n{table}")
    if chosen.page:
        checkout_table.write(chosen.page, table, order=[entry.row.name for entry in manifest.entries])
    return any(result.problems for result in results)


# ---------------------------------------------------------------------- which manifest, which rows


def find(checkout: Path, given: Path | None = None) -> Path:
    """The manifest of this checkout: the given one, its own, that of its origin, or that of its folder's name."""
    if not checkout.is_dir():
        raise ManifestError(f"{checkout} is not a folder: name one with a checkout of a repository")
    if given is not None:
        return given
    if (checkout / OWN).is_file():
        return checkout / OWN
    known = {path: read(path).name.lower() for path in sorted(MANIFESTS.glob("*.toml"))}
    origin = owner_and_name(_git(checkout, "remote", "get-url", "origin")).lower()
    folder = checkout.resolve().name.lower()
    fits = [path for path, name in known.items() if name == origin]
    fits += [path for path, name in known.items() if folder in (path.stem.lower(), name.rpartition("/")[2])]
    if not fits:
        names = ", ".join(sorted(known.values()))
        raise ManifestError(
            f"no manifest for {checkout}: it has no {OWN}, and neither its origin ({origin or 'none'}) nor its name is "
            f"one of {names}. Write one (docs/strangers.md) and name it: make strangers REPO={checkout} MANIFEST=<file>"
        )
    return fits[0]


def choose(manifest: Manifest, names: list[str]) -> list[Entry]:
    """The entries with one of these names, or whose names begin like one that is no name; all if there are none."""
    known = [entry.row.name for entry in manifest.entries]
    beginnings = tuple(name for name in names if name not in known)
    found = [
        entry
        for entry in manifest.entries
        if not names or entry.row.name in names or (beginnings and entry.row.name.startswith(beginnings))
    ]
    if not found:
        raise ManifestError(f"{manifest.path}: no row begins with {' or '.join(names)}; there are {', '.join(known)}")
    return found


def commit_of(checkout: Path) -> str:
    """The commit of the checkout, in short; empty if it is no git repository."""
    commit = _git(checkout, "rev-parse", "--short=10", "HEAD")
    changed = commit and _git(checkout, "diff", "--name-only", "--diff-filter=d", "HEAD")
    return f"{commit}, changed" if changed else commit


# ---------------------------------------------------------------------- what the rows need


def prepared(checkout: Path, manifest: Manifest, entries: list[Entry], scratch: Path) -> list[Row]:
    """Their rows, each with the folder that it copies and the packages that it imports."""
    packages = installed(manifest) if manifest.packages and not all(entry.row.not_run for entry in entries) else None
    stages: dict[tuple[str, ...], Path] = {}
    rows = []
    for entry in entries:
        row = entry.row
        if not row.not_run:
            if entry.parts not in stages:
                stages[entry.parts] = scratch / f"stage-{len(stages)}"
                _stage(checkout, entry.parts, stages[entry.parts])
            row = dataclasses.replace(row, copy=stages[entry.parts])
            if not (row.copy / row.folder).is_dir():
                raise ManifestError(f"{manifest.path}: {row.name!r} has folder {row.folder!r}, which {checkout} lacks")
        if packages is not None:
            path = os.pathsep.join(filter(None, [row.env.get("PYTHONPATH"), str(packages)]))
            row = dataclasses.replace(row, env={**row.env, "PYTHONPATH": path})
        rows.append(row)
    return rows


def _stage(checkout: Path, parts: tuple[str, ...], folder: Path) -> None:
    """Copy these paths of the checkout, or each file that git lists, or all."""
    folder.mkdir(parents=True)
    listed = _git(checkout, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if not parts and not listed:
        shutil.copytree(checkout, folder, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git"))
        return
    for name in parts or filter(None, listed.split("\0")):
        source, target = checkout / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir() and not source.is_symlink():
            if parts:
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        elif source.is_symlink() or source.exists():
            shutil.copy2(source, target, follow_symlinks=False)
        elif parts:
            raise ManifestError(f"'parts' names {name!r}, which {checkout} lacks")


def installed(manifest: Manifest) -> Path:
    """The folder with the manifest's packages; installed once for each list of them."""
    scripts = [Path(command[0]) for command in manifest.setup]
    text = "\n".join([sys.version, *manifest.packages, *(path.read_text() for path in scripts if path.is_file())])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"strangers-packages-{os.getuid()}" / digest
    if folder.is_dir():
        return folder
    half = folder.with_name(f"{digest}.{os.getpid()}")
    print(f"installing {', '.join(manifest.packages)} into {folder}", flush=True)
    _must([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(half), *manifest.packages])
    for command in manifest.setup:
        _must([sys.executable, *command], cwd=half)
    half.rename(folder)
    return folder


def _must(command: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise ManifestError(f"{shlex.join(command)} ends with {done.returncode}:\n{done.stderr[-2000:]}")


def _git(checkout: Path, *command: str) -> str:
    """What git says about this folder; empty if it is not the top of a repository, or git is not there."""
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", "-C", checkout, *command], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
