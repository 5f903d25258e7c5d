"""``make benchmark``: the baseline, the same training on a Ray cluster of this machine, and both side by side.

What a person would type one after the other, on two nodes beside a head. With ``--preempt-at N`` both trainings are
then done once more and lose a process after step N. The exit code is 0 only if everything has run, if the accuracies
are within two points of each other, and if what was interrupted has lost no step and ended with the same weights as
what was not. With ``--require-targets`` the speedup has to reach its target too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import compare
import data
import interruption
import model
import training
from cluster import Cluster, ClusterError
from options import add_options, check_batch, job_of, wanted_of, whole

HERE = Path(__file__).parent
NODES = 2
ORDINARY = {"epochs": 5, "batch_size": 128, "images": 4096, "test_images": 1024}
QUICK = {"epochs": 4, "batch_size": 64, "images": 1024, "test_images": 512}
"""A few minutes on two cores."""
_PASSED_ON = (
    *("epochs", "batch_size", "data", "data_path", "data_url", "data_sha256", "images", "test_images"),
    *("learning_rate", "patience", "seed", "filters", "model", "cpus"),
)
_RESULTS = ("baseline_results.json", "ray_results_*workers.json", "ceiling_*workers.json", "comparison.json")
_PICTURES = ("training_curves", "speedup", "epoch_time")
_FOLDERS = ("runs", "logs", "interrupted")
_MARK = ".benchmark"
"""In each of these folders: a benchmark has made it, so the next one may remove it."""
_NOT_OURS = ("HOLDFAST_DIR", "CHECKPOINT_URI", "HOLDFAST_RESUME", "HOLDFAST_RUN_ID", "HOLDFAST_PROGRESS_FILE")
"""Settings of the person's own shell that would lead the trainings elsewhere."""
_SHOWN = re.compile(
    r"GENERATED|^data: |^cluster: |^baseline: |^ray_distributed: |^ceiling |Epoch \d|\d/\d+ - |resuming from|JIT "
)
_RANK = 1
"""The worker that is pulled out."""


class FailedError(Exception):
    """A part of the benchmark failed. The message says which, and what it said last."""


class Benchmark:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.folder = Path(arguments.save_path).resolve()
        self.environ = {
            **{
                name: value
                for name, value in os.environ.items()
                if name not in _NOT_OURS and not name.startswith("RAY_")
            },
            "HOLDFAST_ENABLED": "1",
            "PYTHONUNBUFFERED": "1",
            "RAY_DEDUP_LOGS": "0",  # else epochs that are seconds apart are one line of the log
        }
        self.options = ["--no-pin"] if arguments.no_pin else []
        for name in _PASSED_ON:
            if (value := getattr(arguments, name)) is not None:
                self.options += [f"--{name.replace('_', '-')}", str(value)]

    def clear(self) -> None:
        """Remove what an earlier benchmark left, and nothing else: results of other work must not be compared."""
        for name in _FOLDERS:
            if (path := self.folder / name).exists():
                shutil.rmtree(path)
            path.mkdir(parents=True)
            (path / _MARK).touch()
        for pattern in (*_RESULTS, *(f"{picture}.png" for picture in _PICTURES)):
            for path in self.folder.glob(pattern):
                path.unlink()

    def run(
        self,
        name: str,
        script: str,
        *options: str,
        environ: dict[str, str],
        meanwhile: Callable[[Callable[[], bool]], None] | None = None,
    ) -> int:
        """A script until its end, its output in a log; ``meanwhile`` is done beside it."""
        command = [sys.executable, str(HERE / script), *self.options, *options]
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        problems: list[Exception] = []

        def beside() -> None:
            try:
                assert meanwhile is not None
                meanwhile(lambda: process.poll() is None)
            except Exception as problem:
                problems.append(problem)

        helper = threading.Thread(target=beside, daemon=True) if meanwhile is not None else None
        if helper is not None:
            helper.start()
        try:
            assert process.stdout is not None
            with open(self.folder / "logs" / f"{name}.log", "a", encoding="utf-8") as log:
                for line in process.stdout:
                    log.write(line)
                    log.flush()
                    if _SHOWN.search(plain := _without_prefix(line)):
                        print(f"  {plain.rstrip()}", flush=True)
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if helper is not None:
            helper.join(60.0)
        if problems and process.returncode != 0:
            raise self.failed(name, process.returncode) from problems[0]
        if problems:
            raise FailedError(
                f"{name} was not interrupted: {problems[0]}. If it was near its end: a smaller --preempt-at"
            )
        return process.returncode

    def must_run(self, name: str, script: str, *options: str, **more: Any) -> None:
        code = self.run(name, script, *options, **more)
        if code != 0:
            raise self.failed(name, code)

    def failed(self, name: str, code: int) -> FailedError:
        log = self.folder / "logs" / f"{name}.log"
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
        return FailedError(f"{name} ended with {code}; all of its output is in {log}, and the last of it is:\n{last}")

    def baseline(self) -> None:
        environ = {**self.environ, "HOLDFAST_DIR": str(self.folder / "runs/baseline")}
        self.must_run("baseline", "baseline_training.py", "--save-path", str(self.folder), environ=environ)

    def interrupted_baseline(self, step: int) -> None:
        """SIGTERM to the process, and the same command again."""
        location, name = str(self.folder / "runs/baseline-interrupted"), "baseline-interrupted"
        environ = {**self.environ, **interruption.EVERY_STEP, "HOLDFAST_DIR": location}
        options = ("baseline_training.py", "--save-path", str(self.folder / "interrupted"))

        def meanwhile(running: Callable[[], bool]) -> None:
            interruption.wait_for_step(location, step, running)
            print(f"  SIGTERM after step {step}", flush=True)
            interruption.interrupt_process(location)

        code = self.run(name, *options, environ=environ, meanwhile=meanwhile)
        if code == 0:
            raise too_late(name, step)
        if code != 143:
            raise self.failed(name, code)
        print("  exit code 143; the same command again", flush=True)
        self.must_run(name, *options, environ=environ)
        interruption.note_costs(self.folder / "interrupted/baseline_results.json", location, "term")

    def ray(self, cluster: Cluster, workers: int) -> None:
        self.must_run(f"ray-{workers}", "ray_training.py", *self.on_ray(workers, "ray"), environ=cluster.environ)

    def on_ray(self, workers: int, name: str, folder: str = "") -> list[str]:
        return [
            *("--num-workers", str(workers), "--address", "auto", "--save-path", str(self.folder / folder)),
            *("--storage-path", str(self.folder / "runs"), "--run-name", f"{name}-{workers}"),
        ]

    def interrupted_ray(self, cluster: Cluster, workers: int, step: int, hows: list[str]) -> None:
        """One worker goes, in each of these ways after so many steps more; Ray and holdfast see to the rest."""
        name = "ray-interrupted"
        location = str(self.folder / f"runs/{name}-{workers}/holdfast")

        def meanwhile(running: Callable[[], bool]) -> None:
            for number, how in enumerate(hows, 1):
                interruption.wait_for_step(location, number * step, running)
                print(f"  {how} to worker {min(_RANK, workers - 1)} after step {number * step}", flush=True)
                interruption.interrupt_worker(location, min(_RANK, workers - 1), how, cluster)

        environ = {**cluster.environ, **interruption.EVERY_STEP}
        options = self.on_ray(workers, name, "interrupted")
        self.must_run(f"{name}-{workers}", "ray_training.py", *options, environ=environ, meanwhile=meanwhile)
        path = self.folder / f"interrupted/ray_results_{workers}workers.json"
        if len(interruption.note_costs(path, location, ", ".join(hows))) < len(hows):
            raise too_late(name, step)

    def all(self) -> int:
        arguments = self.arguments
        step, hows, counts = arguments.preempt_at, arguments.preempt_how, arguments.workers
        self.clear()
        print(f"load of this machine before the start: {os.getloadavg()[0]:.1f}; times mean most when it is near 0")
        say("Baseline: one process")
        self.baseline()
        say(f"A Ray cluster of this machine: {NODES} worker nodes and a head")
        with Cluster(NODES, cpus_of_node(max(counts), arguments.cpus), self.environ) as cluster:
            for workers in counts:
                say(f"Ray: {workers} workers")
                self.ray(cluster, workers)
            for workers in counts:
                say(f"What this machine allows: {workers} processes that do not talk to each other")
                options = ("--num-workers", str(workers), "--address", "auto", "--save-path", str(self.folder))
                self.must_run(f"ceiling-{workers}", "ceiling.py", *options, environ=cluster.environ)
            if step is not None:
                say(f"Ray again: {counts[-1]} workers, one of which goes after step {step}")
                self.interrupted_ray(cluster, counts[-1], step, hows)
        if step is not None:
            say(f"Baseline again, preempted after step {step}")
            self.interrupted_baseline(step)
        comparison = compare.compare(self.folder)
        compare.show(comparison)
        code = compare.end(comparison, self.folder, speed_too=arguments.require_targets)
        for entry in comparison["interrupted"]:
            if not interruption.was_harmless(entry):
                print(f"failed: {entry['training_type']} lost something by its interruption", file=sys.stderr)
                code = 1
        return code


def cpus_of_node(workers: int, cpus: int) -> int:
    """Whole workers: one cannot be divided among nodes."""
    return -(-workers // NODES) * cpus


def too_late(name: str, step: int) -> FailedError:
    return FailedError(f"{name} ended before it was interrupted: --preempt-at={step} is too near the end; take less")


def not_ours(folder: Path) -> list[str]:
    """What lies where the folders of a benchmark go, and was made by somebody else."""
    there = [path for name in _FOLDERS if (path := folder / name).exists() and not (path / _MARK).exists()]
    return [path.name for path in there if not path.is_dir() or any(path.iterdir())]


def say(title: str) -> None:
    print(f"\n== {title}", flush=True)


def _without_prefix(line: str) -> str:
    """Ray puts the process before each line of a worker, in colour."""
    return re.sub(r"^(\x1b\[\d+m)?\(\w+ pid=[^)]*\)(\x1b\[0m)? ", "", line)


def worker_counts(text: str) -> list[int]:
    parse = whole(1)
    return sorted({parse(part.strip()) for part in text.split(",")})


def ways(text: str) -> list[str]:
    """How a worker is pulled out, one after the other."""
    given = [part.strip() for part in text.split(",")]
    for way in given:
        if way not in interruption.HOWS:
            accepted = ", ".join(interruption.HOWS)
            raise argparse.ArgumentTypeError(
                f"{way!r} is not accepted; it must be one of {accepted}, or several with commas"
            )
    return given


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare training in one process with training on Ray's workers.")
    add_options(parser)
    parser.set_defaults(**dict.fromkeys(ORDINARY, None))
    add = parser.add_argument
    add("--workers", type=worker_counts, default=[2], help="how many, such as 2, or 1,2 for several (default 2)")
    add("--quick", action="store_true", help=f"a few minutes on two cores: {QUICK}")
    compare.add_targets(parser)
    add("--preempt-at", type=whole(1), metavar="N", help="do both once more, and pull a process out after step N")
    add(
        "--preempt-how",
        type=ways,
        default=["term"],
        metavar="HOW",
        help="of a worker: term (SIGTERM, the default), kill or node; several with commas: each after N steps more",
    )
    arguments = parser.parse_args(given)
    if theirs := not_ours(Path(arguments.save_path)):
        parser.error(
            f"--save-path={arguments.save_path!r} is not accepted: a benchmark removes {theirs[0]} there, and what is "
            f"in it now is not of an earlier one; name another folder, or move {theirs[0]} away"
        )
    for name, value in (QUICK if arguments.quick else ORDINARY).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the trainings say it loudly enough
            images = data.load(wanted_of(arguments))
        for workers in arguments.workers:
            check_batch(job_of(arguments), images, workers)
        model.find(arguments.model)
    except (data.DataError, model.ModelError) as error:
        parser.error(str(error))
    if arguments.gpus:
        parser.error("--gpus is not accepted here: the nodes of this machine would share them; see deploy/minikube")
    steps = arguments.epochs * -(-len(images.x_train) // arguments.batch_size)
    times = len(arguments.preempt_how)
    if arguments.preempt_at is not None and arguments.preempt_at * times >= steps:
        often = f", {times} times," if times > 1 else ""
        parser.error(
            f"--preempt-at={arguments.preempt_at}{often} is not accepted; it must be below {steps}, the last step"
        )
    if arguments.preempt_at is not None and "kill" in arguments.preempt_how and arguments.workers[-1] == 1:
        parser.error(
            "--preempt-how=kill is not accepted with --workers=1: who is killed cannot save, and nobody else has the "
            "weights; take term or node, or more workers"
        )
    try:
        training.prepare(arguments.save_path)
    except training.RefusedError as error:
        parser.error(str(error))
    return arguments


def leave_on_signals() -> None:
    """Take the cluster down on SIGTERM and when the terminal is closed: its nodes are in sessions of their own."""
    signals = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]  # nohup

    def leave(number: int, _: object) -> None:
        for one in signals:  # a shell and its terminal both send it: the second must not stop what the first began
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    for one in signals:
        signal.signal(one, leave)


def main() -> int:
    arguments = parse()
    leave_on_signals()
    began = time.monotonic()
    try:
        code = Benchmark(arguments).all()
    except (FailedError, ClusterError, compare.CompareError, OSError) as error:
        print(f"\nfailed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    print(f"{time.monotonic() - began:.0f} s in all")
    return code


if __name__ == "__main__":
    sys.exit(main())
