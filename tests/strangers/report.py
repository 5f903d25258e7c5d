"""Writes what the battery found as text and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.strangers.rows import Row
from tests.strangers.trial import Result


def line(result: Result) -> str:
    """One row, for the terminal."""
    mark = "ok  " if not result.problems else "FAIL"
    runs = f"{result.interruptions} interrupted, {result.attempts} attempts" if result.attempts else ""
    return f"{mark} {result.row.name:28} {result.seconds:6.1f} s  {runs:28} {result.outcome.splitlines()[0]}"


def listing(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table, with the verdict that each must get."""
    lines = ["| row | whose idiom | must be |", "|---|---|---|"]
    for row in rows:
        verdict = f"not run: {row.not_run}" if row.not_run else str(row.verdict)
        lines.append(f"| `{row.name}` | {_cell(row.about().rstrip('.'))} | {_cell(verdict)} |")
    return "\n".join(lines)


def with_listing(page: str, rows: Iterable[Row]) -> str:
    """The text of a page with the table of these rows in its place."""
    before, begin, rest = page.partition("<!-- idioms -->\n")
    _, end, after = rest.partition("<!-- end of idioms -->")
    if not begin or not end:
        raise ValueError("the page has no place for the rows: a line <!-- idioms -->, and <!-- end of idioms --> below")
    return f"{before}{begin}\n{listing(rows)}\n\n{end}{after}"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def summary(results: Iterable[Result]) -> str:
    """How many of each outcome."""
    counts = Counter(result.outcome.partition(":")[0].splitlines()[0] for result in results)
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
