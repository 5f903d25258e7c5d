"""docs/kubeflow.md: its session ends as shown, and what it says is refused is refused with those words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast.kubeflow
from holdfast.errors import ConfigError
from holdfast.kubeflow import TransformersTrainer
from tests.docs.pages import blocks_of, commands_of, normal
from tests.kit import ROOT

pytestmark = pytest.mark.core(0)

PAGE = ROOT / "docs/kubeflow.md"
REFUSED = [
    match.groups() for match in re.finditer(r"^\| `(\w+=[^`]+)` \| `([^`]+)` \|$", PAGE.read_text(), re.MULTILINE)
]
NAMES = {name: getattr(holdfast.kubeflow, name) for name in holdfast.kubeflow.__all__}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_session_of_the_page_ends_as_shown(state, tmp_path):
    script, session = (block for block in blocks_of(PAGE) if block.language in ("python", "console"))
    (tmp_path / "submit.py").write_text(script.code, encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "COLUMNS": "160", "OMP_NUM_THREADS": "1"}
    for command in commands_of(session):
        done = subprocess.run(
            command.text, shell=True, env=environ, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, f"$ {command.text}\n{done.stdout}{done.stderr}"
        printed = {place(normal(line)) for line in done.stdout.splitlines()}
        for line in command.shown:
            assert line == "…" or place(normal(line)) in printed, f"$ {command.text}\n{line}\n{done.stdout}"
    assert not list((state / "holdfast/jobs").iterdir())


def place(line: str) -> str:
    """A line without the folder that the session runs in, and without a unit of time."""
    return re.sub(r"ETA #[a-z]", "ETA #", re.sub(r"/\S*/(?=counting$)", "", line))


def test_the_page_has_many_refusals():
    assert len(REFUSED) >= 15


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_the_page_says_is_refused_is_refused_with_those_words(given, message):
    def train():
        pass

    with pytest.raises(ConfigError) as refused:
        TransformersTrainer(**{"func": train, **eval(f"dict({given})", NAMES)})
    assert re.match(".+".join(map(re.escape, message.split("…"))), str(refused.value)), refused.value
