"""No script of a stranger is harmed; interrupted and resumed it fares as its row says."""

from __future__ import annotations

import pytest

from tests.kit import ROOT
from tests.strangers import report
from tests.strangers.launch import Launcher
from tests.strangers.table import ROWS
from tests.strangers.trial import Trial


@pytest.fixture(scope="module")
def launcher():
    launcher = Launcher()
    yield launcher
    launcher.close()


def _rows(*, slow: bool) -> list:
    return [pytest.param(row, id=row.name) for row in ROWS if row.slow == slow and not row.not_run]


@pytest.mark.core(4)
@pytest.mark.parametrize("row", _rows(slow=False))
def test_a_script_of_a_stranger(launcher, tmp_path, row):
    problems = Trial(launcher, row, tmp_path).run().problems
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.share(0)
@pytest.mark.parametrize("row", _rows(slow=True))
def test_a_script_of_a_stranger_that_takes_long(launcher, tmp_path, row):
    problems = Trial(launcher, row, tmp_path).run().problems
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.share(0)
@pytest.mark.parametrize("row", _rows(slow=False))
def test_a_script_that_is_interrupted_at_many_points(launcher, tmp_path, row):
    problems = Trial(launcher, row, tmp_path, seed=1, points=3).run().problems
    assert not problems, "\n".join(problems)


def test_every_row_says_whose_idiom_it_is():
    assert not [row.name for row in ROWS if not row.about()]


def test_the_page_lists_every_row():
    page = (ROOT / "docs" / "strangers.md").read_text(encoding="utf-8")
    assert report.with_listing(page, ROWS) == page, (
        "write it with: python -m tests.strangers --list --page docs/strangers.md"
    )
