"""The commands in the documents of examples/parallel-training, in sessions and in sentences."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from tests.unit.minikube.stage import ROOT

EXAMPLE = ROOT / "examples/parallel-training"
DOCUMENTS = sorted(EXAMPLE.glob("*.md"))
PROGRAMS = ("make", "python", "kubectl", "minikube", "helm", "holdfast", ".", "cd")
_ASSIGNMENT = re.compile(r"^[A-Z][A-Z0-9_]*=")


@dataclass(frozen=True)
class Command:
    place: str
    variables: dict[str, str]
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        return self.words[0]

    @property
    def text(self) -> str:
        return shlex.join(self.words)


def parsed(place: str, text: str) -> Command | None:
    """A command of a program or script that is known here; None for other text."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return None
    variables = {}
    while words and _ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if not words or not (words[0] in PROGRAMS or (words[0].endswith(".sh") and "/" in words[0])) or "…" in text:
        return None
    return Command(place, variables, tuple(words))


def sessions(document: Path) -> list[tuple[str, str]]:
    """Place and text of each line after ``$ `` in a block, and of all lines in one of ``sh``.

    A line that ends with a backslash goes on in the next.
    """
    found: list[tuple[str, str]] = []
    block, script, goes_on = False, False, False
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        bare = line.strip()
        if bare.startswith("```"):
            block, script = not block, bare == "```sh"
        elif block and goes_on:
            place, text = found.pop()
            found.append((place, f"{text.removesuffix(chr(92))} {bare}"))
        elif block and bare and (script or bare.startswith("$ ")):
            found.append((f"{document.name}:{number}", bare.removeprefix("$ ")))
        else:
            continue
        goes_on = block and bare.endswith("\\")
    return found


def in_sentences(document: Path) -> list[tuple[str, str]]:
    """Place and text of what stands in backticks."""
    text = re.sub(
        r"^ *```.*?^ *```", lambda block: "\n" * block[0].count("\n"), document.read_text(), flags=re.M | re.S
    )
    return [
        (f"{document.name}:{number}", match)
        for number, line in enumerate(text.splitlines(), 1)
        for match in re.findall(r"`([^`]+)`", line)
    ]


def commands() -> list[Command]:
    found = []
    for document in DOCUMENTS:
        folder = ""
        for place, text in sessions(document):
            command = parsed(place, text)
            assert command is not None, f"{place}: who knows this command? $ {text}"
            if command.program == "cd":
                folder = f"{command.words[1]}/"
            elif command.program == "python":
                command = replace(command, words=("python", f"{folder}{command.words[1]}", *command.words[2:]))
            found.append(command)
        found += [command for place, text in in_sentences(document) if (command := parsed(place, text)) is not None]
    return [command for command in found if len(command.words) > 1 or command.program not in PROGRAMS]
