"""What a person relies on when ``holdfast run`` looks after a script. Real processes and signals, without torch."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.base.run_directory import home_of
from holdfast.launch.outcome import Ended, Verdict, judge
from holdfast.launch.records import read_launch
from holdfast.progress import read_progress
from holdfast.store.checkpoints import whole
from holdfast.store.local import LocalBackend
from tests.unit.cli.cli_helpers import (
    HOLDFAST,
    PRETEND,
    environ,
    events,
    holdfast,
    json_of,
    processes_about,
    start,
    wait_for,
)


def newest_step(location: Path) -> int | None:
    return next((checkpoint.step for checkpoint in whole([LocalBackend(str(location))])), None)


def training(location: Path, attempts: int = 1) -> bool:
    return len(events(location, "training")) >= attempts


def trained(location: Path) -> int:
    """Steps that are done, as the progress file has it."""
    try:
        return read_progress(location / "training_progress.json")["step"]
    except FileNotFoundError:
        return 0


class End:
    """Where a run ends, which may change while it goes on: far away until what the test is about has happened."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "end"
        self.argument = f"steps={self._path}"
        self.set(1_000_000)

    def set(self, step: int) -> None:
        beside = self._path.with_suffix(".tmp")
        beside.write_text(str(step))
        beside.replace(self._path)


def test_a_script_runs_to_its_end_and_its_output_is_its_own(tmp_path: Path) -> None:
    done = holdfast("run", PRETEND, tmp_path / "run", "steps=3", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "DONE 3\n")
    assert "holdfast: complete at step 3" in done.stderr
    assert [event["code"] for event in events(tmp_path / "run", "exit")] == [0]
    assert not (tmp_path / "holdfast-runs").exists()  # the script chose the location itself


def test_dir_is_where_a_script_saves_that_does_not_say_so_itself(tmp_path: Path) -> None:
    done = holdfast("run", "--dir", tmp_path / "told", PRETEND, "unused", "steps=3", cwd=tmp_path)
    assert done.returncode == 0
    assert newest_step(tmp_path / "told") == 3


def test_sigterm_to_the_launcher_saves_and_leaves_with_143_and_the_same_command_goes_on(tmp_path: Path) -> None:
    location = tmp_path / "run"
    launcher = start("run", PRETEND, location, "steps=100000", output=tmp_path / "out")
    wait_for(lambda: trained(location))  # step 0 would be no resume
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 143
    saved = newest_step(location)
    assert saved is not None
    again = holdfast("run", PRETEND, location, f"steps={saved + 5}")
    assert again.returncode == 0
    assert f"training from step {saved}" in again.stderr
    assert [event.get("repeated") for event in events(location, "notice")] == [None]  # told once


def test_a_preempted_script_is_started_again_any_number_of_times(tmp_path: Path) -> None:
    location, end = tmp_path / "run", End(tmp_path)
    launcher = start("run", "--max-restarts", "0", PRETEND, location, end.argument, output=tmp_path / "out")
    wait_for(lambda: training(location))
    outcome = json_of("preempt", location, "--repeat", "2", "--every", "0.2")
    end.set(outcome["preemptions"][-1]["committed_step"] + 5)
    assert launcher.wait(60) == 0
    assert [one["saved"] for one in outcome["preemptions"]] == [True, True]
    assert [one["attempt"] for one in outcome["preemptions"]] == [1, 2]
    said = (tmp_path / "out").read_text()
    assert said.count("holdfast: preempted (SIGTERM) at step") == 2
    assert len(events(location, "attempt")) == 3


def test_a_crash_that_made_progress_is_free_and_a_crash_loop_ends_with_the_scripts_code(tmp_path: Path) -> None:
    location = tmp_path / "run"
    done = holdfast("run", "--max-restarts", "1", PRETEND, location, "crash_at=5", "code=9")
    assert done.returncode == 9
    # The first crash committed step 5. The second and third came no further.
    assert len(events(location, "attempt")) == 3
    assert "going on from step 5\n" in done.stderr
    assert "going on in 1 s from step 5 (restart 1 of 1)" in done.stderr
    assert "Given up after 1 restarts without a new checkpoint (--max-restarts), exit code 9" in done.stderr


def test_a_script_that_fails_before_it_says_anything_is_given_up_too(tmp_path: Path) -> None:
    done = holdfast("run", "--max-restarts", "0", PRETEND, tmp_path / "run", "early=4")
    assert done.returncode == 4
    assert "the script failed with exit code 4" in done.stderr


def test_a_second_launcher_and_a_script_that_is_not_there_are_refused(tmp_path: Path) -> None:
    location = tmp_path / "run"
    launcher = start("run", "--dir", location, PRETEND, "unused", "steps=100000", output=tmp_path / "out")
    wait_for(lambda: training(location) and read_launch(home_of(str(location))))  # written at its next look
    second = holdfast("run", "--dir", location, PRETEND, "unused")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 143
    assert (second.returncode, second.stderr.count("\n")) == (4, 1)
    assert f"process {launcher.pid}" in second.stderr
    missing = holdfast("run", "nowhere.py", cwd=tmp_path)
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert holdfast("run", "--grace", "soon", PRETEND, location).returncode == 2


def test_pause_keeps_the_launcher_and_resume_goes_on(tmp_path: Path) -> None:
    location, end = tmp_path / "run", End(tmp_path)
    launcher = start("run", PRETEND, location, end.argument, output=tmp_path / "out")
    wait_for(lambda: trained(location))
    paused = json_of("pause", location)
    assert (paused["state"], paused["changed"]) == ("paused", True)
    assert paused["step"] == newest_step(location)
    assert launcher.poll() is None
    assert json_of("pause", location) == {**paused, "changed": False}
    assert json_of("ls", location)["runs"][0]["state"] == "paused"
    assert json_of("resume", location)["state"] == "running"
    end.set(paused["step"] + 25)
    assert launcher.wait(60) == 0
    assert [event["step"] for event in events(location, "paused")] == [paused["step"]]
    assert len(events(location, "resumed")) == 1
    assert json_of("show", location)["interruptions"][0]["what"] == "paused"
    assert json_of("resume", location)["state"] == "complete"


def test_a_preemption_of_a_run_that_has_yet_to_say_how_far_it_is(tmp_path: Path) -> None:
    location = tmp_path / "run"
    launcher = start("run", PRETEND, location, "steps=100000", "quiet=1", output=tmp_path / "out")
    wait_for(lambda: training(location))
    preemption = json_of("preempt", location)["preemptions"][0]
    assert (preemption["saved"], preemption["steps_lost"], preemption["reason"]) == (True, None, "jit")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 143


def test_a_pause_is_not_lost_while_the_script_has_yet_to_say_where_it_trains(tmp_path: Path) -> None:
    location, other = tmp_path / "run", tmp_path / "other"
    left = Path(home_of(str(other))) / "control.json"  # of a launcher that was there before
    left.parent.mkdir(parents=True)
    left.write_text('{"id": "old", "action": "resume", "time": 1.0}')
    launcher = start("run", PRETEND, location, "steps=100000", f"detour={other}", output=tmp_path / "out")
    wait_for(lambda: training(location))
    json_of("preempt", location)
    wait_for(lambda: read_launch(home_of(str(other))))
    pausing = start("pause", location, "--json", output=tmp_path / "paused")
    wait_for((location / ".holdfast" / "control.json").exists)
    time.sleep(0.5)  # the launcher gets the signal while it looks at the other place
    (other / "go").touch()
    assert pausing.wait(60) == 0
    assert json.loads((tmp_path / "paused").read_text())["state"] == "paused"
    assert json_of("resume", location)["state"] == "running"
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 143


def test_a_launcher_that_is_killed_takes_its_script_along_and_resume_starts_it_again(tmp_path: Path) -> None:
    location, end = tmp_path / "run", End(tmp_path)
    launcher = start(
        "run", "--save-every", "7", PRETEND, location, end.argument, output=tmp_path / "out", OMP_NUM_THREADS="1"
    )
    wait_for(lambda: trained(location) and read_launch(str(location / ".holdfast")))
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not processes_about(str(location)), 20)
    saved = newest_step(location)
    assert saved is not None  # the kernel sent SIGTERM, and the script saved
    again = json_of("resume", location, "--detach", cwd=tmp_path)
    assert again["state"] == "running"
    wait_for(lambda: trained(location) > saved)
    end.set(saved)
    wait_for(lambda: events(location, "exit"))
    assert events(location, "end")[-1]["outcome"] == "complete"
    assert newest_step(location) == events(location, "end")[-1]["step"] > saved
    assert events(location, "attempt")[1]["resumed_from"] == saved
    launch = read_launch(str(location / ".holdfast"))
    assert launch is not None
    assert (launch.code, launch.spec.settings, launch.spec.environ["OMP_NUM_THREADS"]) == (
        0,
        {"HOLDFAST_SAVE_EVERY": "7"},
        "1",
    )


def test_pause_without_a_launcher_stops_the_process_and_says_so(tmp_path: Path) -> None:
    location = tmp_path / "run"
    script = subprocess.Popen([sys.executable, PRETEND, str(location), "steps=100000"], env=environ())
    wait_for(lambda: training(location))
    done = holdfast("pause", location)
    assert done.returncode == 0
    assert "start its command again" in done.stdout
    assert script.wait(60) == 143
    assert holdfast("pause", location).returncode == 3
    assert holdfast("resume", location).returncode == 3


def test_what_does_not_leave_is_killed_at_the_deadline_and_nobody_is_left_behind(tmp_path: Path) -> None:
    location = tmp_path / "run"
    launcher = start(
        "run", "--grace", "0.5", PRETEND, location, "steps=10000", "stubborn=1", "stray=1", output=tmp_path / "out"
    )
    wait_for(lambda: training(location))
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 143
    assert not processes_about(str(location))
    assert not processes_about("sleep 600.25")


@pytest.mark.parametrize("presses", [1, 3])
def test_ctrl_c_saves_and_the_third_one_kills(tmp_path: Path, presses: int) -> None:
    """In a terminal of its own, in which Ctrl-C is what the terminal makes of it."""
    location = tmp_path / "run"
    stubborn = ["stubborn=1"] if presses > 1 else []
    child, terminal = pty.fork()
    if child == 0:
        os.execve(
            HOLDFAST[0], [*HOLDFAST, "run", PRETEND, str(location), "steps=10000", *stubborn], environ(TERM="xterm")
        )
    shown = b""

    def read() -> bool:
        nonlocal shown
        while select.select([terminal], [], [], 0.05)[0]:
            try:
                data = os.read(terminal, 65536)
            except OSError:
                return True
            shown += data
        return False

    wait_for(lambda: read() or (b"/10000" in shown and training(location)))
    for number in range(presses):
        os.write(terminal, b"\x03")
        said = [b"SIGINT: saving", b"Ctrl-C once more kills", b"SIGINT: nothing was saved"][number]
        wait_for(lambda: read() or said in shown)  # noqa: B023
    wait_for(read)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    os.close(terminal)
    assert not processes_about(str(location))
    saved = newest_step(location)
    assert (saved is None) == (presses == 3)
    if saved is not None:
        assert f"saved at step {saved}".encode() in shown
        assert "━".encode() in shown  # the status line


def test_fresh_sets_the_old_checkpoints_aside_once(tmp_path: Path) -> None:
    # The pretend training sets nothing aside; that it is told to start anew is what the launcher is about.
    location = tmp_path / "run"
    assert holdfast("run", "--max-restarts", "0", PRETEND, location, "crash_at=5").returncode == 7
    assert newest_step(location) == 5
    end = End(tmp_path)
    launcher = start("run", "--fresh", PRETEND, location, end.argument, output=tmp_path / "out")
    wait_for(lambda: events(location, "training")[-1]["run"] != "pretend" and (newest_step(location) or 0) >= 5)
    preempted = json_of("preempt", location, "--delay", "0.3")["preemptions"][0]
    end.set(preempted["committed_step"] + 5)
    assert launcher.wait(60) == 0
    anew = [event for event in events(location, "attempt") if event["run"] != "pretend"]
    assert [event["resumed_from"] for event in anew] == [None, preempted["committed_step"]]


@pytest.mark.parametrize(
    ("code", "ranks", "said", "verdict"),
    [
        (0, {}, [], Verdict.DONE),
        (0, {}, [("end", "complete")], Verdict.DONE),
        (0, {}, [("end", "preempted")], Verdict.RESTART),  # HOLDFAST_EXIT_CODE=0
        (143, {}, [("notice", None)], Verdict.RESTART),  # before the first step: nothing to save
        (143, {0: 143, 1: 143}, [("commit", None), ("end", "preempted")], Verdict.RESTART),
        (1, {0: 1, 1: -9}, [("commit", None)], Verdict.RESTART),
        (1, {0: 1, 1: -9}, [("end", "rescued")], Verdict.RETRY),  # no further than before
        (1, {}, [], Verdict.RETRY),
        (143, {}, [], Verdict.RETRY),  # not a word about a notice
        (-11, {}, [], Verdict.RETRY),
    ],
)
def test_what_follows_from_the_end_of_an_attempt(
    code: int, ranks: dict[int, int], said: list[tuple[str, str | None]], verdict: Verdict
) -> None:
    told = [{"event": event, "outcome": outcome, "step": 5, "t": 1.0} for event, outcome in said]
    assert judge(Ended(code, ranks, told), jit_code=143) is verdict


def test_json_is_one_event_a_line_and_the_scripts_output_goes_to_stderr(tmp_path: Path) -> None:
    done = holdfast("run", "--json", PRETEND, tmp_path / "run", "steps=3")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["event"] for line in lines] == ["started", "complete"]
    assert lines[-1]["step"] == 3
    assert "DONE 3" in done.stderr


def test_quiet_says_nothing(tmp_path: Path) -> None:
    done = holdfast("run", "--quiet", PRETEND, tmp_path / "run", "steps=3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "DONE 3\n", "")
