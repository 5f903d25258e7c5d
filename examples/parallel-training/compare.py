"""Puts the baseline and the runs on Ray side by side: ``comparison.json``, three pictures, and a table.

Only what did the same work is compared: other data, another batch, seed or network is an error that names it. A ceiling
or an interrupted run of other work is left out, and that is said. A run that was faster than another is never credited
with what is not training: start-up and warm-up stand apart. Nor with epochs that it did not do: where one of the two
stopped early, the speedup of an epoch counts.

The exit code is 1 if an accuracy is not that of the baseline, within two points; with ``--require-targets`` also if a
speedup is below its target.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plots
import training

TARGET_EFFICIENCY = 0.75
"""A speedup of 1.5 with two workers."""
TARGET_POINTS = 2.0
QUIET = 0.9
"""A process that never waits has this much of its core at least, where nothing else wants it."""
_SAME = ("epochs", "batch_size", "learning_rate", "patience", "seed", "filters", "model", "cpus", "gpus", "pin")
_SAME_STEP = ("batch_size", "filters", "model", "cpus", "gpus", "pin")
"""For the ceiling, which knows of no epochs."""
_NUMBERS = (
    *("num_workers", "training_time_seconds", "startup_seconds", "warmup_seconds", "epochs_completed", "test_accuracy"),
    *("processor_share", "step_seconds", "steps", "interruption_seconds"),
)
_RESULT = {
    **dict.fromkeys(_NUMBERS, float),
    **dict.fromkeys(("training_type", "weights_sha256"), str),
    "job.cpus": float,
    **dict.fromkeys(("data.name", "data.source", "data.sha256"), str),
    "data.stand_in": bool,
    "epoch_seconds": list,
    **dict.fromkeys([f"history.{curve}" for curve in ("loss", "accuracy", "val_loss", "val_accuracy")], list),
}
"""What a training writes down and is needed here. A dot leads into an object."""
_CEILING = {
    **dict.fromkeys(("ceiling", "step_seconds_whole_batch_alone"), float),
    **dict.fromkeys(("step_seconds_part_alone", "step_seconds_part_together"), float),
    "job": dict,
}
_BESIDE_CEILING = dict.fromkeys(("exchange_seconds_per_step", "input_seconds_per_epoch"), float)
_INTERRUPTED = {"interruptions": list, "interrupted_how": str}
_WORDS = {float: "a number", str: "a text", bool: "true or false", list: "a list", dict: "an object"}
Result = dict[str, Any]


class CompareError(Exception):
    """There is nothing that can be compared. The message says what is missing or differs."""


def read(path: Path, fields: Mapping[str, type]) -> Result:
    """What a training has written. Raises where one of the fields is missing, or is something else."""
    try:
        result: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CompareError(f"there is no {path}; run the training that writes it first") from None
    except ValueError as error:
        raise CompareError(f"{path} is not JSON: {error}") from None
    except OSError as error:
        raise CompareError(f"{path} cannot be read: {error.strerror}") from None
    check_fields(path, result, fields)
    found: Result = result
    return found


def check_fields(path: Path, result: Any, fields: Mapping[str, type]) -> None:
    for name, kind in fields.items():
        value = result
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (kind is float and isinstance(value, bool)):
            found = "is not there" if value is None else f"is {json.dumps(value)[:60]}"
            raise CompareError(
                f"{path} is not the result of a whole run: {name} {found}; it must be {_WORDS[kind]}. "
                f"Run what writes it again"
            )


def difference(ours: Result, our_name: str, theirs: Result, their_name: str, fields: tuple[str, ...]) -> str | None:
    """The first of these options that the two do not share, or that their data are not the same; None: neither."""
    pairs = [(f"--{field.replace('_', '-')}", ours["job"].get(field), theirs["job"].get(field)) for field in fields]
    if "data" in ours and "data" in theirs:
        pairs.append(("the data", ours["data"]["sha256"], theirs["data"]["sha256"]))
    for what, one, other in pairs:
        if one != other:
            return f"{what} is {one} in {our_name} and {other} in {their_name}"
    return None


def check_same_work(baseline: Result, run: Result, name: str) -> None:
    differs = difference(baseline, "baseline_results.json", run, name, _SAME)
    if differs is not None:
        raise CompareError(f"{differs}: they did not do the same work; run both with the same options")


def compare_run(baseline: Result, run: Result, ceiling: Result | None) -> Result:
    workers, epochs = run["num_workers"], run["epochs_completed"]
    speedup = baseline["training_time_seconds"] / run["training_time_seconds"]
    compared = {
        "num_workers": workers,
        "speedup": speedup,
        "speedup_per_epoch": speedup * epochs / baseline["epochs_completed"],
        "efficiency": speedup / workers,
        "accuracy_difference_points": 100 * (run["test_accuracy"] - baseline["test_accuracy"]),
        "training_time_seconds": run["training_time_seconds"],
        "startup_seconds": run["startup_seconds"],
        "warmup_seconds": run["warmup_seconds"],
        "seconds_per_epoch": run["training_time_seconds"] / epochs,
        "test_accuracy": run["test_accuracy"],
        "epochs_completed": epochs,
        "processor_share": run["processor_share"] / run["job"]["cpus"],
        "ceiling": None,
        "explanation": None,
    }
    if ceiling is not None:
        compared["ceiling"] = ceiling["ceiling"]
        compared["explanation"] = explain(baseline, run, ceiling)
    compared["accuracy_target_met"] = round(abs(compared["accuracy_difference_points"]), 6) <= TARGET_POINTS
    compared["speedup_target"] = TARGET_EFFICIENCY * workers if workers > 1 else None
    compared["speedup_target_met"] = workers == 1 or compared["speedup_per_epoch"] >= TARGET_EFFICIENCY * workers
    return compared


def explain(baseline: Result, run: Result, ceiling: Result) -> dict[str, float]:
    """Where the seconds of a step go beyond an equal part of the baseline's. The parts add up to the step.

    Of the ceiling only ratios are taken: the machine may have been slower as a whole when it was measured.
    """
    workers, step = run["num_workers"], run["step_seconds"]
    ideal = baseline["step_seconds"] / workers
    unit = baseline["step_seconds"] / ceiling["step_seconds_whole_batch_alone"]
    alone, together = unit * ceiling["step_seconds_part_alone"], unit * ceiling["step_seconds_part_together"]
    smaller_batch, shared_machine = alone - ideal, together - alone
    return {
        "step_seconds_baseline": baseline["step_seconds"],
        "step_seconds": step,
        "ideal": ideal,
        "smaller_batch": smaller_batch,
        "shared_machine": shared_machine,
        "exchange_and_waiting": step - ideal - smaller_batch - shared_machine,
        "exchange_measured_alone": run["exchange_seconds_per_step"],
        "input_measured_alone": run["input_seconds_per_epoch"] / max(1, run["steps"] / run["epochs_completed"]),
    }


def compare(folder: Path) -> Result:
    """Also writes it down, with the pictures."""
    baseline = read(folder / "baseline_results.json", _RESULT)
    paths = sorted(folder.glob("ray_results_*workers.json"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise CompareError(f"there is no ray_results_<N>workers.json in {folder}; run ray_training.py first")
    runs, results = [], []
    left_out: list[str] = []
    for path in paths:
        run = read(path, _RESULT)
        check_same_work(baseline, run, path.name)
        beside = folder / f"ceiling_{run['num_workers']}workers.json"
        ceiling = read(beside, _CEILING) if beside.exists() else None
        if ceiling is not None and (differs := difference(run, path.name, ceiling, beside.name, _SAME_STEP)):
            left_out.append(f"{beside.name} counts as not measured: {differs}")
            ceiling = None
        if ceiling is not None:
            check_fields(path, run, _BESIDE_CEILING)
        results.append(run)
        runs.append(compare_run(baseline, run, ceiling))
    most = runs[-1]
    comparison = {
        "speedup": most["speedup"],
        "efficiency": most["efficiency"],
        "accuracy_difference_points": most["accuracy_difference_points"],
        "num_workers": most["num_workers"],
        "ceiling": most["ceiling"],
        "data": baseline["data"],
        "baseline": {
            "training_time_seconds": baseline["training_time_seconds"],
            "startup_seconds": baseline["startup_seconds"],
            "warmup_seconds": baseline["warmup_seconds"],
            "seconds_per_epoch": baseline["training_time_seconds"] / baseline["epochs_completed"],
            "test_accuracy": baseline["test_accuracy"],
            "epochs_completed": baseline["epochs_completed"],
            "processor_share": baseline["processor_share"] / baseline["job"]["cpus"],
        },
        "runs": runs,
        "interrupted": interrupted(folder, left_out),
        "left_out": left_out,
    }
    training.write(str(folder), "comparison.json", comparison)
    plots.paint(folder, baseline, results, runs)
    return comparison


def interrupted(folder: Path, left_out: list[str]) -> list[Result]:
    """Each training that was interrupted, beside the same one that was not. Others, and why, go to ``left_out``."""
    found = []
    for path in sorted((folder / "interrupted").glob("*_results*.json")):
        run, name = read(path, _RESULT), f"interrupted/{path.name}"
        if "interruptions" not in run:
            left_out.append(f"{name} is left out: it does not say how it was interrupted; the benchmark stopped before")
            continue
        if not (folder / path.name).exists():
            left_out.append(f"{name} is left out: there is no {path.name} of the same training undisturbed")
            continue
        check_fields(path, run, _INTERRUPTED)
        calm = read(folder / path.name, _RESULT)
        if differs := difference(calm, path.name, run, name, _SAME):
            left_out.append(f"{name} is left out: {differs}")
            continue
        found.append(
            {
                "training_type": run["training_type"],
                "num_workers": run["num_workers"],
                "interruptions": run["interruptions"],
                "how": run["interrupted_how"],
                "interruption_seconds": run["interruption_seconds"],
                "steps": run["steps"],
                "steps_undisturbed": calm["steps"],
                "test_accuracy": run["test_accuracy"],
                "test_accuracy_undisturbed": calm["test_accuracy"],
                "same_weights": run["weights_sha256"] == calm["weights_sha256"],
            }
        )
    return found


def rows_of(comparison: Result) -> list[tuple[str, ...]]:
    base, runs = comparison["baseline"], comparison["runs"]

    def row(title: str, field: str, form: str) -> tuple[str, ...]:
        return (title, format(base[field], form), *(format(run[field], form) for run in runs))

    of_an_epoch = " of an epoch" if any(stopped_early(comparison, run) for run in runs) else ""
    per_epoch = [("speedup of an epoch", "1.00", *(f"{run['speedup_per_epoch']:.2f}" for run in runs))]
    return [
        ("", "baseline", *(f"Ray, {run['num_workers']} workers" for run in runs)),
        row("training, s", "training_time_seconds", ".1f"),
        row("an epoch, s", "seconds_per_epoch", ".1f"),
        row("epochs", "epochs_completed", "d"),
        row("start-up, s", "startup_seconds", ".1f"),
        row("warm-up, s", "warmup_seconds", ".1f"),
        row("of its core it used", "processor_share", ".0%"),
        row("test accuracy", "test_accuracy", ".2%"),
        ("difference, points", "", *(f"{run['accuracy_difference_points']:+.2f}" for run in runs)),
        ("speedup", "1.00", *(f"{run['speedup']:.2f}" for run in runs)),
        *(per_epoch if of_an_epoch else ()),
        ("ceiling of this machine", "1.00", *(_or_dash(run["ceiling"], ".2f") for run in runs)),
        (f"efficiency{of_an_epoch}", "100%", *(f"{run['speedup_per_epoch'] / run['num_workers']:.0%}" for run in runs)),
        (f"speedup{of_an_epoch} / ceiling", "", *(_of_ceiling(run) for run in runs)),
    ]


def stopped_early(comparison: Result, run: Result) -> bool:
    """Whether a run and the baseline did other numbers of epochs, so that their times are not of the same work."""
    return bool(run["epochs_completed"] != comparison["baseline"]["epochs_completed"])


def _or_dash(value: float | None, form: str) -> str:
    return "not measured" if value is None else format(value, form)


def _of_ceiling(run: Result) -> str:
    return "not measured" if run["ceiling"] is None else f"{run['speedup_per_epoch'] / run['ceiling']:.0%}"


def show(comparison: Result) -> None:
    data = comparison["data"]
    print(f"\nData: {data['name']} ({data['source']})")
    if data["stand_in"]:
        print("      A GENERATED STAND-IN, NOT CIFAR-10: the accuracy means nothing outside of this table")
    rows = rows_of(comparison)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print()
    for row in rows:
        print(
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        )
    if (share := comparison["baseline"]["processor_share"]) < QUIET:
        print(f"\nThe baseline never waits, and yet had {share:.0%} of its core: something else used this machine.")
    for sentence in comparison["left_out"]:
        print(f"\n{sentence}")
    for run in comparison["runs"]:
        if early := stopped_early(comparison, run):
            ours, epochs = comparison["baseline"]["epochs_completed"], run["epochs_completed"]
            print(
                f"\nThe baseline stopped after {ours} epochs, and {run['num_workers']} workers after {epochs}: their "
                f"times are not of the same work. The speedup of an epoch counts; a larger --patience lets both go on."
            )
        if run["explanation"] is not None:
            print_explanation(run)
        verdict(run, " of an epoch" if early else "")
    for entry in comparison["interrupted"]:
        print_interrupted(entry)


def print_explanation(run: Result) -> None:
    parts = run["explanation"]
    print(f"\nA step with {run['num_workers']} workers takes {1000 * parts['step_seconds']:.0f} ms:")
    for title, name in (
        (f"the baseline's step of {1000 * parts['step_seconds_baseline']:.0f} ms, divided equally", "ideal"),
        ("a smaller batch per process is less efficient", "smaller_batch"),
        ("the processes share the machine", "shared_machine"),
        ("exchange of gradients, and waiting for each other", "exchange_and_waiting"),
    ):
        print(f"  {1000 * parts[name]:7.0f} ms  {title}")
    print(
        f"  measured alone: the exchange {1000 * parts['exchange_measured_alone']:.0f} ms, "
        f"input {1000 * parts['input_measured_alone']:.0f} ms a step, which training mostly hides"
    )


def verdict(run: Result, of_an_epoch: str) -> None:
    speedup = run["speedup_per_epoch"]
    if run["ceiling"] is not None and speedup > 1.05 * run["ceiling"]:
        print(
            f"The speedup{of_an_epoch} is above the ceiling: something else used this machine in between. Repeat it "
            f"when it is quiet."
        )
    if run["speedup_target"] is not None:
        print(f"Target for {run['num_workers']} workers: {speed_of(run, of_an_epoch)}")
    said = "reached" if run["accuracy_target_met"] else "missed"
    print(f"Target: accuracy within {TARGET_POINTS:.0f} points, {said}")


def speed_of(run: Result, of_an_epoch: str = "") -> str:
    """The speedup beside its target, and beside what this machine allows where that is known."""
    said = "reached" if run["speedup_target_met"] else "missed"
    allowed = "not measured" if run["ceiling"] is None else f"{run['ceiling']:.2f}"
    return (
        f"speedup{of_an_epoch} {run['speedup_target']:.1f}, {said} with {run['speedup_per_epoch']:.2f}; "
        f"this machine allows {allowed}"
    )


def missed(comparison: Result, *, speed_too: bool = False) -> list[str]:
    """A sentence for each target that must be met and is not."""
    found = []
    for run in comparison["runs"]:
        if not run["accuracy_target_met"]:
            found.append(
                f"the accuracy of {run['num_workers']} workers differs by {run['accuracy_difference_points']:+.2f} "
                f"points from the baseline's; up to {TARGET_POINTS:.0f} are accepted"
            )
        if speed_too and not run["speedup_target_met"]:
            found.append(f"the target for {run['num_workers']} workers is missed: {speed_of(run)}")
    return found


def print_interrupted(entry: Result) -> None:
    workers = f", {entry['num_workers']} workers" if entry["training_type"] != "baseline" else ""
    for cut in entry["interruptions"]:
        notice, resume = cut["notice_to_commit_s"], cut["resume_s"]
        saved = "without a notice" if notice is None else f"saved {notice:.1f} s after the notice"
        resumed = "not resumed" if resume is None else f"trained again {resume:.1f} s after it stopped"
        print(
            f"\nInterrupted ({entry['how']}): {entry['training_type']}{workers}, {cut['what']} at step {cut['step']}; "
            f"steps lost: {cut['steps_lost']}; {saved}; {resumed}"
        )
    same = "the same weights, bit for bit" if entry["same_weights"] else "OTHER WEIGHTS"
    print(
        f"  ended with {same}, as the undisturbed run; test accuracy {entry['test_accuracy']:.2%} and "
        f"{entry['test_accuracy_undisturbed']:.2%}; {entry['interruption_seconds']:.1f} s not trained in all"
    )


def add_targets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--require-targets", action="store_true", help="exit with 1 also where a speedup is below its target"
    )


def end(comparison: Result, folder: Path, *, speed_too: bool) -> int:
    """Say where it was written and what was missed, and give the exit code."""
    print(f"\nwritten: {folder / 'comparison.json'}, and three pictures beside it", flush=True)
    sentences = missed(comparison, speed_too=speed_too)
    for sentence in sentences:
        print(f"failed: {sentence}", file=sys.stderr, flush=True)
    return 1 if sentences else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the baseline with the runs on Ray.")
    parser.add_argument("--save-path", default="results", help="folder of the results (default: results)")
    add_targets(parser)
    arguments = parser.parse_args()
    folder = Path(arguments.save_path)
    try:
        comparison = compare(folder)
    except CompareError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--save-path={arguments.save_path!r} is not accepted: nothing can be written there: {error}")
    show(comparison)
    return end(comparison, folder, speed_too=arguments.require_targets)


if __name__ == "__main__":
    sys.exit(main())
