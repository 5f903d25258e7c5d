"""Writes what the battery found as text and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.strangers.trial import Result


def line(result: Result) -> str:
    """One row, for the terminal."""
    mark = "ok  " if not result.problems else "FAIL"
    runs = f"{result.interruptions} interrupted, {result.attempts} attempts" if result.attempts else ""
    return f"{mark} {result.row.name:28} {result.seconds:6.1f} s  {runs:28} {result.outcome.splitlines()[0]}"


def table(results: Iterable[Result], title: str) -> str:
    """A Markdown table."""
    rows = [f"| {title} | whose idiom | result |", "|---|---|---|"]
    for result in results:
        outcome = result.outcome.splitlines()[0].replace("|", "\\|")
        rows.append(f"| `{result.row.name}` | {result.row.about().rstrip('.')} | {outcome} |")
    return "\n".join(rows)


def summary(results: Iterable[Result]) -> str:
    """How many of each outcome."""
    counts = Counter(result.outcome.partition(":")[0].splitlines()[0] for result in results)
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
