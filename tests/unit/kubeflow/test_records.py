"""What happens to a local job at the same time, or halfway, happens once or not at all. No training is started."""

from __future__ import annotations

import os
import signal
import site
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.base.process import Owner, process_start
from holdfast.base.run_directory import ATTEMPT
from holdfast.errors import ConfigError, HoldfastError
from holdfast.kubeflow import JobNotFoundError, install, jobs, local, records
from holdfast.launch import control
from holdfast.launch.records import write_json


def owner(pid: int) -> dict[str, Any]:
    return Owner(run="job", pid=pid, started=process_start(pid)).as_dict()


def record(**given: Any) -> records.Record:
    values: dict[str, Any] = {
        "name": "job",
        "location": os.path.abspath("run"),
        "workers": 1,
        "grace_s": 5.0,
        "env": {},
        "packages": [],
        "index_urls": [],
        "cwd": os.getcwd(),
        "created": 0.0,
    }
    return records.Record(**{**values, **given})


def written(**given: Any) -> records.Record:
    made = record(**given)
    os.makedirs(made.folder)
    made.write()
    return made


@pytest.fixture
def started(state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Processes that stand for launchers."""
    launchers: list[subprocess.Popen[bytes]] = []
    pids: list[int] = []

    def start(job: records.Record) -> records.Record:
        time.sleep(0.2)
        launchers.append(subprocess.Popen(["sleep", "60"]))
        pids.append(launchers[-1].pid)
        changed = records.noted(job.name, launcher=owner(pids[-1]))
        assert changed is not None
        return changed

    monkeypatch.setattr(records, "start", start)
    monkeypatch.setattr(records, "_wait_for_launch", lambda job: None)
    monkeypatch.setattr(control, "resume", lambda place: None)
    yield pids
    for launcher in launchers:
        launcher.kill()
        launcher.wait()


def test_two_who_resume_a_job_start_it_once(started: list[int]) -> None:
    written(launcher={})
    both = [threading.Thread(target=records.resume, args=("job",)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(20)
    assert len(started) == 1


def test_a_job_is_not_resumed_while_it_is_submitted(started: list[int]) -> None:
    submitting = threading.Thread(target=records.submit, args=(record(), ""))
    submitting.start()
    while not os.path.exists(os.path.join(record().folder, "job.json")):
        time.sleep(0.01)
    assert records.resume("job").launcher is not None
    submitting.join(20)
    assert len(started) == 1


def test_ranks_of_a_launcher_that_was_killed_may_save_before_the_next_one_starts(started: list[int]) -> None:
    job = written(launcher={})
    os.makedirs(job.place.home)
    saving = subprocess.Popen(["sleep", "1"])
    attempt = {"run": "r", "attempt": 1, "location": job.location, "ranks": {"0": owner(saving.pid)}}
    write_json(os.path.join(job.place.home, ATTEMPT), attempt)
    threading.Thread(target=saving.wait).start()
    records.resume("job")
    assert saving.returncode == 0
    assert len(started) == 1


@pytest.mark.parametrize(
    ("code", "env", "state_then"),
    [
        (None, {}, records.SUSPENDED),
        (129, {}, records.SUSPENDED),
        (130, {}, records.SUSPENDED),
        (143, {}, records.SUSPENDED),
        (1, {}, records.FAILED),
        (137, {}, records.FAILED),
        (143, {"CHECKPOINT_ENABLED": "False"}, records.FAILED),
        (143, {"HOLDFAST_ENABLED": "off"}, records.FAILED),
        (0, {}, records.COMPLETE),
    ],
)
def test_a_job_that_was_stopped_from_outside_is_paused(
    started: list[int], code: int | None, env: dict[str, str], state_then: str
) -> None:
    job = written(launcher={}, env=env)
    if code is not None:
        Path(job.ended).write_text(str(code))
    assert job.status() == state_then
    assert jobs.LocalJobs().progress("job").state == {"Suspended": "Paused"}.get(state_then, state_then)
    if state_then == records.SUSPENDED:
        records.pause("job")  # it is
        records.resume("job")
        assert len(started) == 1


@pytest.mark.parametrize("code", [None, 143])
def test_a_job_that_was_stopped_after_its_last_step_goes_on_with_what_comes_then(
    started: list[int], code: int | None
) -> None:
    """Its model may not be written yet, nor what the function does with it."""
    job = written(launcher={})
    os.makedirs(job.place.home)
    Path(job.place.journal_path).write_text('{"event": "end", "outcome": "complete", "t": 1.0}\n')
    if code is not None:
        Path(job.ended).write_text(str(code))
    assert job.status() == records.SUSPENDED
    records.resume("job")
    assert len(started) == 1


def test_deleting_a_job_ends_ranks_that_do_not_leave(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_MARGIN_S", 0.0)
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        job = written(launcher={}, grace_s=0.3)
        attempt = {"run": "r", "attempt": 1, "location": job.location, "ranks": {"0": owner(rank.pid)}}
        os.makedirs(job.place.home)
        write_json(os.path.join(job.place.home, ATTEMPT), attempt)
        records.delete("job")
        assert rank.wait(20) == -signal.SIGKILL
    assert not os.path.exists(job.folder)


def test_a_client_does_not_delete_a_job_that_was_submitted_after_its_own(state: Path) -> None:
    other = written(launcher={}, created=2.0)
    mine = local.Job(record(created=1.0))
    assert mine.status == records.CREATED
    mine.cancel()
    assert os.path.exists(other.folder)
    local.Job(other).cancel()
    assert not os.path.exists(other.folder)


@pytest.fixture
def interpreter(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stands for Python: it says what variables it has, beside itself, and lives."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nenv > "$0.new"\nmv "$0.new" "$0.told"\nexec sleep 60\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    yield python
    for job in records.records():
        records.delete(job.name)


def told(python: Path) -> list[str]:
    file, limit = Path(f"{python}.told"), time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < limit
        time.sleep(0.02)
    lines = file.read_text().splitlines()
    file.unlink()
    return lines


def test_a_job_is_started_again_as_it_was_submitted_whoever_does_it(
    interpreter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_NOTEBOOK", "first")
    monkeypatch.setenv("TOKEN", "secret-of-the-notebook")
    job = records.submit(record(env={"MINE": "own"}), "pass")
    assert {"OF_THE_NOTEBOOK=first", "MINE=own"} <= set(told(interpreter))
    assert os.stat(os.path.join(job.folder, "job.json")).st_mode & 0o777 == 0o600
    assert "secret-of-the-notebook" not in repr(job)
    os.kill(job.launcher["pid"], signal.SIGKILL)
    records._children["job"].wait()
    monkeypatch.setenv("OF_THE_NOTEBOOK", "other")
    monkeypatch.delenv("TOKEN")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert records.read_record("job").status() == records.SUSPENDED
    assert records.resume("job").is_alive()
    again = told(interpreter)
    assert {"OF_THE_NOTEBOOK=first", "MINE=own", "TOKEN=secret-of-the-notebook"} <= set(again)


def test_two_jobs_do_not_save_to_one_place(interpreter: Path, tmp_path: Path) -> None:
    records.submit(record(), "pass")
    os.symlink(record().location, tmp_path / "link")
    for location in (record().location, str(tmp_path / "link")):
        with pytest.raises(ConfigError, match=r"output_dir: .* is that of the local job 'job', which is not over"):
            records.submit(record(name="other", location=location), "pass")
    assert [job.name for job in records.records()] == ["job"]
    records.submit(record(name="other", location=str(tmp_path / "elsewhere")), "pass")
    records.delete("job")
    records.submit(record(name="third"), "pass")


def test_packages_of_the_user_are_there_in_the_environment_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "getusersitepackages", lambda: "/of/the/user")
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    assert install._below() == [*site.getsitepackages(), "/of/the/user"]
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    assert install._below() == site.getsitepackages()


def test_a_folder_that_describes_no_job_does_not_take_the_name(started: list[int]) -> None:
    os.makedirs(os.path.join(record().folder, "venv"))
    records.submit(record(packages=["x"]), "pass")
    assert not records.is_installed(record().folder)
    assert not os.path.exists(os.path.join(record().folder, "venv"))
    with pytest.raises(ConfigError, match="there is a local job 'job' already"):
        records.submit(record(), "pass")


def test_a_submission_that_fails_leaves_nothing(state: Path) -> None:
    with pytest.raises(FileNotFoundError):
        records.submit(record(cwd="/does/not/exist"), "pass")
    assert not os.path.exists(record().folder)
    with pytest.raises(JobNotFoundError):
        records.delete("../job")


def test_what_cannot_be_saved_or_is_not_there_yet_is_not_paused(state: Path) -> None:
    written(launcher=owner(os.getpid()), env={"CHECKPOINT_ENABLED": "false"})
    with pytest.raises(HoldfastError, match="'job' is not paused: it was submitted without enable_jit_checkpoint"):
        records.pause("job")
    written(name="other", launcher=owner(os.getpid()), packages=["x"])
    assert records.read_record("other").status() == records.CREATED
    with pytest.raises(control.NotLiveError, match="its packages are being installed"):
        records.pause("other")


def test_packages_are_installed_by_a_process_of_the_job_which_delete_ends(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "venv.py"  # in the way of the module that makes environments
    slow.write_text("import time\nprint('installing', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = records.submit(record(packages=["x"]), "pass")
    assert job.is_alive()
    assert job.status() == records.CREATED
    limit = time.monotonic() + 30
    while "installing" not in Path(job.log).read_text():
        assert time.monotonic() < limit
        time.sleep(0.05)
    assert records.resume("job").launcher == job.launcher, "it is being started"
    records.delete("job")
    assert not os.path.exists(job.folder)


def test_packages_that_cannot_be_installed_are_a_failed_job(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = written(packages=["x"], launcher=owner(os.getpid()))
    monkeypatch.setattr(install, "_run", lambda command, variables=None: install._checked(command, 3))
    with pytest.raises(SystemExit):
        install.main(job.folder, ["-m", "nothing"])
    assert "could not be installed: -m venv" in capsys.readouterr().out
    records.noted("job", launcher={})
    assert records.read_record("job").status() == records.FAILED


def test_an_environment_that_is_there_is_used_again(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = written(packages=["x"])
    os.makedirs(os.path.join(job.folder, "venv"))
    records.mark_installed(job.folder)
    seen: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *given: seen.append(given))
    install.main(job.folder, ["-m", "x"])
    python = os.path.join(job.folder, "venv", "bin", "python")
    assert seen == [(python, [python, "-m", "x"])]
    assert sys.executable != python
