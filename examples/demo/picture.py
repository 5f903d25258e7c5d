"""The picture of the demo: the loss of both trainings over the steps, and the steps over time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib
import numpy

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from PIL import Image

from record import Record

INK, PALE = "#1f2933", "#c9d1d9"
ATTEMPTS = ("#2a6fbb", "#0f8b8d", "#8f5bb5", "#c2571a")
DOWN, PAUSED = "#f6d9d5", "#e6e9ed"
Interruption = tuple[str, dict[str, Any]]


def smooth(values: Any, width: int = 15) -> Any:
    """The mean of each value and its neighbours."""
    window = numpy.ones(width)
    return numpy.convolve(values, window, "same") / numpy.convolve(numpy.ones(len(values)), window, "same")


def paint(path: Path, reference: Record, run: Record, interruptions: list[Interruption]) -> None:
    pyplot.rcParams.update({"font.size": 10, "font.family": "DejaVu Sans", "text.color": INK, "axes.edgecolor": PALE})
    figure, (losses, progress) = pyplot.subplots(
        2, 1, figsize=(10, 6.6), dpi=110, height_ratios=(3, 2), layout="constrained"
    )
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12)
    figure.suptitle(
        "Preempted, killed and paused: the same training, bit for bit", x=0.015, ha="left", weight="bold", size=14
    )
    paint_losses(losses, reference, run, interruptions)
    paint_progress(progress, run, interruptions)
    for axes in (losses, progress):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(color=PALE, labelcolor=INK)
        axes.margins(x=0)
        axes.grid(axis="y", color=PALE, linewidth=0.6, alpha=0.6)
        axes.set_axisbelow(True)
    figure.savefig(path, facecolor="white")
    pyplot.close(figure)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)  # a third of the bytes, looks the same


def attempts(run: Record, interruptions: list[Interruption]) -> list[list[int]]:
    """The steps of each attempt."""
    begins = [0, *(int(entry["resumed_at_step"] or 0) for _, entry in interruptions), max(run.steps)]
    return [[step for step in sorted(run.steps) if begin < step <= end] for begin, end in itertools.pairwise(begins)]


def paint_losses(axes: Axes, reference: Record, run: Record, interruptions: list[Interruption]) -> None:
    steps = sorted(reference.steps)
    plain = numpy.array([reference.steps[step].loss for step in steps])
    axes.plot(steps, smooth(plain), color=PALE, linewidth=9, solid_capstyle="round", label="undisturbed")
    disturbed = numpy.array([run.steps[step].loss for step in steps])
    mean = smooth(disturbed)
    for number, own in enumerate(attempts(run, interruptions)):
        inside = [step - 1 for step in own]
        colour = ATTEMPTS[number % len(ATTEMPTS)]
        axes.plot(own, disturbed[inside], color=colour, linewidth=0.6, alpha=0.35)
        axes.plot(own, mean[inside], color=colour, linewidth=2, label=f"attempt {number + 1}")
    top = float(plain.max()) * 1.08
    for title, entry in interruptions:
        axes.axvline(entry["step"], color=INK, linewidth=1, linestyle=(0, (4, 3)))
        lost = "no step lost" if entry["steps_lost"] == 0 else "the step in flight lost"
        label = f"{title}\nstep {entry['step']}, {lost}"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 2.0}
        axes.annotate(
            label,
            (entry["step"], top),
            (6, -2),
            textcoords="offset points",
            va="top",
            size=9,
            bbox=box,
            linespacing=1.35,
        )
    largest = float(numpy.abs(disturbed - plain).max())
    axes.set(ylabel="training loss", xlabel="optimizer step", ylim=(0, top))
    axes.set_title(f"loss; largest difference between the runs: {largest:g}", loc="left", size=10)
    axes.legend(frameon=False, ncols=5, loc="lower right", bbox_to_anchor=(1, 1), fontsize=9, handlelength=1.6)


def paint_progress(axes: Axes, run: Record, interruptions: list[Interruption]) -> None:
    events = run.events()
    origin = min(event.get("process_started", event["t"]) for event in events)
    trained = [event["t"] - origin for event in events if event["event"] == "training"]
    end = max(step.at for step in run.steps.values()) - origin
    paused = [event["t"] - origin for event in events if event["event"] == "paused"]
    resumed = [event["t"] - origin for event in events if event["event"] == "resumed"]
    downs = [0.0, *(entry["t"] - origin for _, entry in interruptions)]
    top = max(run.steps) * 1.04
    for begin, up in zip(downs, trained, strict=False):
        axes.axvspan(begin, up, color=DOWN, linewidth=0)
    for begin, up in zip(paused, resumed, strict=False):
        axes.axvspan(begin, up, color=PAUSED, linewidth=0)
    for number, own in enumerate(attempts(run, interruptions)):
        times = [run.steps[step].at - origin for step in own]
        axes.plot(times, own, color=ATTEMPTS[number % len(ATTEMPTS)], linewidth=2.5, solid_capstyle="butt")
    for title, entry in interruptions:
        label = f"{title}\nresumed after {entry['resume_s']:.1f} s"
        axes.annotate(label, (entry["t"] - origin, 0), (5, 5), textcoords="offset points", size=9, linespacing=1.35)
    account = run.goodput()
    axes.set(xlabel="seconds", ylabel="steps done", xlim=(0, end), ylim=(0, top))
    axes.set_title(
        f"start and restarts red, the pause grey; goodput {account.ratio:.0%} of {account.total_s:.0f} s",
        loc="left",
        size=10,
    )
