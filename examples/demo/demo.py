"""``make demo``: one training twice, undisturbed and with a preemption, a kill and a pause on the way.

Both are started with ``holdfast run -n 2``, and disturbed with ``holdfast preempt``, ``pause`` and ``resume``: what
a person would type. At the end the two must agree in every bit. The exit code is 0 only if everything that is
promised was kept.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from picture import paint
from record import Record, differing_tensors, read_steps

SCRIPT = Path(__file__).with_name("shapes.py")
HOLDFAST = [sys.executable, "-m", "holdfast.cli"]
KILL_WAIT_S = 0.3
GRACE_S = 20
PAUSE_S = 2.0
EPOCHS, IMAGES, BATCH, WORKERS = 8, 3072, 32, 2
STEPS = EPOCHS * (IMAGES // WORKERS // BATCH)
LIMIT_S = 600.0


class BrokenPromiseError(Exception):
    """Something did not go as promised. The message says what."""


def require(kept: bool, promise: str) -> None:
    if not kept:
        raise BrokenPromiseError(promise)


@dataclasses.dataclass(frozen=True)
class Act:
    """Something that happens to the run once it has come to a step."""

    step: int
    title: str
    commands: tuple[tuple[str, ...], ...]
    """Arguments of ``holdfast``, one after the other, with a pause between them."""


ACTS = (
    Act(STEPS // 4, "SIGTERM to rank 1", (("preempt", "--rank", "1"),)),
    Act(STEPS // 2, "SIGKILL to rank 0", (("preempt", "--rank", "0", "--signal", "KILL"),)),
    Act(STEPS * 3 // 4, "pause, then resume", (("pause",), ("resume",))),
)


class Demo:
    """Runs trainings one after the other and shows how they go."""

    def __init__(self, out: Path, console: Console) -> None:
        self.out = out
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=36),
            TaskProgressColumn(),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[note]}"),
            console=console,
        )

    def say(self, text: str, style: str = "") -> None:
        self.bar.console.print(text, style=style, highlight=False, soft_wrap=True)

    def train(self, name: str, title: str, acts: tuple[Act, ...] = ()) -> Record:
        """One training from its start to its end."""
        folder, losses = self.out / name, self.out / f"{name}.losses"
        task = self.bar.add_task(title, total=STEPS, note="starting")
        with self._launched(name, folder, losses) as launcher:
            stage = threading.Thread(target=self._perform, args=(acts, folder, losses, launcher), daemon=True)
            stage.start()
            until = time.monotonic() + LIMIT_S
            while launcher.poll() is None:
                require(time.monotonic() < until, f"{title} does not end; see {self.out / name}.log")
                steps = read_steps(losses)
                if steps:
                    last = max(steps)
                    self.bar.update(task, completed=last, note=f"loss {steps[last].loss:.3f}")
                time.sleep(0.1)
            stage.join(5.0)
        require(launcher.returncode == 0, f"{title} ended with {launcher.returncode}; see {self.out / name}.log")
        steps = read_steps(losses)
        self.bar.update(task, completed=max(steps), note=f"loss {steps[max(steps)].loss:.3f}")
        return Record(folder, steps)

    @contextlib.contextmanager
    def _launched(self, name: str, folder: Path, losses: Path) -> Iterator[subprocess.Popen[str]]:
        options = ["-n", str(WORKERS), "--json", "--dir", str(folder)]
        options += ["--kill-wait", str(KILL_WAIT_S), "--grace", str(GRACE_S)]
        shape = ["--epochs", str(EPOCHS), "--images", str(IMAGES), "--batch-size", str(BATCH)]
        command = [*HOLDFAST, "run", *options, str(SCRIPT), *shape, "--losses", str(losses)]
        with open(self.out / f"{name}.log", "w", encoding="utf-8") as log:
            launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            assert launcher.stdout is not None
            teller = threading.Thread(target=self._tell, args=(launcher.stdout,), daemon=True)
            teller.start()
            try:
                yield launcher
            finally:
                if launcher.poll() is None:
                    launcher.send_signal(signal.SIGTERM)  # it saves, and takes all that it started with it
                launcher.wait()
                teller.join(5.0)

    def _tell(self, lines: Any) -> None:
        """What the launcher says."""
        for line in lines:
            with contextlib.suppress(ValueError):
                self.say(f"    holdfast: {json.loads(line)['message']}", style="cyan")

    def _perform(self, acts: tuple[Act, ...], folder: Path, losses: Path, launcher: subprocess.Popen[str]) -> None:
        for act in acts:
            while max(read_steps(losses), default=0) < act.step:
                if launcher.poll() is not None:
                    return
                time.sleep(0.05)
            self.say(f"  [bold yellow]{act.title}[/bold yellow]")
            for number, command in enumerate(act.commands):
                if number:
                    time.sleep(PAUSE_S)
                subprocess.run([*HOLDFAST, *command, str(folder), "--json"], stdout=subprocess.DEVNULL, check=False)


def compare(reference: Record, run: Record) -> list[str]:
    """Every bit of the two ends, and of the way there."""
    said = []
    for path, what in (("model.safetensors", "parameters"), ("optimizer.safetensors", "optimizer state")):
        ours, theirs = reference.tensors(path), run.tensors(path)
        differing = differing_tensors(ours, theirs)
        require(not differing, f"{what}: {len(differing)} tensors differ, such as {differing[:3]}")
        numbers = sum(int(tensor.size) for tensor in ours.values())
        said.append(f"{what}: {numbers:,} numbers in {len(ours)} tensors, equal bit for bit")
    require(sorted(run.steps) == list(range(1, STEPS + 1)), "not every step was trained")
    unequal = [step for step in run.steps if run.steps[step].loss != reference.steps[step].loss]
    require(not unequal, f"the losses of {len(unequal)} steps differ, the first at step {min(unequal, default=0)}")
    said.append(f"losses: {STEPS} steps, equal bit for bit")
    return said


def check(record: Record) -> list[dict[str, Any]]:
    """The interruptions, if each was survived as promised."""
    interruptions = record.interruptions()
    found = [entry["what"] for entry in interruptions]
    require(found == ["preempted", "rescued", "paused"], f"the journal tells of {found}")
    preempted, rescued, paused = interruptions
    require(preempted["steps_lost"] == 0, f"{preempted['steps_lost']} steps were lost to SIGTERM")
    require(rescued["steps_lost"] <= 1, f"{rescued['steps_lost']} steps were lost to SIGKILL")
    require(paused["steps_lost"] == 0, f"{paused['steps_lost']} steps were lost to the pause")
    for entry in (preempted, paused):
        require(entry["notice_to_commit_s"] is not None, f"{entry['what']}: nothing was committed")
        require(entry["notice_to_commit_s"] < GRACE_S, f"{entry['what']}: the commit came after the deadline")
    verified = subprocess.run([*HOLDFAST, "verify", str(record.folder), "--json"], capture_output=True, check=False)
    require(verified.returncode == 0, "holdfast verify found something that is not whole")
    return interruptions


def show(console: Console, interruptions: list[dict[str, Any]], record: Record) -> None:
    table = Table(title="What happened", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("", "at step", "steps lost", "notice to commit", "to resume"):
        table.add_column(heading, justify="left" if not heading else "right")

    def seconds(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f} s"

    for act, entry in zip(ACTS, interruptions, strict=True):
        commit = seconds(entry["notice_to_commit_s"]) if entry["what"] != "rescued" else "no notice"
        table.add_row(act.title, str(entry["step"]), str(entry["steps_lost"]), commit, seconds(entry["resume_s"]))
    console.print()
    console.print(table)
    console.print(f"notice to commit includes kill_wait, here {KILL_WAIT_S} s (3 s if nothing is set)", style="dim")
    account = record.goodput()
    console.print(
        f"\n[bold]Goodput[/bold] {account.ratio:.0%} of {account.total_s:.0f} s: trained {account.useful_s:.1f} s, "
        f"start {account.startup_s:.1f} s, restarts {account.lost_restart_s:.1f} s, "
        f"repeated {account.lost_replay_s:.1f} s, "
        f"stalls {account.lost_stall_s:.2f} s; paused {account.lost_idle_s:.1f} s",
        highlight=False,
        soft_wrap=True,
    )


def clear(out: Path) -> None:
    """Remove what an earlier demo left, and nothing else."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("reference", "interrupted"):
        shutil.rmtree(out / name, ignore_errors=True)
        for suffix in (".losses", ".log"):
            (out / f"{name}{suffix}").unlink(missing_ok=True)
    (out / "demo.png").unlink(missing_ok=True)


def perform(out: Path, console: Console) -> None:
    clear(out)
    demo = Demo(out, console)
    with demo.bar:
        reference = demo.train("reference", "undisturbed")
        run = demo.train("interrupted", "interrupted", ACTS)
    interruptions = check(run)
    same = compare(reference, run)
    show(console, interruptions, run)
    console.print("\n[bold]Compared with the undisturbed run[/bold]")
    for line in same:
        console.print(f"  [green]✓[/green] {line}", highlight=False)
    titles = [act.title for act in ACTS]
    paint(out / "demo.png", reference, run, list(zip(titles, interruptions, strict=True)))
    console.print(f"\nThe picture is {out / 'demo.png'}", highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train twice, undisturbed and interrupted, and compare every bit.")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for checkpoints and the picture")
    arguments = parser.parse_args()
    # A location or a setting of the person's own shell would lead the demo elsewhere.
    for name in [name for name in os.environ if name.startswith(("HOLDFAST_", "CHECKPOINT_"))]:
        del os.environ[name]
    began = time.monotonic()
    console = Console()
    try:
        perform(arguments.out, console)
    except BrokenPromiseError as broken:
        console.print(f"\n[bold red]Not as promised:[/bold red] {broken}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("\nstopped")
        return 130
    console.print(f"All as promised, in {time.monotonic() - began:.0f} s.", style="bold green", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
