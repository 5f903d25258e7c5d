"""``python -m holdfast.cli.noted FILE ARGUMENTS``: the command, which leaves its exit code in FILE.

For whoever starts it and may not be there when it ends.
"""

from __future__ import annotations

import contextlib
import os
import sys

from holdfast.cli.main import app


def main(path: str, arguments: list[str]) -> None:
    code: object = 1
    try:
        app(arguments)
    except SystemExit as leaving:
        code = leaving.code or 0
        raise
    finally:
        with contextlib.suppress(OSError):
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                file.write(str(code if isinstance(code, int) else 1))
            os.replace(f"{path}.new", path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
