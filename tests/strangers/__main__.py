"""``python -m tests.strangers [NAME …]``: run rows of the battery, by the beginnings of their names."""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from pathlib import Path

from tests.strangers import report
from tests.strangers.launch import Launcher
from tests.strangers.rows import Row
from tests.strangers.table import ROWS
from tests.strangers.trial import Result, Trial


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.strangers", description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of names of rows; none: all rows")
    parser.add_argument("--points", type=int, default=1, help="interruptions of each row")
    parser.add_argument("--seed", type=int, default=0, help="of the points at which a row is interrupted")
    parser.add_argument("--keep", type=Path, help="a folder in which everything stays that the runs leave")
    parser.add_argument("--verbose", action="store_true", help="all of what is wrong, with the end of each log")
    parser.add_argument("--list", action="store_true", help="run nothing; print the rows as a Markdown table")
    parser.add_argument("--page", type=Path, help="with --list: write the table of all rows into its place in a page")
    chosen = parser.parse_args()
    rows = [row for row in ROWS if not chosen.names or row.name.startswith(tuple(chosen.names))]
    if chosen.list and chosen.page:
        chosen.page.write_text(report.with_listing(chosen.page.read_text(encoding="utf-8"), ROWS), encoding="utf-8")
        return 0
    if chosen.list:
        print(report.listing(rows))
        return 0
    results = list(run(rows, chosen))
    print(f"\n{report.summary(results)}; {sum(result.seconds for result in results):.0f} s in all runs together")
    return any(result.problems for result in results)


def run(rows: list[Row], chosen: argparse.Namespace) -> list[Result]:
    """Run these rows one after the other and print a line for each."""
    launcher, results = Launcher(), []
    with tempfile.TemporaryDirectory(prefix="strangers-", ignore_cleanup_errors=True) as scratch:
        for row in rows:
            result = Result(row)
            if not row.not_run:
                folder = (chosen.keep or Path(scratch)) / row.name
                folder.mkdir(parents=True)
                trial = Trial(launcher, row, folder, seed=chosen.seed, points=chosen.points)
                try:
                    result = trial.run()
                except Exception as error:
                    result = trial.result
                    result.wrong.append(f"{type(error).__name__}: {error}")
                    if chosen.verbose:
                        traceback.print_exc()
            print(report.line(result), flush=True)
            if chosen.verbose and result.problems:
                print("\n".join(result.problems), flush=True)
            results.append(result)
    launcher.close()
    return results


if __name__ == "__main__":
    sys.exit(main())
