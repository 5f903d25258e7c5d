"""Write docs/settings.md and docs/versions.md from the tables in the code: ``python docs/generate.py [--check]``."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.adapters.registry import ADAPTERS, tables
from holdfast.config import settings_markdown

HERE = Path(__file__).parent

SETTINGS_HEAD = """# Settings

A setting is taken from the argument of `holdfast.Run` (by name, or in `settings={…}`), else from the first of its
environment variables that is set and not empty, else from its default. All are read once, at the start; a value that
is not accepted ends the run there, with a message that names the variable, the value and what is accepted.

Durations are numbers of seconds or texts such as `90s`, `5m`, `1h30m`. Switches take `1`, `true`, `yes`, `on` and
`0`, `false`, `no`, `off`, in any case.

"""

SETTINGS_FOOT = """
Credentials for object storage are not settings of holdfast: they are read from the variables of the cloud itself, such
as `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION` and `AWS_ENDPOINT_URL`.

This page is generated: `make docs`.
"""

VERSIONS_HEAD = """# Versions

Each adapter has a patch table: every name of the framework that it replaces or reads. `holdfast doctor` checks the
table against the version that is installed. The contract tests check it against the oldest version, the one that the
whole test suite runs with, and the newest release.

| framework | adapter | oldest version | newest version that the suite runs with | names in the table |
|---|---|---|---|---|
"""

VERSIONS_FOOT = """
A version outside of this range works if all names are there. If one is missing, holdfast leaves the framework
untouched: training runs as without holdfast, unprotected, and one warning names what is missing, the installed version
and the tested range. With `HOLDFAST_ENABLED=require` training with that framework raises `UnprotectedError` instead,
and so does a training run that holdfast recognises and cannot protect for another reason, such as DeepSpeed, or
parameters that a script changes in place by their gradients, without `torch.optim`. A loop without `torch.optim` that
makes new parameters in each step is not recognised: it trains on, unprotected and unreported.

Python 3.11 or newer. This page is generated: `make docs`.
"""


def settings() -> str:
    return SETTINGS_HEAD + settings_markdown() + SETTINGS_FOOT


def versions() -> str:
    rows = [
        f"| {table.framework} | `{adapter.name}` | {table.oldest} | {table.newest} | {len(table.targets)} |"
        for adapter in ADAPTERS
        for table in tables(adapter.name)
        if table.framework != "python"
    ]
    return VERSIONS_HEAD + "\n".join(rows) + "\n" + VERSIONS_FOOT


PAGES = {"settings.md": settings, "versions.md": versions}


def main() -> int:
    wrong = 0
    for name, content in PAGES.items():
        page = HERE / name
        if "--check" not in sys.argv[1:]:
            page.write_text(content(), encoding="utf-8")
        elif not page.exists() or page.read_text(encoding="utf-8") != content():
            print(f"{name} is not what the code says; write it again with: make docs")
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main())
