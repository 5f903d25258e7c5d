"""Scripts that start processes which train: each is a run of its own, ranks are one, and the rest is left alone."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.jobs.replay import drill
from tests.kit.checks import assert_whole


@pytest.fixture(scope="module")
def plain():
    """Runs plain PyTorch scripts; see drill.py."""
    server = drill.Server()
    yield server
    server.close()


def spec_of(tmp_path, *options, **env) -> drill.Spec:
    return drill.Spec(str(tmp_path / "run"), "plain_processes", options=list(options), env=env)


_known: dict[str, list[str]] = {}


def lines_without_holdfast(server, tmp_path, *options) -> list[str]:
    """All that is printed, in an order of its own: processes run side by side."""
    key = " ".join(options)
    if key not in _known:
        outcome = server.run(spec_of(tmp_path / "off", *options, HOLDFAST_ENABLED="0"))
        assert outcome.codes == [0], outcome.log
        _known[key] = sorted(outcome.printed[0])
    return _known[key]


def checkpoints(spec) -> dict[str, int]:
    """Folders below the location that hold one, and its step."""
    found = {path.parent for path in Path(spec.dir).rglob("checkpoint-*") if path.is_dir()}
    return {str(path.relative_to(spec.dir)): assert_whole(str(path)).step for path in sorted(found)}


def is_as_without(server, tmp_path, spec) -> drill.Outcome:
    outcome = server.run(spec)
    assert outcome.codes == [0], outcome.log
    assert sorted(outcome.printed[0]) == lines_without_holdfast(server, tmp_path, *spec.options), outcome.log
    return outcome


# ---------------------------------------------------------------------- processes that train by themselves


@pytest.mark.parametrize(
    ("kind", "signals"),
    [
        ("turn", "SIGTERM"),
        ("parallel", "SIGTERM SIGTERM"),
        pytest.param("subclass", "SIGTERM", marks=pytest.mark.slow),
    ],
)
@pytest.mark.core(1)
def test_processes_that_train_have_a_run_each_and_get_the_signals_of_their_parent(plain, tmp_path, kind, signals):
    spec = spec_of(tmp_path, kind, JOB_TELL=f"member+ 6 {signals}")
    stopped = plain.run(spec)
    assert stopped.codes == [143], stopped.log
    assert "codes" not in "".join(stopped.printed[0]), "the parent has gone on without its processes"
    steps = checkpoints(spec)
    assert 6 <= next(step for name, step in steps.items() if name.endswith("-2")) < 12, stopped.log
    again = is_as_without(plain, tmp_path, spec.plain(env={}))
    assert "resuming from" in again.log
    assert set(checkpoints(spec).values()) == {12}
    assert len(checkpoints(spec)) == 3


def test_a_process_is_known_by_its_work_where_the_script_skips_what_is_finished(plain, tmp_path):
    spec = spec_of(tmp_path, "skip", JOB_TELL="member+ 6 SIGTERM")
    assert plain.run(spec).codes == [143]
    again = plain.run(spec.plain(env={}))
    assert again.codes == [0], again.log
    assert "resuming from" in again.log
    assert "where it is complete" not in again.log
    expected = [line for line in lines_without_holdfast(plain, tmp_path, "turn") if not line.startswith("codes")]
    mine = [line for line in again.printed[0] if not line.startswith("codes")]
    assert sorted(mine) == [line for line in expected if not line.startswith("member ")]


# ---------------------------------------------------------------------- what is left alone


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("pool", "it is a worker of a pool, which gets its tasks by chance"),
        pytest.param("executor", "it is a worker of a pool, which gets its tasks by chance", marks=pytest.mark.slow),
        ("hogwild", "its model is in memory that several processes share"),
        pytest.param("os.fork", "it is a child of os.fork", marks=pytest.mark.slow),
    ],
)
def test_what_no_later_attempt_could_find_is_left_alone_and_said_once(plain, tmp_path, kind, why):
    spec = spec_of(tmp_path, kind)
    outcome = is_as_without(plain, tmp_path, spec)
    assert [why in line for line in outcome.log.splitlines()].count(True) >= 1, outcome.log
    assert outcome.log.count("goes on unprotected") == (2 if kind == "hogwild" else 1), outcome.log
    assert not Path(spec.dir).exists()


def test_every_task_of_a_pool_is_refused_where_protection_is_required(plain, tmp_path):
    outcome = plain.run(spec_of(tmp_path, "pool", HOLDFAST_ENABLED="require"))
    assert outcome.codes == [1], outcome.log
    assert "UnprotectedError" in outcome.log
    assert not [line for line in outcome.printed[0] if line.startswith("member")]


# ---------------------------------------------------------------------- ranks


def test_ranks_that_a_script_starts_are_one_run_and_draw_the_same_numbers_again(plain, tmp_path):
    spec = spec_of(tmp_path, "group", JOB_TELL="rank-1 5 SIGTERM")
    stopped = plain.run(spec)
    assert stopped.codes == [143], stopped.log
    assert 5 <= checkpoints(spec)["."] < 12
    again = plain.run(spec.plain(env={}))
    assert again.codes == [0], again.log
    splits = [sorted(line for line in one.printed[0] if "split" in line) for one in (stopped, again)]
    assert len(splits[0]) == 2
    assert splits[0] == splits[1]
    assert assert_whole(spec.dir).manifest.complete


def test_ranks_that_are_interrupted_from_the_keyboard_are_not_complete(plain, tmp_path):
    """The launcher of torch swallows the KeyboardInterrupt, so that their function seems to have returned."""
    spec = spec_of(tmp_path, "group", JOB_TELL="rank-1 5 SIGINT")
    interrupted = plain.run(spec)
    assert interrupted.codes != [0]
    again = plain.run(spec.plain(env={}))
    assert again.codes == [0], again.log
    assert "complete" not in again.log.partition("resuming")[2].partition("\n")[0]
    assert checkpoints(spec) == {".": 12}


def test_a_second_group_of_ranks_trains_by_itself(plain, tmp_path):
    spec = spec_of(tmp_path, "groups")
    outcome = plain.run(spec)
    assert outcome.codes == [0], outcome.log
    assert list(checkpoints(spec).values()) == [12, 12]
    assert "replaying" not in outcome.log
    assert len({line for line in outcome.printed[0] if " end " in line}) == 4


# ---------------------------------------------------------------------- the script itself


def test_a_script_with_other_arguments_trains_by_itself_and_says_so(plain, tmp_path):
    first, second = spec_of(tmp_path, "script", "0.1"), spec_of(tmp_path, "script", "0.2")
    is_as_without(plain, tmp_path, first)
    said = is_as_without(plain, tmp_path, second).log
    assert "holds a run with other arguments (script 0.1)" in said
    assert len(checkpoints(first)) == 2
    third = spec_of(tmp_path, "script", "0.3")
    stopped = plain.run(third.plain(faults=[{"at": "backward 7"}]))
    assert stopped.codes == [143], stopped.log
    assert "resuming from" in is_as_without(plain, tmp_path, third).log
    assert "where it is complete" in is_as_without(plain, tmp_path, first).log


def test_two_at_once_do_not_write_to_one_place(plain, tmp_path):
    spec = spec_of(tmp_path, "script", "0.1")
    go = tmp_path / "go"
    first = plain.start(spec.plain(env={"HOLD": str(go)}))
    owner = Path(spec.dir, ".holdfast", "run.json")
    while not owner.exists():
        assert first.alive(), first.log()
        time.sleep(0.02)
    second = is_as_without(plain, tmp_path, dataclasses.replace(spec, env={"OUT": str(tmp_path)}))
    assert "goes on unprotected" in second.log
    go.touch()
    assert first.wait(60).codes == [0]
    assert checkpoints(spec) == {".": 12}


def test_a_parent_of_processes_that_never_train_ends_as_ever(plain, tmp_path):
    spec = spec_of(tmp_path, "idle")
    outcome = plain.run(spec)
    assert outcome.codes == [-signal.SIGTERM], outcome.log
    assert not outcome.log
    os.kill(int(outcome.printed[0][0].split()[1]), signal.SIGKILL)


@pytest.mark.slow
def test_ranks_of_spawn(tmp_path):
    """PyTorch's most copied tutorial: mp.spawn, and init_process_group in its function."""
    script = drill.SCRIPTS / "plain_processes.py"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    environment = {**kept, "HOLDFAST_ENABLED": "1", "HOLDFAST_KILL_WAIT": "0", "OUT": str(tmp_path)}
    command = [sys.executable, str(script), "spawn"]

    def run(**env):
        return subprocess.run(
            command, cwd=tmp_path, env={**environment, **env}, capture_output=True, text=True, timeout=240, check=False
        )

    stopped = run(JOB_TELL="rank-0 5 SIGTERM SIGTERM")
    assert stopped.returncode == 143, stopped.stderr
    home = tmp_path / "holdfast-runs/plain_processes"
    assert 5 <= assert_whole(str(home)).step < 12
    again = run()
    assert again.returncode == 0, again.stderr
    assert "resuming from" in again.stderr
    lines = [line for line in stopped.stdout.splitlines() if "split" in line]
    assert set(lines) <= set(again.stdout.splitlines())
    assert json.loads((home / ".holdfast/run.json").read_text())["complete"]
