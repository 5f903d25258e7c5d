"""Replaces text in a script that takes no arguments: ``edit.py FILE OLD NEW [OLD NEW …]``; each OLD must be there."""

import sys
from pathlib import Path

if __name__ == "__main__":
    path, *texts = sys.argv[1:]
    content = Path(path).read_text(encoding="utf-8")
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        if old not in content:
            sys.exit(f"{path} does not contain {old!r}")
        content = content.replace(old, new)
    Path(path).write_text(content, encoding="utf-8")
