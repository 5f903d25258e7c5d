"""Checkpoints that version 0.1.0 committed resume with the current code: see README.md."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compat.make_checkpoints import DATA, KINDS, start

VERSION = "0.1.0"
LIMIT_S = 120.0
RELATIVE, ABSOLUTE = 1e-3, 1e-4
"""How far the final weights may differ where this processor rounds otherwise than the one that made the checkpoint.
Other random numbers, another order of the data or a lost optimizer state make a larger difference."""


def finished(process: subprocess.Popen[str], folder: Path) -> tuple[dict[str, Any], str]:
    """What the script recorded and printed when it ran to its end in ``folder``."""
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result, output


def digest_at(result: dict[str, Any], step: int) -> str:
    """Digest of the weights after ``step``."""
    digest: str = result["before"][str(step + 1)]
    return digest


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_0_1_0_saved_resumes_where_it_was_and_ends_as_if_never_interrupted(
    name: str, tmp_path: Path
) -> None:
    kind = KINDS[name]
    if missing := [module for module in kind.needs if importlib.util.find_spec(module) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    expected = json.loads((DATA / VERSION / name / "expected.json").read_text())
    this_python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if name == "replay" and this_python != expected["python"]:
        pytest.skip(f"a replay resumes under the Python that recorded it, {expected['python']}")
    interrupted, undisturbed = tmp_path / "interrupted", tmp_path / "undisturbed"
    interrupted.mkdir()
    undisturbed.mkdir()
    shutil.copytree(DATA / VERSION / name / "run", interrupted / kind.folder)

    with start(kind, interrupted) as one, start(kind, undisturbed) as other:
        try:
            resumed, output = finished(one, interrupted)
            reference, _ = finished(other, undisturbed)
        finally:
            one.kill()
            other.kill()

    step = expected["step"]
    said = re.findall(r"resuming from .*checkpoint-(\d+), step (\d+)", output)
    assert said == [(str(step), str(step))], output
    assert digest_at(resumed, step) == expected["weights"], "the weights it resumed with are not those saved"
    if name != "replay":  # which goes through the steps before once more
        assert min(map(int, resumed["before"])) == step + 1
    assert max(map(int, resumed["before"])) == max(map(int, reference["before"]))
    if digest_at(reference, step) == expected["weights"]:
        assert resumed["weights"] == reference["weights"]
    else:
        assert _close(resumed["numbers"], reference["numbers"])


def _close(one: list[float], other: list[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE) for a, b in zip(one, other, strict=True))
