"""Write docs/settings.md from the table of settings: ``python docs/generate.py [--check]``."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.config import settings_markdown

PAGE = Path(__file__).with_name("settings.md")

HEAD = """# Settings

A setting is taken from the argument of `holdfast.Run` (by name, or in `settings={…}`), else from the first of its
environment variables that is set and not empty, else from its default. All are read once, at the start; a value that
is not accepted ends the run there, with a message that names the variable, the value and what is accepted.

Durations are numbers of seconds or texts such as `90s`, `5m`, `1h30m`. Switches take `1`, `true`, `yes`, `on` and
`0`, `false`, `no`, `off`, in any case.

"""

FOOT = """
Credentials for object storage are not settings of holdfast: they are read from the variables of the cloud itself, such
as `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION` and `AWS_ENDPOINT_URL`.

This page is generated: `make docs`.
"""


def main() -> int:
    content = HEAD + settings_markdown() + FOOT
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != content:
            print(f"{PAGE.name} is not what the table of settings says; write it again with: make docs")
            return 1
        return 0
    PAGE.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
