"""The results of a repository as a Markdown table, printed or written into its place in a page.

A place is a comment ``<!-- results of owner/name -->``, the table, and ``<!-- end of results -->``. Rows that were not
run this time keep their line, as long as the commit is the same one. How many rows of all tables fared how is written
between ``<!-- sums of results -->`` and ``<!-- end of sums -->``.
"""

from __future__ import annotations

import datetime
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.strangers.checkout_manifest import Manifest, ManifestError
from tests.strangers.rows import Verdict
from tests.strangers.trial import Result

_HEAD = ("| row | command | result |", "|---|---|---|")
_END = "<!-- end of results -->"
_SUMS = re.compile(r"(<!-- sums of results -->)\n(.*?)\n?(<!-- end of sums -->)", re.DOTALL)
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
    text = text[: found.start(1)] + f"\n{table}\n\n" + text[found.end(1) :]
    page.write_text(_SUMS.sub(lambda place: f"{place[1]}\n{_sums(text)}\n{place[3]}", text), encoding="utf-8")


def _sums(text: str) -> str:
    """How many rows of all tables have which result; those that do not run are counted apart."""
    tables = re.findall(r"<!-- results of (?:.*?) -->\n(.*?)<!-- end of results -->", text, re.DOTALL)
    cells = [cell for table in tables for cell in re.findall(r"^\| `.* \| ((?:\\\||[^|])*) \|$", table, re.MULTILINE)]
    counts = Counter(re.split(r"[:;]", cell)[0] for cell in cells)
    idle = counts.pop("not run", 0)
    number = sum(counts.values())
    sums = ", ".join(f"{count} {name} ({count / number:.0%})" for name, count in counts.most_common())
    repositories = sum("\n| `" in table for table in tables)
    return f"{number} rows of {repositories} repositories: {sums}. {idle} more are listed, not run."


def _line(result: Result) -> str:
    row = result.row
    where = f"in {row.folder}: " if row.folder else ""
    command = f"{where}`{shlex.join(row.command)}`" if row.command else ""
    outcome = _short(re.sub(r"(?<![\w.~])(/[\w.-]+){2,}/", "…/", result.outcome.splitlines()[0]))
    if not result.problems and row.verdict is Verdict.UNPROTECTED:
        outcome += f": “{_said(result)}”"
    if not result.problems and row.idiom and not row.not_run:
        outcome += f"; {row.idiom}"
    return f"| `{row.name}` | {_cell(command)} | {_cell(outcome)} |"


def _said(result: Result) -> str:
    """The message that the row's verdict asks for."""
    return _short(next((line for line in result.said if re.search(result.row.says, line)), ""))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
