"""A torchrun that lacks a name of the table stays as it is: it starts its ranks as without holdfast, or refuses to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.launcher.api")
import torch.distributed.launcher.api as launcher
from torch.distributed.elastic.multiprocessing.api import PContext

from holdfast.adapters import registry
from holdfast.adapters.torchrun.patches import TABLES, TORCHRUN, install_limit
from holdfast.base.patching import MARK
from tests.contracts.tables import differences, snapshot, warnings_of_holdfast, without

RENAMED = """
import sys
from holdfast.adapters import registry

install = registry.install


def install_where_a_name_is_gone(name, module):
    hidden = vars(module).pop("launch_agent") if name == "torchrun" else None
    install(name, module)
    if hidden is not None:
        module.launch_agent = hidden


registry.install = install_where_a_name_is_gone
from torch.distributed.run import main

main()
"""


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    monkeypatch.setenv("HOLDFAST_ENABLED", "1")
    TORCHRUN.undo()
    yield
    TORCHRUN.undo()


@pytest.mark.parametrize("target", TORCHRUN.required)
def test_whichever_name_is_missing_nothing_is_touched_and_one_warning_says_so(target) -> None:
    with without(target), warnings_of_holdfast() as heard:
        before = snapshot(TABLES)
        registry.install("torchrun", launcher)
        assert differences(before, snapshot(TABLES)) == []
    (line,) = heard
    assert (
        f"torch {TORCHRUN.version()} lacks {target}; tested with torch {TORCHRUN.oldest} to {TORCHRUN.newest}" in line
    )


def test_installed_it_replaces_every_name_once_and_undone_all_is_as_before() -> None:
    before = snapshot(TABLES)
    registry.install("torchrun", launcher)
    once = snapshot(TABLES)
    registry.install("torchrun", launcher)
    changed = differences(before, snapshot(TABLES))
    assert changed == differences(before, once) == sorted({patch.target for patch in TORCHRUN.patches})
    assert [getattr(once[name], MARK) for name in changed] == changed
    TORCHRUN.undo()
    assert differences(before, snapshot(TABLES)) == []


def test_the_launcher_of_holdfast_sets_the_limit_alone(monkeypatch) -> None:
    given = []
    monkeypatch.setattr(PContext, "close", lambda self, death_sig=None, timeout=30: given.append(timeout))
    registry.install("torchrun", launcher)
    install_limit(77.4)
    assert not hasattr(launcher.launch_agent, MARK)
    PContext.close(None)
    PContext.close(None, None, 90)
    assert given == [77, 90]


@pytest.mark.parametrize(("enabled", "code"), [("1", 1), ("require", 1)])
def test_a_torchrun_that_lacks_a_name_is_as_without_holdfast_or_refused(tmp_path: Path, enabled, code) -> None:
    (tmp_path / "torchrun.py").write_text(RENAMED)
    (tmp_path / "rank.py").write_text(f"open({str(tmp_path / 'started')!r}, 'w').close()\nraise SystemExit(143)\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "CHECKPOINT_"))}
    done = subprocess.run(
        [sys.executable, tmp_path / "torchrun.py", "--standalone", "--nproc-per-node=1", tmp_path / "rank.py"],
        env={**kept, "HOLDFAST_ENABLED": enabled},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    lacks = f"torch {TORCHRUN.version()} lacks torch.distributed.launcher.api:launch_agent"
    if enabled == "1":  # torchrun's own code for a rank that failed
        assert (tmp_path / "started").exists()
        assert [line for line in done.stderr.splitlines() if lacks in line and "leaves torch alone" in line]
    else:
        assert not (tmp_path / "started").exists()
        assert f"UnprotectedError: {lacks}" in done.stderr
