"""Notebooks of examples/kubeflow, run from top to bottom without a network."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from traitlets import default

from tests.kit import ROOT

FOLDER = ROOT / "examples/kubeflow"
QWEN, GPT2 = FOLDER / "jit-checkpointing-qwen.ipynb", FOLDER / "trl-gpt2-progress.ipynb"
CELL_S = 300
"""The longest that one cell may take."""


@dataclass
class Done:
    """A notebook that was run: what its cells printed."""

    cells: dict[str, str]

    def __getitem__(self, cell: str) -> str:
        return self.cells[cell]

    def number(self, cell: str, pattern: str) -> int:
        """One that a cell has printed."""
        found = re.search(pattern, self[cell])
        assert found, f"{pattern!r} is not in {self[cell]!r}"
        return int(found[1])


class Manager(AsyncKernelManager):
    """Starts kernels of this interpreter, whatever is installed for Jupyter on this machine."""

    @default("kernel_spec_manager")
    def _no_other_kernels(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def run(
    path: Path,
    folder: Path,
    before_clean_up: Callable[[], None] = lambda: None,
    environ: dict[str, str] | None = None,
    **parameters: object,
) -> Done:
    """Run all cells; ``before_clean_up`` is called before the last one. The kernel is gone when this returns."""
    notebook = nbformat.read(path, as_version=4)
    last = [cell.id for cell in notebook.cells if cell.cell_type == "code"][-1]

    def on_cell_start(cell: Any, cell_index: int) -> None:
        if cell.id == last:
            before_clean_up()

    client = NotebookClient(
        notebook,
        kernel_name="python3",
        kernel_manager_class=Manager,
        timeout=CELL_S,
        resources={"metadata": {"path": str(folder)}},
        on_cell_start=on_cell_start,
    )
    client.execute(env=environment(folder, environ or dict(os.environ), parameters))
    return Done({cell.id: printed(cell) for cell in notebook.cells if cell.cell_type == "code"})


def environment(folder: Path, environ: dict[str, str], parameters: dict[str, object]) -> dict[str, str]:
    ours = ("HOLDFAST_", "CHECKPOINT_", "TRAINING_PROGRESS", "EXAMPLE_", "RANK", "WORLD_SIZE")
    kept = {name: value for name, value in environ.items() if not name.startswith(ours)}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
        "XDG_STATE_HOME": state_of(folder),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "160",
        "EXAMPLE_OFFLINE": "1",
        **{f"EXAMPLE_{name}": str(value) for name, value in parameters.items()},
    }


def state_of(folder: Path) -> str:
    """Where local jobs of a notebook that runs in a folder are kept."""
    return str(folder / "state")


def printed(cell: Any) -> str:
    texts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            texts.append(output.text)
        elif "data" in output:
            texts.append(output.data.get("text/html", output.data.get("text/plain", "")))
    return re.sub(r"\x1b\[[0-9;]*m", "", "".join(texts)).replace("\r\n", "\n")


def check_qwen(done: Done, steps: int) -> None:
    """It was paused in the middle, and went on from the very step that it was paused at."""
    saved = done.number("checkpoint", r"checkpoint-(\d+) ")
    assert steps // 3 <= saved < steps
    assert "· Paused ·" in done["pause"]
    assert "'optimizer.pt'" in done["checkpoint"]
    assert "'holdfast.json'" in done["checkpoint"]
    assert f"resumed from checkpoint-{saved}" in done["resume"]
    assert f"· Complete · step {steps} of {steps} · 100.0 %" in done["end"]
    assert f"resumed from checkpoint-{saved}" in done["end"]
    assert re.search(rf"loss [\d.]+ at step 5 and [\d.]+ at step {steps}", done["end"])
    assert "'final'" in done["end"]
    assert len(done["try"].splitlines()) > 2


def check_gpt2(done: Done, steps: int) -> None:
    """All ways to look at it showed the same, and it went on from the step at which the command line paused it."""
    assert f"of {steps}</b>" in done["watch"]
    assert "VBox" in done["panel"]
    shown = json.loads(done["progress"][done["progress"].index("{") :])
    assert 0 < shown["step"] < steps
    assert shown["totalSteps"] == steps
    assert "· Paused ·" in done["cli-pause"]
    assert re.search(r"^\w+ +Paused", done["cli-pause"], re.MULTILINE)
    saved = done.number("cli-pause", r"checkpoint-(\d+) ")
    assert shown["step"] <= saved < steps
    assert f"Complete · step {steps} of {steps} · 100.0 %" in done["end"]
    assert f"resumed from checkpoint-{saved}" in done["end"]
    assert f"\ncheckpoint-{steps} " in done["end"]
    assert "the number after 0 i" in done["try"]
    assert "is deleted" in done["clean-up"]


def check_final(folder: Path) -> None:
    """The model loads as a whole, and no adapter is left apart."""
    from transformers import AutoModelForCausalLM

    assert not list(folder.glob("adapter*"))
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert not any("lora" in name for name, _ in model.named_parameters())
