"""The pictures of a comparison: training curves, speedup and efficiency by workers, time per epoch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

INK, PALE = "#1f2933", "#c9d1d9"
COLOURS = ("#2a6fbb", "#c2571a", "#0f8b8d", "#8f5bb5", "#7a7a2b")
Result = dict[str, Any]


def paint(folder: Path, baseline: Result, results: list[Result], runs: list[Result]) -> None:
    pyplot.rcParams.update({"font.size": 10, "font.family": "DejaVu Sans", "text.color": INK, "axes.edgecolor": PALE})
    warning = " (generated images)" if baseline["data"]["stand_in"] else ""
    named = [("baseline", baseline), *((f"Ray, {run['num_workers']} workers", run) for run in results)]
    _curves(folder / "training_curves.png", named, f"Training on {baseline['data']['name']}{warning}")
    early = any(run["epochs_completed"] != baseline["epochs_completed"] for run in results)
    _speedup(folder / "speedup.png", runs, " of an epoch" if early else "")
    _epochs(folder / "epoch_time.png", named)


def _save(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(color=PALE, labelcolor=INK)
        axes.grid(axis="y", color=PALE, linewidth=0.6, alpha=0.6)
        axes.set_axisbelow(True)
    figure.savefig(path, facecolor="white")
    pyplot.close(figure)


def _curves(path: Path, named: list[tuple[str, Result]], title: str) -> None:
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), dpi=110, layout="constrained")
    figure.suptitle(title, x=0.015, ha="left", weight="bold")
    for axes, curve in zip(panels, ("loss", "accuracy"), strict=True):
        for (name, result), colour in zip(named, itertools.cycle(COLOURS), strict=False):
            history = result["history"]
            epochs = range(1, len(history[curve]) + 1)
            axes.plot(epochs, history[curve], color=colour, marker="o", markersize=3, label=f"{name}, training")
            axes.plot(epochs, history[f"val_{curve}"], color=colour, linestyle=(0, (4, 3)), label=f"{name}, validation")
        axes.set(xlabel="epoch", ylabel=curve)
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[1].legend(frameon=False, fontsize=8)
    _save(figure, path)


def _speedup(path: Path, runs: list[Result], of_an_epoch: str) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), dpi=110, layout="constrained")
    workers = [run["num_workers"] for run in runs]
    most = max([2, *workers])
    left.plot([1, most], [1, most], color=PALE, linewidth=6, solid_capstyle="round", label="as many times as workers")
    left.plot(workers, [run["speedup_per_epoch"] for run in runs], color=COLOURS[0], marker="o", label="measured")
    known = [run for run in runs if run["ceiling"] is not None]
    if known:
        left.plot(
            [run["num_workers"] for run in known],
            [run["ceiling"] for run in known],
            color=COLOURS[1],
            marker="_",
            markersize=16,
            linestyle="none",
            label="ceiling of this machine",
        )
    left.set(xlabel="workers", ylabel=f"speedup{of_an_epoch} over the baseline")
    left.set(ylim=(0, most * 1.1), xticks=range(1, most + 1))
    left.legend(frameon=False, fontsize=8)
    efficiency = [100 * run["speedup_per_epoch"] / run["num_workers"] for run in runs]
    right.bar([str(count) for count in workers], efficiency, color=COLOURS[0], width=0.5)
    right.set(xlabel="workers", ylabel=f"efficiency{of_an_epoch}, %", ylim=(0, 110))
    _save(figure, path)


def _epochs(path: Path, named: list[tuple[str, Result]]) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=110, layout="constrained")
    for (name, result), colour in zip(named, itertools.cycle(COLOURS), strict=False):
        seconds = result["epoch_seconds"]
        axes.plot(range(1, len(seconds) + 1), seconds, color=colour, marker="o", markersize=4, label=name)
    axes.set(xlabel="epoch", ylabel="seconds, without warm-up")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    _save(figure, path)
