"""A real training under ``holdfast run``, interrupted in every way that the command line knows."""

from __future__ import annotations

import glob
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests.unit.cli.cli_helpers import TRAINING, events, holdfast, json_of, processes_about, start, wait_for


def result(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("DONE")]


def training(location: Path, attempts: int) -> bool:
    return len(events(location, "training")) >= attempts


@pytest.mark.slow
def test_two_ranks_end_with_the_same_parameters_whatever_happens_on_the_way(tmp_path: Path) -> None:
    undisturbed = holdfast("run", "-n", "2", TRAINING, tmp_path / "plain", cwd=tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert len(result(undisturbed.stdout)) == 1
    assert not (tmp_path / "holdfast-runs").exists()  # the script chose the location itself

    location, output, delay = tmp_path / "run", tmp_path / "out", tmp_path / "delay"
    delay.write_text("0.5")
    launcher = start("run", "-n", "2", TRAINING, location, delay, output=output)
    wait_for(lambda: training(location, 1))

    noticed = json_of("preempt", location, "--rank", "1", "--delay", "0.5")["preemptions"][0]
    assert (noticed["saved"], noticed["steps_lost"], noticed["reason"]) == (True, 0, "jit")

    wait_for(lambda: training(location, 2))
    killed = json_of("preempt", location, "--rank", "0", "--signal", "KILL", "--delay", "0.5")["preemptions"][0]
    assert (killed["steps_lost"], killed["reason"]) == (0, "rescue")

    wait_for(lambda: training(location, 3))
    (agent,) = (pid for pid in processes_about("holdfast.launch.agent") if pid in processes_about(str(location)))
    os.kill(agent, signal.SIGKILL)  # torchrun itself

    wait_for(lambda: training(location, 4))
    paused = json_of("pause", location)
    assert paused["state"] == "paused"
    assert processes_about(str(location)) == [launcher.pid]
    assert json_of("resume", location)["state"] == "running"

    wait_for(lambda: training(location, 5))
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not processes_about(str(location)), 30)

    delay.write_text("0")
    assert json_of("resume", location, "--detach")["state"] == "running"
    wait_for(lambda: events(location, "exit"), 60)
    said = output.read_text() + (location / ".holdfast" / "output.log").read_text()
    assert result(said) == result(undisturbed.stdout), said
    shown = json_of("show", location)
    assert shown["state"] == "complete"
    assert shown["goodput"]["steps_lost"] == 0
    assert [entry["what"] for entry in shown["interruptions"]].count("paused") == 1
    assert shown["interruptions"][1]["detail"] == "rank 0 died"
    assert json_of("verify", location)["whole"] is True
    assert "ChildFailedError" not in said
    assert "SignalException" not in said


@pytest.mark.slow
def test_one_process_without_torchrun_saves_for_the_launcher_and_goes_on(tmp_path: Path) -> None:
    undisturbed = holdfast("run", TRAINING, tmp_path / "plain")
    location, output = tmp_path / "run", tmp_path / "out"
    launcher = start("run", TRAINING, location, "0.25", output=output)
    wait_for(lambda: training(location, 1))
    top = json_of("top", location)["runs"][0]
    assert top["state"] == "running"
    assert top["ranks_live"][0]["rss"] > 10_000_000
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == 130
    assert not processes_about(str(location))
    again = holdfast("run", TRAINING, location)
    assert again.returncode == 0
    assert result(again.stdout) == result(undisturbed.stdout)


@pytest.mark.slow
def test_a_preemption_that_is_asked_for_before_the_run_has_shown_itself_waits_for_it(tmp_path: Path) -> None:
    location = tmp_path / "run"
    launcher = start("run", TRAINING, location, "0.15", output=tmp_path / "out")
    began = time.time()
    starting = os.path.join(tempfile.gettempdir(), "holdfast-launch-*", "starting")
    wait_for(lambda: glob.glob(starting) or location.exists())  # torch's import comes between the two, or this was late
    outcome = json_of("preempt", location)["preemptions"][0]
    assert (outcome["saved"], outcome["steps_lost"]) == (True, 0)
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(60)
    first = events(location, "launch")[0]
    assert began - 1 <= first["at"] < events(location, "attempt")[0]["process_started"] + 0.1  # which knows 10 ms
