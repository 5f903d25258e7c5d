"""The code in the pages: fenced blocks, and what the comment above a block says about it.

``<!-- not run: WHY -->``     the block is shown only
``<!-- context: NAME -->``    the code of tests/docs/context_NAME.py runs before the block
``<!-- meanwhile: WHAT -->``  the session goes on while those below it run, which begin once a run in it trains
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.kit import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\s*$")
_NOTE = re.compile(r"<!-- (?P<key>not run|context|meanwhile): (?P<value>.+?) -->")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    """Of the first line of its code."""
    language: str
    code: str
    note: tuple[str, str] | None = None

    @property
    def is_run(self) -> bool:
        return self.note is None or self.note[0] != "not run"

    @property
    def context(self) -> str | None:
        return self.note[1] if self.note is not None and self.note[0] == "context" else None

    @property
    def goes_on(self) -> bool:
        return self.note is not None and self.note[0] == "meanwhile"

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A line of a session after ``$ ``, and what the page shows below it."""

    text: str
    shown: tuple[str, ...]


def blocks_of(page: Path) -> list[Block]:
    blocks: list[Block] = []
    note: tuple[str, str] | None = None
    fence, begin, code = None, 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        match = _FENCE.match(line)
        if fence is None and match:
            fence, begin, code = match, number + 1, []
        elif fence is not None and line.strip() == "```":
            blocks.append(Block(page, begin, fence["language"], "\n".join(code) + "\n", note))
            fence, note = None, None
        elif fence is not None:
            code.append(line.removeprefix(fence["indent"]))
        elif found := _NOTE.search(line):
            note = (found["key"], found["value"])
        elif line.strip():
            note = None
    assert fence is None, f"{page.name}:{begin}: a block without an end"
    return blocks


def commands_of(block: Block) -> list[Command]:
    """A session's commands; a line that ends with a backslash goes on in the next."""
    commands: list[tuple[str, list[str]]] = []
    goes_on = False
    for line in block.code.splitlines():
        if goes_on:
            text, shown = commands.pop()
            commands.append((f"{text}\n{line.removeprefix('> ')}", shown))
        elif line.startswith("$ "):
            commands.append((line.removeprefix("$ "), []))
        elif commands and line.strip():
            commands[-1][1].append(line)
        goes_on = bool(commands) and commands[-1][0].endswith("\\")
    return [Command(text, tuple(shown)) for text, shown in commands]


_NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?")
_DIGEST = re.compile(r"\b(?=[a-z]*\d)[0-9a-f]{8,}\b")
_UNIT = re.compile(r"(?<=# )(?:min|h|d)\b|(?<=# )[KMGT]B\b")
_FOLDER = re.compile(r"(?<![\w.])/\S*/(?=holdfast-runs)")


def normal(line: str) -> str:
    """A line without what differs from run to run: numbers, digests, where the folder lies, widths of columns."""
    line = _NUMBER.sub("#", _DIGEST.sub("#", _FOLDER.sub("", line)))
    line = _UNIT.sub(lambda unit: "B" if unit[0].endswith("B") else "s", line)
    return " ".join(line.split())
