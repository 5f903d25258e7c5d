"""One row: off, on, and interrupted at a seeded point until it ends, each in a folder of its own, then compared."""

from __future__ import annotations

import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.strangers.compare import Text, files_differ, lines_differ, resumed_lines_differ
from tests.strangers.launch import Attempt, Ended, Launcher, clean_environment
from tests.strangers.rows import Row, Verdict

SLOTS = 1024  # of strangers_interrupt
LEFT = (143, -15)
"""Codes with which a process ends that was told to."""
BROKEN_OFF = (1, 130, -2)
"""And after SIGINT."""


@dataclass
class Result:
    """How a row fared."""

    row: Row
    harm: list[str] = field(default_factory=list)
    """What differs with holdfast on and nothing happening."""
    wrong: list[str] = field(default_factory=list)
    """What is not as its verdict wants it, after an interruption."""
    seconds: float = 0.0
    attempts: int = 0
    """Of all interrupted runs together."""
    interruptions: int = 0
    said: list[str] = field(default_factory=list)
    """What holdfast wrote."""

    @property
    def problems(self) -> list[str]:
        return [f"harmed: {text}" for text in self.harm] + self.wrong

    @property
    def outcome(self) -> str:
        """A cell of the table."""
        if self.row.not_run:
            return f"not run: {self.row.not_run}"
        if self.harm:
            return "harmed: " + self.harm[0]
        return "fails: " + self.wrong[0] if self.wrong else str(self.row.verdict)


class Trial:
    """Runs one row below ``folder``."""

    def __init__(self, launcher: Launcher, row: Row, folder: Path, *, seed: int = 0, points: int = 1) -> None:
        self._launcher, self._row, self._folder = launcher, row, folder
        self._seed, self._points = seed, points
        self._text = Text(row.ignore, row.lines, row.leave_out)
        self.result = Result(row)

    def run(self) -> Result:
        """All of it."""
        off, on = self._begin("off", enabled=False), self._begin("on")
        expected, found = (self._end(attempt) for attempt in (off, on))
        if expected.hung or any(code != self._row.code for code in expected.codes):
            raise RuntimeError(f"{self._row.name} does not run by itself: {expected.codes}\n{expected.errors[-3000:]}")
        steps = _count(self._folder / "off.steps")
        self._undisturbed(expected, found)
        for number in range(self._points):
            self._interrupted(number, steps, expected)
        return self.result

    # ------------------------------------------------------------------ runs

    def _begin(self, name: str, *, enabled: bool = True, attempt: int = 1, point: str = "") -> Attempt:
        work = self._folder / name
        if attempt == 1:
            self._prepare(work)
        elif any(work.rglob("*tfevents*")):
            time.sleep(1 - time.time() % 1)  # TensorBoard names its files by the second; no restart is that fast
        logs = self._folder / f"{name}.logs-{attempt}"
        logs.mkdir()
        counter = self._folder / f"{name}.steps"
        counter.write_bytes(bytes(SLOTS * 4))
        env = {
            "HOLDFAST_ENABLED": str(int(enabled)),
            "HOLDFAST_KILL_WAIT": "0",
            **self._row.env,
            "STRANGERS_COUNTER": str(counter),
            "STRANGERS_FOLDER": str(work / self._row.folder),
            "STRANGERS_POINT": point,
        }
        if self._row.seed:
            env["STRANGERS_SEED"] = str(1 if self._row.verdict is Verdict.UNPROTECTED else attempt)
        return self._launcher.start(self._row, work / self._row.folder, logs, env)

    def _prepare(self, work: Path) -> None:
        if not self._row.prepare:
            self._fill(work)
            return
        start = self._folder / "start"
        if not start.exists():
            self._fill(start)
            for command in self._row.prepare:
                self._make_data(command, start / self._row.folder)
        shutil.copytree(start, work, symlinks=True)

    def _fill(self, work: Path) -> None:
        if self._row.copy is not None:
            shutil.copytree(self._row.copy, work, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        work.mkdir(parents=True, exist_ok=True)
        if self._row.script is not None:
            shutil.copy(self._row.script, work)

    def _make_data(self, command: tuple[str, ...], folder: Path) -> None:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env={**clean_environment(), "HOLDFAST_ENABLED": "0"},
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} ends with {done.returncode}\n{done.stderr[-3000:]}")

    def _end(self, attempt: Attempt) -> Ended:
        ended = attempt.wait()
        self.result.seconds += ended.seconds
        return ended

    # ------------------------------------------------------------------ nothing happens

    def _undisturbed(self, expected: Ended, found: Ended) -> None:
        row, harm = self._row, self.result.harm
        off, on = self._folder / "off", self._folder / "on"
        if found.hung:
            harm.append(f"it hangs\n{found.errors[-3000:]}")
            return
        if found.codes != expected.codes:
            harm.append(f"exit code {found.codes} instead of {expected.codes}\n{found.errors[-3000:]}")
        if found.orphans:
            harm.append("it leaves processes behind")
        for rank, (one, other) in enumerate(zip(expected.printed, found.printed, strict=True)):
            lines = [self._text.all(lines, folder) for lines, folder in ((one, off), (other, on))]
            if row.unordered:
                lines = [sorted(each) for each in lines]
            difference = lines_differ(*lines)
            if difference:
                harm.append(f"standard output{f' of rank {rank}' if row.world > 1 else ''}, {difference}")
        harm += files_differ(off, on, self._text, row.ignore_files)
        more = _more(self._errors(expected, off), self._errors(found, on))
        self.result.said += more
        if row.verdict is Verdict.UNPROTECTED:
            self._must_say(more)
            more = [line for line in more if not re.search(row.says, line)]
        if more and not row.errors_differ:
            harm.append(f"standard error: {more[0]!r}")

    def _errors(self, ended: Ended, folder: Path) -> list[str]:
        return [self._text.line(line, folder) for line in ended.errors.splitlines()]

    def _must_say(self, lines: list[str]) -> None:
        if not any(re.search(self._row.says, line) for line in lines):
            self.result.wrong.append(f"it does not say {self._row.says!r}, but {lines}")

    # ------------------------------------------------------------------ interrupted

    def _interrupted(self, number: int, steps: int, expected: Ended) -> None:
        row, result = self._row, self.result
        name = f"interrupted-{number}"
        point = "" if row.at_line else self._point(number, steps)
        attempts: list[Ended] = []
        attempt = self._begin(name, point=point)
        if row.at_line:
            attempt.send_at(row.at_line, signal.SIGTERM, to=row.worker)
        attempts.append(self._end(attempt))
        where = f"interrupted at {row.at_line or point}"
        while self._goes_on(attempts):
            attempts.append(self._end(self._begin(name, attempt=len(attempts) + 1)))
        result.attempts += len(attempts)
        result.interruptions += len(attempts) > 1 or bool(row.worker)
        log = "".join(f"\n--- attempt {n + 1}: {each.codes}\n{each.errors[-2500:]}" for n, each in enumerate(attempts))
        problems = self._judge(self._folder / name, expected, attempts)
        result.wrong += [f"{where}: {problem}" for problem in problems]
        if problems:
            result.wrong[-1] += log

    def _point(self, number: int, steps: int) -> str:
        if steps < 4:
            raise RuntimeError(f"{self._row.name} has {steps} optimizer steps: say at which line it is interrupted")
        row = self._row
        draw = random.Random(f"{self._seed} {row.name} {number}")
        low, high = row.steps
        at = max(1, min(steps - 1, round(steps * draw.uniform(low, high))))
        if row.kill_rank is not None:
            return f"{at}:{draw.choice(('before', 'after'))}:KILL:{row.kill_rank}"
        action = "SELF" if row.worker else "INT" if row.ctrl_c else "TERM"
        return f"{at}:{draw.choice(('before', 'after'))}:{action}:"

    def _over(self, ended: Ended) -> bool:
        return all(code == self._row.code for code in ended.codes)

    def _goes_on(self, attempts: list[Ended]) -> bool:
        """Whether the same command is started again."""
        last = attempts[-1]
        if last.hung or self._over(last) or len(attempts) == self._row.attempts:
            return False
        return len(attempts) == 1 or set(last.codes) <= {*LEFT, self._row.code}

    def _judge(self, work: Path, expected: Ended, attempts: list[Ended]) -> list[str]:
        row, off, last = self._row, self._folder / "off", attempts[-1]
        if any(each.hung for each in attempts):
            return ["it hangs"]
        if len(attempts) == 1 and not row.worker:
            return ["it was not interrupted"]
        if not self._over(last):
            return [f"it does not end with {row.code}: {[each.codes for each in attempts]}"]
        problems = []
        if row.kill_rank is None and not row.worker:
            left = attempts[0].codes
            problems += [] if set(left) <= {*(BROKEN_OFF if row.ctrl_c else LEFT)} else [f"it left with {left}"]
        problems += ["processes outlived it" for each in attempts if each.orphans]
        differences = []
        for rank in range(len(expected.printed)):
            want = self._text.evidence(expected.printed[rank], off)
            lines = [self._text.evidence(each.printed[rank], work) for each in attempts]
            differences.append(self._lines_differ(want, lines))
        differences += files_differ(off, work, self._text, row.ignore_files, more=row.more_files)
        resumed = any(re.search(row.resumes, each.text) for each in attempts[not row.worker :])
        if row.verdict is not Verdict.UNPROTECTED and not resumed:
            problems.append("it did not resume, but began anew")
        differences = [text for text in differences if text]
        if row.verdict is not Verdict.INEXACT:
            return problems + differences
        said = [line for each in attempts for line in each.text.splitlines() if re.search(row.says, line)]
        return problems + ([] if said else [f"it is inexact and does not say {row.says!r}", *differences])

    def _lines_differ(self, want: list[str], attempts: list[list[str]]) -> str:
        if self._row.verdict is Verdict.UNPROTECTED:
            attempts = attempts[-1:]
        if self._row.unordered:
            # Without an order, a replay shows as more of a line than there was, never as another line.
            missing = Counter(want) - sum((Counter(lines) for lines in attempts), Counter())
            strange = [line for lines in attempts for line in lines if line not in set(want)]
            texts = [f"{line!r} is missing" for line in missing] + [f"{line!r} is printed" for line in strange]
            return texts[0] if texts else ""
        return resumed_lines_differ(want, attempts)


def _count(file: Path) -> int:
    data = file.read_bytes()
    return sum(memoryview(data).cast("I")[1:])


def _more(ones: list[str], others: list[str]) -> list[str]:
    """Lines of the second list that the first one lacks."""
    left = Counter(ones)
    more = []
    for line in others:
        if left[line]:
            left[line] -= 1
        else:
            more.append(line)
    return more
