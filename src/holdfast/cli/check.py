"""``holdfast check``: will this script resume exactly, and if not, which line is to be changed."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli import advice
from holdfast.cli.advice import Hint
from holdfast.cli.output import PROBLEM, USAGE, Json, emit, fail, guarded, human_seconds, note, say
from holdfast.errors import ConfigError
from holdfast.launch.likeness import (
    KINDS,
    PARAMETERS,
    Lines,
    Values,
    different,
    files_of,
    kind_of,
    newest,
    values_of,
)
from holdfast.launch.sandbox import Ended, Program, Sandbox
from holdfast.store.checkpoints import Checkpoint

HELP = """Run a script for a few steps, undisturbed and preempted, and compare what is left: will it resume exactly?

The script runs in copies of its folder, which are removed afterwards: twice up to a step, and once more with a
preemption before that step and a resume. Parameters, optimizer, random state, files and printed lines are compared.

Exit codes: 0 exact, 1 anything else, 2 wrong usage or setting."""

_REFUSES = re.compile(r"(?:^|: )([^:].*?)\. HOLDFAST_ENABLED=require refuses to train unprotected")
_ERROR = re.compile(r"^(?:holdfast\.errors\.)(\w+): (.*)$")
_ASTRAY = "the script does not go the way it went before: "
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Warning|Interrupt|Exit|Iteration)\b")
_TRACEBACK = "Traceback (most recent call last)"
_RANK = re.compile(r"^\[rank\d+\]: ?")
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)')

EXACT, NOT_EXACT, UNPROTECTED, REFUSED, UNKNOWN = "exact", "not exact", "unprotected", "refused", "not checked"


@dataclass(slots=True)
class Verdict:
    """What the command says."""

    verdict: str
    why: str = ""
    exact: bool = False
    step: int | None = None
    preempted_at: int | None = None
    differs: list[str] = field(default_factory=list)
    change: list[Hint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def line(self) -> str:
        return f"{self.verdict}: {self.why}" if self.why else self.verdict


@dataclass(slots=True)
class _Run:
    """What one run has left at its stop."""

    attempts: list[Ended]
    checkpoint: Checkpoint | None
    values: Values
    files: Values


@guarded
def check(
    program: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]…", help="The script and its arguments.")
    ] = None,
    module: Annotated[str | None, typer.Option("-m", "--module", help="Check a module instead of a script.")] = None,
    workers: Annotated[int | None, typer.Option("-n", "--workers", min=1, help="Ranks under torchrun.")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each run.")] = 20,
    seed: Annotated[int, typer.Option(help="Decides at which step the preemption comes.")] = 0,
    link: Annotated[
        list[str] | None, typer.Option(help="A file or folder that is linked instead of copied: it is only read.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that one run may take.")] = 300.0,
    as_json: Json = False,
) -> None:
    rest = list(program or [])
    if rest[:1] == ["--"]:
        del rest[0]
    if module is None and not rest:
        fail("give a script to check, or -m MODULE", "usage", USAGE, as_json=as_json)
    found = _program(rest, module, workers, link or [])
    folder = Path(tempfile.mkdtemp(prefix="holdfast-check-"))
    began = time.monotonic()
    try:
        verdict = _Check(found, folder, steps, seed, timeout, quiet=as_json).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    verdict.seconds = round(time.monotonic() - began, 1)
    if as_json:
        emit(dataclasses.asdict(verdict))
    else:
        _show(verdict)
    if not verdict.exact:
        raise typer.Exit(PROBLEM)


def _program(rest: list[str], module: str | None, workers: int | None, links: Sequence[str]) -> Program:
    here = Path.cwd()
    for name in links:
        if not (here / name).exists() or not (here / name).resolve().is_relative_to(here.resolve()):
            raise ConfigError(f"--link {name!r} is not accepted; it must be a name in {here}")
    if module is not None:
        return Program(here, ["-m", module, *rest], workers, links)
    script = Path(rest[0])
    if not script.is_file():
        raise ConfigError(f"the script {rest[0]!r} does not exist in {here}")
    if script.resolve().is_relative_to(here.resolve()):
        return Program(here.resolve(), [str(script.resolve().relative_to(here.resolve())), *rest[1:]], workers, links)
    return Program(script.resolve().parent, [script.name, *rest[1:]], workers, links)


class _Check:
    """The runs, one after the other, and what follows from them."""

    def __init__(self, program: Program, folder: Path, steps: int, seed: int, limit_s: float, *, quiet: bool) -> None:
        self._program, self._folder, self._steps, self._seed = program, folder, steps, seed
        self._limit_s, self._quiet = limit_s, quiet
        self._notes: list[str] = []

    def run(self) -> Verdict:
        verdict = self._verdict()
        verdict.notes += self._notes
        return verdict

    def _verdict(self) -> Verdict:
        first = self._undisturbed("first", f"run 1 of 3: up to step {self._steps}")
        if first.checkpoint is None:
            return self._without_checkpoint(first.attempts[0])
        step = first.checkpoint.step
        if (error := self._error(first.attempts[0])) is not None:
            return Verdict(UNKNOWN, f"the script fails by itself after {step} optimizer steps: {error}")
        if step < 2:
            return Verdict(UNKNOWN, f"the script ends after {step} optimizer steps")
        second = self._undisturbed("second", "run 2 of 3: the same again, to see what differs by itself")
        pairs = zip(first.attempts[0].printed, second.attempts[0].printed, strict=True)
        lines = [Lines(one, other) for one, other in pairs]
        if (unlike := self._by_itself(first, second, lines)) is not None:
            return unlike
        noise = set(different(first.values, second.values, set()))
        at = random.Random(self._seed).randint(max(1, step // 4), max(1, step * 3 // 4))
        third = self._preempted(at)
        return self._compare(first, third, lines, noise, set(different(first.files, second.files, set())), at)

    # ------------------------------------------------------------------ runs

    def _undisturbed(self, name: str, what: str) -> _Run:
        box = Sandbox(self._program, self._folder / name)
        if not self._notes:
            self._notes = [f"{link} is linked: what the script writes there is real" for link in box.linked]
            self._notes += [
                f"the argument {argument} is outside of {self._program.root}: what the script writes there is real"
                for argument in self._program.arguments
                if os.path.isabs(argument) and not argument.startswith(str(self._program.root))
            ]
        return self._left(box, [self._attempt(box, self._steps, what)])

    def _preempted(self, at: int) -> _Run:
        box = Sandbox(self._program, self._folder / "third")
        attempts = [self._attempt(box, at, f"run 3 of 3: preempted at step {at}")]
        if newest(self._locations(box)) is not None:
            attempts.append(self._attempt(box, self._steps, f"             and resumed up to step {self._steps}"))
        return self._left(box, attempts)

    def _attempt(self, box: Sandbox, stop_at: int, what: str) -> Ended:
        ended = box.run(stop_at, self._limit_s)
        if not self._quiet:
            note(f"{what}, {human_seconds(ended.seconds)}")
        return ended

    def _left(self, box: Sandbox, attempts: list[Ended]) -> _Run:
        checkpoint = newest(self._locations(box))
        values = values_of(checkpoint, box.plain) if checkpoint is not None else {}
        return _Run(attempts, checkpoint, values, files_of(box.work, box.plain))

    @staticmethod
    def _locations(box: Sandbox) -> list[Path]:
        """Where checkpoints may be: a script may name a place itself."""
        return [box.checkpoints, *sorted(path.parent for path in box.work.rglob(".holdfast") if path.is_dir())]

    # ------------------------------------------------------------------ verdicts

    def _without_checkpoint(self, ended: Ended) -> Verdict:
        text = "\n".join(ended.errors)
        if match := _REFUSES.search(text):
            return Verdict(UNPROTECTED, match[1].strip(), change=self._hints(()))
        for line in reversed(ended.errors):
            if match := _ERROR.match(line):
                return Verdict(REFUSED, match[2])
        if ended.code is None:
            why = f"no step {self._steps} in {self._limit_s:.0f} s: give fewer --steps or a longer --timeout"
            return Verdict(UNKNOWN, why)
        if ended.code:
            last = self._error(ended) or next(
                (line for line in reversed(ended.errors) if line.strip()), f"exit code {ended.code}"
            )
            return Verdict(UNKNOWN, f"the script fails in a copy of its folder: {last}")
        return Verdict(UNPROTECTED, "the script ends without an optimizer step that holdfast has seen")

    @staticmethod
    def _error(ended: Ended) -> str | None:
        """The error that has ended a run; None if it ended as it was told to."""
        if ended.code in (None, 0, 143) or not any(_TRACEBACK in line for line in ended.errors):
            return None
        plain = [_RANK.sub("", line) for line in ended.errors if line.strip()]
        return next((line for line in reversed(plain) if _EXCEPTION.match(line)), plain[-1])

    def _by_itself(self, first: _Run, second: _Run, lines: list[Lines]) -> Verdict | None:
        """What is not the same in two undisturbed runs, where that is more than times and names."""
        assert first.checkpoint is not None
        step = first.checkpoint.step
        if second.checkpoint is None or second.checkpoint.step != step:
            other = second.checkpoint.step if second.checkpoint is not None else "no step"
            why = f"the script is not deterministic by itself: it stopped at step {step}, and then at {other}"
            return Verdict(NOT_EXACT, why, step=step, change=self._hints(self._decisions()))
        places = [place for place in different(first.values, second.values, set()) if kind_of(place) == PARAMETERS]
        if places or not all(rank.same_number for rank in lines):
            why = "two undisturbed runs of the script do not give the same result"
            what = [f"parameters: {len(places)} values, {places[0]} first"] if places else ["the number of its lines"]
            hints = [*self._seeds(), *self._unlike(), *self._decisions()]
            return Verdict(NOT_EXACT, why, step=step, differs=what, change=self._hints(hints))
        return None

    def _compare(
        self, first: _Run, third: _Run, lines: list[Lines], noise: set[str], noisy_files: set[str], at: int
    ) -> Verdict:
        assert first.checkpoint is not None
        step = first.checkpoint.step
        verdict = Verdict(NOT_EXACT, step=step, preempted_at=at)
        resumed = third.attempts[-1]
        if third.checkpoint is None or len(third.attempts) < 2:
            verdict.why = f"the preemption at step {at} left no checkpoint"
            verdict.differs = [line for line in third.attempts[0].errors if line.strip()][-3:]
            return verdict
        failed = self._failure(resumed)
        if failed or third.checkpoint.step != step:
            verdict.why = failed or f"it came to step {third.checkpoint.step} after the resume, and to {step} before"
            verdict.change = self._hints([*self._where(resumed), *self._decisions()])
            return verdict
        places = different(first.values, third.values, noise)
        for kind in KINDS:
            of_kind = [place for place in places if kind_of(place) == kind]
            if of_kind:
                verdict.differs.append(f"{kind}: {len(of_kind)} values, {of_kind[0]} first")
        by_rank = [rank.difference([attempt.printed[n] for attempt in third.attempts]) for n, rank in enumerate(lines)]
        line = next(filter(None, by_rank), "")
        files = different(first.files, third.files, noisy_files)
        if verdict.differs:
            verdict.why = f"after a resume at step {at} the state of step {step} is another"
            verdict.change = self._hints(self._decisions())
        elif line:
            verdict.verdict, verdict.why = "exact but for printed lines", line
            verdict.change = self._hints(self._decisions())
        elif files:
            verdict.verdict, verdict.why = "exact but for files", ", ".join(files[:5])
        else:
            verdict.verdict, verdict.exact = EXACT, True
            verdict.why = f"preempted at step {at} and resumed, step {step} is the same to the last bit"
        return verdict

    @staticmethod
    def _failure(ended: Ended) -> str:
        """Why a resumed attempt came to no checkpoint."""
        text = next((line for line in reversed(ended.errors) if _ASTRAY in line), None)
        if text is not None:
            return text[text.index(_ASTRAY) :].split(". Nothing is lost")[0]
        for line in reversed(ended.errors):
            if (match := _ERROR.match(line)) and match[1] != "Preempted":
                return match[2]
        if ended.code is None:
            return "the resumed run took too long"
        traceback = any(line.startswith("Traceback") for line in ended.errors)
        last = next((line for line in reversed(ended.errors) if line.strip()), "")
        return f"the script fails after the resume: {last}" if traceback and ended.code not in (0, 143) else ""

    # ------------------------------------------------------------------ hints

    def _scripts(self) -> list[tuple[Path, str]]:
        """The files of the user's that may decide: the script, and what it imports from beside it."""
        root, arguments = self._program.root, self._program.arguments
        if arguments[0] == "-m":
            base = root.joinpath(*arguments[1].split("."))
            script = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__main__.py"
        else:
            script = root / arguments[0]
        return [(path, str(path.relative_to(root))) for path in advice.imported(script) if path.is_file()]

    def _decisions(self) -> list[Hint]:
        return [hint for path, name in self._scripts() for hint in advice.decisions(path, name)]

    def _unlike(self) -> list[Hint]:
        return [hint for path, name in self._scripts() for hint in advice.unlike(path, name)]

    def _seeds(self) -> list[Hint]:
        return [hint for path, name in self._scripts()[:1] for hint in advice.seeds_missing(path, name)]

    def _where(self, ended: Ended) -> list[Hint]:
        """The line of the script at which a replay noticed that it had gone another way."""
        names = {str(path): name for path, name in self._scripts()}
        for line in reversed(ended.errors):
            match = _FRAME.match(line)
            if match and match[1] in names:
                source = Path(match[1]).read_text().splitlines()[int(match[2]) - 1].strip()
                return [Hint(names[match[1]], int(match[2]), source, "here the resumed run was noticed to differ")]
        return []

    @staticmethod
    def _hints(hints: Sequence[Hint]) -> list[Hint]:
        unique = {(hint.file, hint.line): hint for hint in hints}
        return list(unique.values())[:8]


def _show(verdict: Verdict) -> None:
    colour = "green" if verdict.exact else "red"
    typer.echo(typer.style(verdict.line(), fg=colour, bold=True))
    for what in verdict.differs:
        say(f"  differs: {what}")
    for hint in verdict.change:
        say(f"  {hint}")
    for what in verdict.notes:
        note(what)
