"""The results of a repository as a Markdown table, printed or written into its place in a page.

A place is a comment ``<!-- results of owner/name -->``, the table, and ``<!-- end of results -->``. Rows that were not
run this time keep their line, as long as the commit is the same one.
"""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.strangers.checkout_manifest import Manifest, ManifestError
from tests.strangers.rows import Verdict
from tests.strangers.trial import Result

_HEAD = ("| row | command | result |", "|---|---|---|")
_END = "<!-- end of results -->"
_LONGEST = 180


@dataclass(frozen=True)
class Table:
    """Lines of one repository at one commit."""

    name: str
    address: str
    commit: str
    lines: dict[str, str]
    """By the name of the row."""
    date: str

    @staticmethod
    def of(manifest: Manifest, commit: str, results: Iterable[Result]) -> Table:
        """The table of these results."""
        lines = {result.row.name: _line(result) for result in results}
        return Table(manifest.name, manifest.repository, commit, lines, datetime.date.today().isoformat())

    def __str__(self) -> str:
        shown = f"[{self.name}]({self.address})" if "://" in self.address else self.name
        at = f" at `{self.commit}`" if self.commit else ""
        return "\n".join([f"{shown}{at}, {self.date}:", "", *_HEAD, *self.lines.values()])


def write(page: Path, table: Table, order: list[str]) -> None:
    """Put the table into its place in the page."""
    text = page.read_text(encoding="utf-8")
    begin = f"<!-- results of {table.name} -->"
    place = re.compile(f"{re.escape(begin)}\n(.*?){re.escape(_END)}", re.DOTALL)
    found = place.search(text)
    if found is None:
        raise ManifestError(f"{page} has no place for this table: a line {begin}, and below it a line {_END}")
    if table.commit and f"`{table.commit}`" in found[1]:
        kept = dict(re.findall(r"^(?=\| `(?P<name>[^`]+)`)(?P<line>.*)$", found[1], re.MULTILINE))
        lines = {**kept, **table.lines}
        table = replace(table, lines={name: lines[name] for name in order if name in lines})
    page.write_text(text[: found.start(1)] + f"\n{table}\n\n" + text[found.end(1) :], encoding="utf-8")


def _line(result: Result) -> str:
    row = result.row
    where = f"in {row.folder}: " if row.folder else ""
    command = f"{where}`{shlex.join(row.command)}`" if row.command else ""
    outcome = result.outcome.splitlines()[0]
    if not result.problems and row.verdict is Verdict.UNPROTECTED:
        outcome += f": “{_said(result)}”"
    if not result.problems and row.idiom and not row.not_run:
        outcome += f"; {row.idiom}"
    return f"| `{row.name}` | {_cell(command)} | {_cell(outcome)} |"


def _said(result: Result) -> str:
    """The message that the row's verdict asks for."""
    said = next((line for line in result.said if re.search(result.row.says, line)), "")
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
