"""``holdfast check``: real scripts, run and preempted in copies of their folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from holdfast.cli.advice import decisions, imported, seeds_missing, unlike
from holdfast.errors import ConfigError
from holdfast.launch import sandbox
from holdfast.launch.likeness import Lines, different
from tests.unit.cli.cli_helpers import HERE, holdfast

SCRIPTS = HERE / "checked"
QUICK = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(tmp_path):
    """The user's folder, which no command may change."""
    shutil.copytree(SCRIPTS, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    before = {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*")}
    yield tmp_path / "mine"
    assert {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*")} == before


def verdict_of(*arguments: str, cwd: Path) -> dict:
    done = holdfast("check", "--json", *arguments, cwd=cwd, **QUICK)
    assert done.returncode == 1, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.core
def test_a_script_that_resumes_exactly(folder, tmp_path, monkeypatch):
    """Its lines hold the time, which is another in each run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = holdfast("check", "--steps", "12", "exact.py", cwd=folder, **QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("exact: preempted at step ")
    assert not list(Path(tempfile.gettempdir()).glob("holdfast-check-*"))


def test_a_script_that_holdfast_does_not_protect(folder):
    found = verdict_of("by_hand.py", cwd=folder)
    assert found["verdict"] == "unprotected"
    assert "without a torch.optim.Optimizer" in found["why"]
    assert not found["exact"]


@pytest.mark.slow
def test_a_script_that_decides_by_the_clock_is_told_where(folder):
    done = holdfast("check", "--steps", "12", "clock.py", cwd=folder, **QUICK)
    assert done.returncode == 1
    assert done.stdout.startswith("not exact: ")
    assert "clock.py:15: if now % 2:" in done.stdout
    assert "holdfast.track(now % 2)" in done.stdout


@pytest.mark.slow
def test_a_script_whose_replay_goes_another_way_is_told_where(folder):
    found = verdict_of("--steps", "30", "unseen.py", cwd=folder)
    assert found["verdict"] == "not exact", found
    assert found["why"].startswith("the script does not go the way it went before: ")
    assert [hint["file"] for hint in found["change"]] == ["unseen.py"]


def test_a_script_that_fails_by_itself(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('there is no data')\n")
    found = verdict_of("train.py", cwd=tmp_path)
    assert found["verdict"] == "not checked"
    assert found["why"] == "the script fails in a copy of its folder: there is no data"


def test_a_script_that_fails_by_itself_in_the_middle(folder):
    script = folder.parent / "train.py"
    text = (folder / "exact.py").read_text()
    assert "        optimizer.step()\n" in text
    script.write_text(text.replace("optimizer.step()\n", "optimizer.step()\n        left.pop()\n", 1))
    script.write_text("left = [None] * 5\n" + script.read_text())
    found = verdict_of("train.py", cwd=script.parent)
    assert found["verdict"] == "not checked"
    assert found["why"] == "the script fails by itself after 6 optimizer steps: IndexError: pop from empty list"


def test_wrong_usage(folder):
    assert holdfast("check", cwd=folder).returncode == 2
    assert "does not exist" in holdfast("check", "none.py", cwd=folder).stderr
    assert "--link '../x' is not accepted" in holdfast("check", "--link", "../x", "exact.py", cwd=folder).stderr


# ---------------------------------------------------------------------- parts


def test_a_folder_that_is_too_large_is_not_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "_MOST", 100)
    mine = tmp_path / "mine"
    (mine / "data").mkdir(parents=True)
    (mine / "data" / "large").write_bytes(bytes(200))
    (mine / "holdfast-runs").mkdir()
    (mine / "train.py").write_text("pass")
    with pytest.raises(ConfigError, match="--link data"):
        sandbox.copy_folder(mine, tmp_path / "one", [])
    assert sandbox.copy_folder(mine, tmp_path / "two", ["data"]) == ["data"]
    assert (tmp_path / "two" / "data").readlink() == mine / "data"
    assert sorted(os.listdir(tmp_path / "two")) == ["data", "train.py"]


@pytest.mark.parametrize(
    ("attempts", "difference"),
    [
        ([["a 1", "b 7 s"], ["a 1", "b 9 s", "c"]], ""),
        ([["a 1"], ["b 1 s", "c"]], ""),
        ([["a 1", "b 1 s"], ["a 1", "c"]], ""),  # what comes before the loop is printed again
        ([["a 1", "b 1 s"], ["a 1", "d"]], "line 2: 'b 3 s' became 'd'"),
        ([["a 1"], ["c"]], "line 1: 'a 1' became 'c'"),
        ([["a 1", "b 1 s"], ["a 1", "b 2 s", "d"]], "line 3: 'c' became 'd'"),
        ([["a 1"], ["a 1", "b 2 s"]], "line 3: 'c' became None"),
    ],
)
def test_lines_of_a_resumed_run(attempts, difference):
    assert Lines(["a 1", "b 3 s", "c"], ["a 1", "b 4 s", "c"]).difference(attempts) == difference


def test_values_that_differ_by_themselves_do_not_count():
    assert different({"a": 1, "t": 2}, {"a": 1, "t": 3, "x": 4}, {"t"}) == ["x"]


def test_decisions_by_the_clock_and_missing_seeds_are_found(tmp_path):
    script = Path(tmp_path / "train.py")
    script.write_text(
        "import time, random\nimport torch\n\ndef train():\n    began = time.time()\n    while True:\n"
        "        took = time.time() - began\n        if took > 60:\n            break\n"
        "        if holdfast.track(took > 5):\n            pass\n        if random.random() < 0.1:\n            pass\n"
    )
    (hint,) = decisions(script, "train.py")
    assert (hint.line, hint.source) == (8, "if took > 60:")
    assert "holdfast.track(took > 60)" in hint.do
    assert [hint.do.split()[2] for hint in seeds_missing(script, "train.py")] == [
        "torch.manual_seed(0)",
        "random.seed(0)",
    ]


def test_values_that_are_others_at_each_start_are_found(tmp_path):
    script = Path(tmp_path / "train.py")
    script.write_text(
        "import time, torch\ntorch.manual_seed(int(time.time()))\nbegan = time.time()\nwords = set(open('a').read())\n"
        "order = {w: i for i, w in enumerate(words)}\nfine = [w for w in sorted(words)]\nfor w in words | {'a'}:\n"
        "    print(time.time() - began)\nfor w in words:\n    group['lr'] = 1 / (time.time() - began)\n"
        "bucket = hash('a') % 4\nwords = sorted(words)\nothers = list(words)\n"
        "group['n'] = holdfast.track(time.time())\n"
    )
    assert [hint.line for hint in unlike(script, "train.py")] == [2, 5, 9, 10, 11]


def test_hints_are_of_files_that_the_script_imports(tmp_path):
    for name, text in (("train.py", "import one\nfrom sub import two"), ("one.py", ""), ("other.py", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "two.py").write_text("import train")
    assert [path.name for path in imported(tmp_path / "train.py")] == ["train.py", "one.py", "two.py"]
