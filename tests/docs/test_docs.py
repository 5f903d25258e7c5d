"""What the README and the pages say works: their code runs, their sessions end as shown, their links lead somewhere."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, Block, blocks_of, commands_of, normal

LIMIT_S = 240


def having(test) -> list:
    """The pages with at least one such block, for parametrisation."""
    found = [page for page in PAGES if any(test(block) for block in blocks_of(page))]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in found]


def is_python(block: Block) -> bool:
    return block.language == "python" and block.is_run


def is_session(block: Block) -> bool:
    return block.language in ("console", "bash") and block.code.startswith("$ ") and block.is_run


@pytest.fixture
def folder(tmp_path) -> Path:
    """Where a reader of the page might be: a folder with the example."""
    (tmp_path / "examples").mkdir()
    for target in ("train.py", "examples/train.py"):
        shutil.copy(ROOT / "examples/train.py", tmp_path / target)
    return tmp_path


def environment() -> dict[str, str]:
    ours = ("HOLDFAST_", "CHECKPOINT_", "TRAINING_PROGRESS", "RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return {**kept, "PATH": path, "NO_COLOR": "1", "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}


class Session:
    """A program with its output in a file; what it started and left behind is killed at the end."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.log = folder / f"session-{len(list(folder.glob('session-*')))}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait(self) -> int:
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"does not end within {LIMIT_S} s:\n{self.output()}")
        finally:
            self.close()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM if self.process.poll() is None else signal.SIGKILL)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.mark.parametrize("page", having(is_python))
def test_the_code_of_a_page_runs(page: Path, folder: Path) -> None:
    """In order, in one process; lines of tracebacks are those of the page."""
    parts = []
    for block in filter(is_python, blocks_of(page)):
        if block.context is not None:
            parts.append(
                (f"context_{block.context}", (Path(__file__).parent / f"context_{block.context}.py").read_text())
            )
        parts.append((block.place, "\n" * (block.line - 1) + block.code))
    program = f"for place, code in {parts!r}:\n    exec(compile(code, place, 'exec'), globals())\n"
    (folder / "page.py").write_text(program, encoding="utf-8")
    session = Session([sys.executable, "page.py"], folder)
    assert session.wait() == 0, session.output()


def script_of(block: Block) -> str:
    """A shell script that runs the commands of a session and says of each how it ended."""
    lines = ["status() { return $1; }", "last=0"]
    for number, command in enumerate(commands_of(block)):
        lines += ["status $last", command.text, "last=$?", f'echo "<<{number} $last>>"']
    return "\n".join([*lines, "wait", ""])


def check(block: Block, session: Session, others: Sequence[Session] = ()) -> None:
    """Commands succeed unless the next one is `echo $?`; what is shown is printed, whatever its numbers."""
    session.wait()
    output = session.output()
    log = "\n---\n".join([output, *(other.output() for other in others)])
    ends = {int(number): int(code) for number, code in re.findall(r"<<(\d+) (\d+)>>", output)}
    printed = {normal(line) for line in output.splitlines()}
    commands = commands_of(block)
    for number, command in enumerate(commands):
        following = commands[number + 1] if number + 1 < len(commands) else None
        expected = int(following.shown[0]) if following and following.text == "echo $?" else 0
        assert ends.get(number) == expected, f"{block.place}: $ {command.text}\n{log}"
        for line in command.shown:
            shown = normal(line) in printed or line.strip() == "…"
            assert shown, f"{block.place}: $ {command.text}\ndoes not print: {line}\n{log}"


def wait_for_training(folder: Path, session: Session) -> None:
    """As a person would, before the next command."""
    until = time.monotonic() + LIMIT_S
    while session.process.poll() is None and time.monotonic() < until:
        if any('"training"' in journal.read_text() for journal in folder.rglob("journal.jsonl")):
            return
        time.sleep(0.1)
    pytest.fail(f"nothing trains:\n{session.output()}")


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("page", having(is_session))
def test_the_sessions_of_a_page_end_as_shown(page: Path, folder: Path) -> None:
    going_on: list[tuple[Block, Session]] = []
    try:
        for block in filter(is_session, blocks_of(page)):
            session = Session(["bash", "-c", script_of(block)], folder)
            if block.goes_on:
                going_on.append((block, session))
                wait_for_training(folder, session)
            else:
                check(block, session, [other for _, other in going_on])
        for block, session in going_on:
            check(block, session)
    finally:
        for _, session in going_on:
            session.close()


@pytest.mark.core
def test_blocks_are_of_kinds_that_are_known() -> None:
    kinds = {"python", "console", "bash", "sh", "text", "json", "yaml", "toml"}
    for page in PAGES:
        for block in blocks_of(page):
            assert block.language in kinds, f"{block.place}: ```{block.language}"
            if block.language in ("console", "bash"):
                assert block.code.startswith("$ "), f"{block.place}: a session begins with '$ '; else use ```sh"


@pytest.mark.core
def test_make_has_the_targets_that_the_pages_name() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"(?:^|`|\$ )make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"


@pytest.mark.core
def test_the_page_of_settings_is_the_table_in_the_code() -> None:
    command = [sys.executable, ROOT / "docs/generate.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.core(100)
@pytest.mark.parametrize(
    "page",
    [
        *PAGES,
        *sorted((ROOT / "design").glob("*.md")),
        *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_somewhere(page: Path) -> None:
    for match in _LINK.finditer(page.read_text(encoding="utf-8")):
        target, _, anchor = match["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{page.name}: {match['target']}"
        assert ROOT in [found, *found.parents], f"{page.name}: {match['target']} leaves the repository"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{page.name}: {match['target']}"
