"""Runs the scripts of examples/parallel-training as a person would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.kit import ROOT

EXAMPLE = ROOT / "examples/parallel-training"


def run(script: str, *options: str, timeout_s: float = 120.0, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script until its end, with what it says on both of its outputs in ``stdout``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "RAY_"))}
    return subprocess.run(
        [sys.executable, str(EXAMPLE / script), *options],
        env={**kept, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def result(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content
