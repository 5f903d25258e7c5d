"""What goes wrong around a run: nothing hangs, the deadline holds, what is damaged is never used."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from holdfast.store import open_backend
from holdfast.store.checkpoints import whole
from tests.jobs.torch import drill
from tests.jobs.torch.checks import uninterrupted
from tests.kit.checks import assert_whole, last_completed_when_noticed
from tests.kit.jobs import journal, last_events

AFTER_NOTICE_S = 15.0
"""Grace periods of 4 to 6 s hold: room for a starved machine, and less than the default of the drill, 20 s."""


def steps_in(folder) -> list[int]:
    return [checkpoint.step for checkpoint in whole([open_backend(str(folder))])]


def until(condition, timeout_s: float = 30.0):
    """The first true answer."""
    end = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < end, f"did not happen in {timeout_s} s"
        time.sleep(0.01)
    return answer


def await_progress(folder, condition) -> dict:
    """The progress file once it fulfils the condition: the thread that writes it comes later than what it tells of."""
    from holdfast.progress import read_progress

    def look():
        try:
            progress = read_progress(Path(folder, "training_progress.json"))
        except FileNotFoundError:
            return None
        return progress if condition(progress) else None

    return until(look)


# ---------------------------------------------------------------------- nothing hangs


def test_a_peer_stuck_in_its_forward_pass_does_not_keep_the_run_from_saving(server, tmp_path):
    faults = [
        {"rank": 1, "step": 9, "phase": "forward", "action": "HANG"},
        {"rank": 0, "step": 9, "phase": "backward", "action": "TERM"},
    ]
    spec = drill.Spec(str(tmp_path / "run"), store="agent", settings={"grace_period": 6.0}, faults=faults)
    outcome = server.run(spec)
    assert outcome.codes == [143, 143], outcome.log
    assert outcome.after_notice_s < AFTER_NOTICE_S
    assert assert_whole(spec.dir).step == 8
    assert server.run(drill.Spec(spec.dir)).digest == uninterrupted(server, spec).digest


@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("store", ["rank0", "agent"])
def test_a_peer_that_is_stopped_counts_as_dead(server, tmp_path, store, stopped):
    """Also where that peer keeps the job's store, which then answers nothing any more."""
    noticed = 1 - stopped
    settings = {"agree_timeout": 1.0, "grace_period": 15.0, "progress_every": 1}
    spec = drill.Spec(str(tmp_path / "run"), store=store, settings=settings, step_s=0.25)
    job = server.start(spec)
    job.wait_for("training")
    await_progress(spec.dir, lambda progress: progress["step"] >= 2)  # before the first step there is nothing to save
    job.send(signal.SIGSTOP, stopped)
    job.send(signal.SIGTERM, noticed)
    job.wait_for("end", rank=noticed, timeout_s=40.0)
    job.send(signal.SIGKILL, stopped)
    outcome = job.wait()
    assert outcome.codes[noticed] == 143, outcome.log
    assert assert_whole(spec.dir).manifest.reason == "rescue"
    assert server.run(drill.Spec(spec.dir)).digest == uninterrupted(server, spec).digest


def test_a_process_that_cannot_leave_its_optimizer_step_ends_before_the_deadline(server, tmp_path):
    faults = [
        {"rank": 0, "step": 9, "phase": "optimizer", "action": "TERM"},
        {"rank": 0, "step": 9, "phase": "after-optimizer", "action": "HANG"},
    ]
    settings = {"grace_period": 5.0}
    spec = drill.Spec(str(tmp_path / "run"), 1, save_every="4 steps", settings=settings, faults=faults)
    outcome = server.run(spec)
    assert outcome.codes == [143], outcome.log
    assert outcome.after_notice_s < AFTER_NOTICE_S
    assert assert_whole(spec.dir).step == 8


def test_a_location_that_hangs_is_left_in_time_for_the_fallback(server, tmp_path):
    faults = [
        {"rank": 0, "step": 9, "phase": "forward", "action": "TERM"},
        *[{"rank": 0, "step": step, "phase": "save", "action": "HANG"} for step in range(9, 73)],
    ]
    settings = {"grace_period": 8.0, "fallback": str(tmp_path / "second")}
    spec = drill.Spec(str(tmp_path / "run"), 1, settings=settings, faults=faults)
    outcome = server.run(spec)
    assert outcome.codes == [143], outcome.log
    assert outcome.after_notice_s < AFTER_NOTICE_S
    assert steps_in(spec.dir) == []
    newest = assert_whole(tmp_path / "second")
    resumed = server.run(drill.Spec(spec.dir, 1, settings={"fallback": str(tmp_path / "second")}))
    assert resumed.results[0]["first"] == newest.step
    assert resumed.digest == uninterrupted(server, spec).digest


def test_a_location_that_hangs_without_a_fallback_ends_in_time_and_keeps_what_was_committed(server, tmp_path):
    hang = [{"rank": 0, "step": step, "phase": "save", "action": "HANG"} for step in range(12, 73)]
    term = {"rank": 0, "step": 13, "phase": "forward", "action": "TERM"}
    settings = {"grace_period": 5.0}
    spec = drill.Spec(str(tmp_path / "run"), 1, save_every="8 steps", settings=settings, faults=[term, *hang])
    outcome = server.run(spec)
    assert outcome.codes == [143], outcome.log
    assert outcome.after_notice_s < AFTER_NOTICE_S
    assert assert_whole(spec.dir).step == 8


class Answers503(http.server.BaseHTTPRequestHandler):
    def answer(self):
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    def log_message(self, *_):
        pass


@pytest.fixture
def broken_s3():
    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers503)
    threading.Thread(target=http_server.serve_forever, daemon=True).start()
    yield {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{http_server.server_port}",
        "AWS_ACCESS_KEY_ID": "marker-id",
        "AWS_SECRET_ACCESS_KEY": "marker-secret",
        "AWS_REGION": "us-east-1",
    }
    http_server.shutdown()


def test_an_object_store_that_answers_503_sends_the_save_to_the_fallback(server, tmp_path, broken_s3):
    settings = {"dir": "s3://bucket/run", "grace_period": 25.0, "fallback": str(tmp_path / "second")}
    faults = [{"rank": 0, "step": 9, "phase": "forward", "action": "TERM"}]
    environment = {**broken_s3, "XDG_STATE_HOME": str(tmp_path / "state")}
    spec = drill.Spec(str(tmp_path / "run"), 1, settings=settings, faults=faults, env=environment)
    outcome = server.run(spec, 120.0)
    assert outcome.codes == [143], outcome.log
    newest = assert_whole(tmp_path / "second")
    assert "marker-secret" not in outcome.log
    assert not any("marker-secret" in path.read_text() for path in tmp_path.rglob("*.jsonl"))
    resumed = server.run(drill.Spec(**{**vars(spec), "faults": []}), 120.0)
    assert resumed.results[0]["first"] == newest.step, resumed.log
    assert resumed.digest == uninterrupted(server, spec).digest


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a disk of a given size; returns its folder."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options: str) -> Path:
        if (
            os.geteuid()
            or subprocess.run(["mount", "-o", options, "-t", "tmpfs", "none", disk], check=False).returncode
        ):
            pytest.skip("needs the right to mount a small tmpfs: run the tests as root")
        return disk

    yield mount
    subprocess.run(["umount", disk], check=False)


@pytest.mark.parametrize("world", [1, 2])
def test_a_full_disk_stops_no_training_and_costs_no_older_checkpoint(server, tmp_path, small_disk, world):
    disk = small_disk("size=600k")
    spec = drill.Spec(f"{disk}/run", world, width=4000, save_every="10 steps", settings={"keep": 2})
    Path(f"{disk}/run.out").mkdir()
    outcome = server.run(spec)
    assert "disk is full" in outcome.log
    assert outcome.seconds < 30
    assert all(result["steps"] in (0, 72 // world) for result in outcome.results.values())
    for checkpoint in whole([open_backend(spec.dir)]):
        assert checkpoint.step
    small_disk("remount,size=64m")
    resumed = server.run(spec)
    assert resumed.codes == [0] * world, resumed.log
    assert resumed.digest == uninterrupted(server, spec).digest


def test_a_disk_that_was_full_for_a_while_is_used_again(server, tmp_path, small_disk):
    """What a failed save had written already is given back: it does not keep the disk full for the next.

    A rank that is behind may write its own part when rank 0 has given back the rest: that goes with the next save.
    """
    disk = small_disk("size=3m")
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(2_700_000))
    spec = drill.Spec(f"{disk}/run", 2, width=4000, save_every="3 steps", step_s=0.2, settings={"keep": 1})
    job = server.start(spec)
    job.wait_for("save_failed", rank=1)
    until(lambda: all(path.name.startswith("rank-") for path in Path(spec.dir).glob("checkpoint-*/*.safetensors")))
    ballast.unlink()
    outcome = job.wait()
    assert outcome.codes == [0, 0], outcome.log
    assert steps_in(spec.dir) == [36]
    assert [path.name for path in Path(spec.dir).glob("checkpoint-*")] == ["checkpoint-36"]


@pytest.mark.parametrize("action", ["EIO", "EACCES", "RAISE"])
@pytest.mark.parametrize(("rank", "phase"), [(0, "save"), (1, "save"), (0, "commit")])
@pytest.mark.share(4)
def test_a_periodic_save_that_fails_on_one_rank_keeps_none_waiting(server, tmp_path, rank, phase, action):
    faults = [{"rank": rank, "step": 10, "phase": phase, "action": action}]
    spec = drill.Spec(str(tmp_path / "run"), save_every="5 steps", settings={"keep": 20}, faults=faults)
    outcome = server.run(spec, 60.0)
    assert outcome.codes == [0, 0], outcome.log
    assert steps_in(spec.dir) == [36, 35, 30, 25, 20, 15, 5]
    assert outcome.log.count("save of step 10 failed, training goes on") == 2
    assert outcome.digest == uninterrupted(server, spec).digest


@pytest.mark.parametrize(("rank", "phase"), [(0, "save"), (1, "save"), (0, "commit")])
def test_a_just_in_time_save_that_fails_on_one_rank_is_carried_out_by_the_other(server, tmp_path, rank, phase):
    fails = [{"rank": rank, "step": step, "phase": phase, "action": "EIO"} for step in range(9, 37)]
    term = {"rank": 1, "step": 9, "phase": "forward", "action": "TERM"}
    settings = {"grace_period": 60.0}  # which nobody waits for
    spec = drill.Spec(
        str(tmp_path / "run"), save_every="5 steps", store="agent", settings=settings, faults=[term, *fails]
    )
    outcome = server.run(spec, 90.0)
    assert outcome.codes == [143, 143], outcome.log
    assert outcome.after_notice_s < 30
    assert assert_whole(spec.dir).step >= 9
    assert assert_whole(spec.dir).manifest.inexact == ()
    resumed = server.run(drill.Spec(spec.dir))
    assert resumed.digest == uninterrupted(server, spec).digest


@pytest.mark.parametrize(("rank", "phase"), [(0, "save"), (1, "save"), (0, "commit")])
def test_where_one_rank_fails_all_go_to_the_fallback(server, tmp_path, rank, phase):
    fails = [{"rank": rank, "step": step, "phase": phase, "action": "EIO"} for step in (9, 10, 11)]
    term = {"rank": 0, "step": 9, "phase": "forward", "action": "TERM"}
    settings = {"fallback": str(tmp_path / "second"), "grace_period": 60.0}
    spec = drill.Spec(str(tmp_path / "run"), settings=settings, store="agent", faults=[term, *fails])
    outcome = server.run(spec, 90.0)
    assert outcome.codes == [143, 143], outcome.log
    assert outcome.after_notice_s < 30
    assert steps_in(spec.dir) == []
    newest = assert_whole(tmp_path / "second")
    resumed = server.run(drill.Spec(spec.dir, settings=settings))
    assert resumed.results[0]["first"] == newest.step
    assert resumed.digest == uninterrupted(server, spec).digest


def test_a_wall_clock_that_jumps_back_changes_nothing(server, tmp_path):
    faults = [{"rank": 0, "step": 9, "phase": "forward", "action": "TERM"}]
    spec = drill.Spec(str(tmp_path / "run"), 1, clock_jump_s=-86400.0, faults=faults)
    assert server.run(spec).codes == [143]
    resumed = server.run(drill.Spec(spec.dir, 1))
    assert resumed.digest == uninterrupted(server, spec).digest


# ---------------------------------------------------------------------- damage is found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
@pytest.mark.share(3)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(server, tmp_path, world, damage):
    spec = drill.Spec(str(tmp_path / "run"), world, epochs=1, save_every="4 steps")
    server.run(spec)
    newest, before = steps_in(spec.dir)[:2]
    target = Path(spec.dir, f"checkpoint-{newest}", "holdfast.json" if damage == "manifest" else "model.safetensors")
    data = bytearray(target.read_bytes())
    if damage == "remove":
        target.unlink()
    elif damage == "truncate":
        target.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        target.write_bytes(data)
    resumed = server.run(drill.Spec(spec.dir, world))
    assert resumed.codes == [0] * world, resumed.log
    assert resumed.results[0]["first"] == before
    assert f"checkpoint-{newest}" in resumed.log
    assert resumed.digest == uninterrupted(server, drill.Spec("", world)).digest


def test_nothing_but_damaged_checkpoints_means_from_the_start(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), 1, save_every="20 steps")
    server.run(spec)
    for path in Path(spec.dir).glob("checkpoint-*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-8] + b"damaged!")
    resumed = server.run(spec)
    assert resumed.results[0]["first"] == 0
    assert resumed.digest == uninterrupted(server, spec).digest


def test_what_one_rank_cannot_load_no_rank_has_loaded(server, tmp_path):
    """Else the ranks would go on from the start with different parameters."""
    spec = drill.Spec(str(tmp_path / "run"), 2, save_every="20 steps", epochs=2)
    server.run(spec)
    for path in Path(spec.dir).glob("checkpoint-*/rank-00001.safetensors"):
        path.write_bytes(path.read_bytes()[:-8] + b"damaged!")
    resumed = server.run(drill.Spec(spec.dir, 2))
    assert resumed.results[0]["first"] == 0, resumed.log
    assert resumed.digest == uninterrupted(server, drill.Spec("", 2)).digest


# ---------------------------------------------------------------------- who may write


def test_a_second_run_in_the_same_place_gets_a_clear_error_and_the_first_goes_on(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), 1, step_s=0.25)
    second = drill.Server()  # first: it takes longer to start on a busy machine than the training lasts
    try:
        job = server.start(spec)
        job.wait_for("training")
        other = second.run(drill.Spec(spec.dir, 1))
    finally:
        second.close()
    assert other.codes == [1]
    assert "is being written by another run" in other.log
    job.send(signal.SIGTERM, 0)
    assert job.wait().codes == [143]
    assert assert_whole(spec.dir)


# ---------------------------------------------------------------------- periodic saves


def test_saves_by_steps_count_from_the_last_commit_whatever_made_it(server, tmp_path):
    faults = [{"rank": 0, "step": 14, "phase": "forward", "action": "TERM"}]
    spec = drill.Spec(
        str(tmp_path / "run"), 1, save_every="10 steps", settings={"keep": 20}, step_s=0.02, faults=faults
    )
    server.run(spec)
    just_in_time = steps_in(spec.dir)[0]
    assert steps_in(spec.dir) == [just_in_time, 10]
    server.run(drill.Spec(**{**vars(spec), "faults": []}))
    assert steps_in(spec.dir)[-3:] == [just_in_time + 10, just_in_time, 10]


def test_saves_by_epoch_come_at_the_end_of_the_epoch(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), 2, save_every="1 epoch", settings={"keep": 20})
    server.run(spec)
    assert steps_in(spec.dir) == [36, 24, 12]
    for path in Path(spec.dir, "checkpoint-36").parent.glob("checkpoint-36"):
        os.rename(path, tmp_path / "gone")
    resumed = server.run(spec)
    assert resumed.results[0]["first"] == 24
    assert resumed.digest == uninterrupted(server, spec).digest


def test_saves_by_time_are_of_one_step_on_all_ranks(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), 2, save_every="0.4s", settings={"keep": 20}, step_s=0.15)
    outcome = server.run(spec)
    assert outcome.codes == [0, 0], outcome.log
    periodic = [event for event in journal(spec.dir) if event["event"] == "commit" and event["reason"] == "periodic"]
    assert len(periodic) >= 2
    assert_whole(spec.dir, minimum=3)
    assert outcome.digest == uninterrupted(server, spec).digest


def test_saves_by_time_wait_for_a_rank_that_is_behind(server, tmp_path):
    """The next save comes due while rank 0 is still on its way to the step of the last one, which rank 1 has passed."""
    behind = [
        {"rank": 0, "step": 9, "phase": "evaluation", "action": "HANG", "skew_s": 4.0},
        {"rank": 0, "step": 10, "phase": "after-optimizer", "action": "HANG", "skew_s": 4.0},
    ]
    spec = drill.Spec(str(tmp_path / "run"), save_every="2s", evaluate_every=3, faults=behind)
    outcome = server.run(spec)
    assert outcome.codes == [0, 0], outcome.log
    assert 10 in steps_in(spec.dir)
    assert outcome.digest == uninterrupted(server, spec).digest


def test_a_save_by_time_that_one_rank_did_not_hear_of_in_time_is_left_out(server, tmp_path):
    """It was decided without that rank, which may be further already."""
    faults = [
        {"rank": 0, "step": 10, "phase": "after-optimizer", "action": "HANG", "skew_s": 6.0},
        {"rank": 1, "step": 11, "phase": "forward", "action": "STOP"},
    ]
    spec = drill.Spec(str(tmp_path / "run"), save_every="2s", settings={"agree_timeout": 1.0}, faults=faults)
    job = server.start(spec)
    job.wait_for("agreement", silent=[1])
    job.send(signal.SIGCONT, 1)
    outcome = job.wait()
    assert outcome.codes == [0, 0], outcome.log
    assert "rank 1 did not answer" in {event["why"] for event in journal(spec.dir) if event["event"] == "skipped"}
    assert outcome.digest == uninterrupted(server, spec).digest


@pytest.mark.parametrize("told", [0, 1])
def test_a_rank_that_had_to_give_up_a_round_takes_part_again_when_the_store_wakes_up(server, tmp_path, told):
    """Rank 0, which keeps the store, is stopped in the middle of a round: rank 1 gets no answer."""
    spec = drill.Spec(
        str(tmp_path / "run"),
        epochs=20,
        save_every="0.5s",
        settings={"agree_timeout": 1.0},
        step_s=0.05,
        faults=[{"rank": 0, "step": 1, "phase": "round", "action": "STOP"}],
    )
    job = server.start(spec)
    until(lambda: Path(f"/proc/{job.pids[0]}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    time.sleep(2.5)  # rank 1 gives up after a second
    job.send(signal.SIGCONT, 0)
    woken = len(journal(spec.dir))
    end = time.monotonic() + 60
    while not any(event["event"] == "commit" for event in journal(spec.dir)[woken:]):
        assert time.monotonic() < end, last_events(spec.dir)
        time.sleep(0.05)
    job.send(signal.SIGTERM, told)
    outcome = job.wait(40.0)
    assert outcome.codes == [143, 143], outcome.log
    newest = assert_whole(spec.dir)
    assert newest.manifest.reason == "jit"
    assert newest.step >= last_completed_when_noticed(spec.dir)
    plain = drill.Spec(spec.dir, epochs=20)
    assert server.run(plain).digest == uninterrupted(server, plain).digest


def test_only_so_many_checkpoints_are_kept(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), 1, save_every="5 steps", settings={"keep": 2})
    server.run(spec)
    assert len(steps_in(spec.dir)) == 2


def test_incremental_saves_store_unchanged_files_once_and_resume_exactly(server, tmp_path):
    spec = drill.Spec(
        str(tmp_path / "run"), 1, frozen=True, save_every="10 steps", settings={"save_type": "incremental", "keep": 3}
    )
    server.run(spec)
    frozen = {path.stat().st_ino for path in Path(spec.dir).glob("checkpoint-*/model-00001-of-*.safetensors")}
    assert len(frozen) == 1
    os.rename(Path(spec.dir, f"checkpoint-{steps_in(spec.dir)[0]}"), tmp_path / "gone")
    resumed = server.run(spec)
    assert resumed.results[0]["first"] == 70
    assert resumed.digest == uninterrupted(server, spec).digest


# ---------------------------------------------------------------------- switched off, and free


def test_switched_off_it_leaves_no_trace(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), 1, env={"HOLDFAST_ENABLED": "0"})
    outcome = server.run(spec)
    assert outcome.codes == [0], outcome.log
    assert not Path(spec.dir).exists()
    assert outcome.digest == uninterrupted(server, spec).digest


def test_a_run_with_holdfast_trains_the_same_bits_as_one_without(server, tmp_path):
    on = server.run(drill.Spec(str(tmp_path / "on"), 2, workers=2, save_every="5 steps"))
    off = server.run(drill.Spec(str(tmp_path / "off"), 2, workers=2, env={"HOLDFAST_ENABLED": "0"}))
    assert on.digest == off.digest


def test_a_step_boundary_opens_no_file_starts_no_thread_and_talks_to_no_store(tmp_path):
    """Counted, not timed: system calls of the training thread between two boundaries."""
    import torch

    import holdfast

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.zeros(1, 2)] * 2000
    with holdfast.Run(tmp_path / "run", model=model, optimizer=optimizer, settings={"progress_every": 10**6}) as run:
        for _ in run.epochs(1):
            for index, _ in enumerate(run.batches(data)):
                if index == 100:
                    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
                    before = thread_syscalls()
                run.step()
                if index == 1900:
                    after = thread_syscalls()
                    assert threading.active_count() <= threads
                    assert len(os.listdir("/proc/self/fd")) <= files
    assert after - before <= 4, f"{after - before} voluntary waits in 1,800 boundaries"


def thread_syscalls() -> int:
    """How often this thread has waited for anything: a lock, a file, another process."""
    status = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text()
    return int(status.split("voluntary_ctxt_switches:")[1].split()[0])


# ---------------------------------------------------------------------- seen


def test_progress_is_right_after_a_resume(server, tmp_path):
    from holdfast.progress import read_progress

    faults = [{"rank": 0, "step": 20, "phase": "forward", "action": "TERM"}]
    spec = drill.Spec(str(tmp_path / "run"), 2, step_s=0.05, faults=faults)
    server.run(spec)
    at_stop = read_progress(Path(spec.dir, "training_progress.json"))
    assert at_stop["resumedFrom"] is None
    assert at_stop["totalSteps"] == 36
    assert at_stop["checkpointing"]["checkpointsCreated"] == 1
    job = server.start(drill.Spec(spec.dir, 2, step_s=0.15))
    step = job.wait_for("training", step=at_stop["step"])["step"]
    seen = await_progress(spec.dir, lambda progress: progress["resumedFrom"] is not None)
    assert seen["resumedFrom"] == f"checkpoint-{step}"
    assert seen["step"] >= step
    outcome = job.wait()
    assert outcome.codes == [0, 0], outcome.log
    end = read_progress(Path(spec.dir, "training_progress.json"))
    assert (end["step"], end["percentComplete"], end["estimatedTimeRemaining"]) == (36, "100.0", "0s")
    assert end["checkpointing"]["latestCheckpoint"] == f"{spec.dir}/checkpoint-36"
    assert end["checkpointing"]["checkpointsCreated"] == 2, "in all attempts"


def test_progress_is_written_every_so_many_steps_where_that_is_asked_for(tmp_path):
    import torch

    import holdfast
    from holdfast.progress import read_progress

    model = torch.nn.Linear(2, 2)
    file = tmp_path / "progress.json"
    settings = {"progress_every": 20, "progress_file": str(file)}
    with holdfast.Run(tmp_path / "run", model=model, settings=settings) as run:
        until(file.exists)  # once at the start
        for _ in run.epochs(1):
            for _ in run.batches([0] * 70):
                run.step(loss=0.5)
                if run.steps % 20 == 0:
                    until(lambda: read_progress(file)["step"] == run.steps)
                elif run.steps % 20 == 5:
                    time.sleep(0.2)
                    assert read_progress(file)["step"] == run.steps - 5


def test_goodput_knows_what_was_lost(server, tmp_path):
    from holdfast.progress import goodput

    faults = [{"rank": 0, "step": 9, "phase": "forward", "action": "KILL"}]
    spec = drill.Spec(str(tmp_path / "run"), 1, save_every="4 steps", step_s=0.05, faults=faults)
    server.run(spec)
    server.run(drill.Spec(spec.dir, 1))
    found = goodput(journal(spec.dir))
    assert found.attempts == 2
    assert found.steps_lost in (0, 1, 4)
    assert 0 < found.ratio < 1
    assert found.lost_restart_s > 0


class SpotEndpoint(http.server.BaseHTTPRequestHandler):
    """AWS's instance metadata service, as documented: a token first, then 404 until the reclaim is announced."""

    announced = False

    def do_PUT(self):
        self.answer(200, b"token")

    def do_GET(self):
        if self.headers.get("X-aws-ec2-metadata-token") != "token":
            self.answer(401, b"")
        elif self.path.endswith("/spot/instance-action") and SpotEndpoint.announced:
            moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60))
            self.answer(200, b'{"action": "terminate", "time": "%s"}' % moment.encode())
        else:
            self.answer(404, b"")

    def answer(self, code, body):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_spot_reclaim_announced_by_the_cloud_is_a_notice(server, tmp_path):
    endpoint = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SpotEndpoint)
    threading.Thread(target=endpoint.serve_forever, daemon=True).start()
    settings = {"cloud": "aws", "metadata_url": f"http://127.0.0.1:{endpoint.server_port}"}
    spec = drill.Spec(str(tmp_path / "run"), 2, step_s=0.5, settings=settings)
    try:
        job = server.start(spec)
        job.wait_for("training")
        SpotEndpoint.announced = True
        outcome = job.wait(40.0)
    finally:
        endpoint.shutdown()
    assert outcome.codes == [143, 143], outcome.log
    notice = next(event for event in journal(spec.dir) if event["event"] == "notice")
    assert notice["source"] == "aws"
    assert 30 < notice["grace_s"] <= 60
    assert_whole(spec.dir)


def test_a_location_that_hangs_while_the_end_is_committed_does_not_outlive_the_deadline(server, tmp_path):
    faults = [
        {"rank": 0, "step": 72, "phase": "save", "action": "TERM"},
        {"rank": 0, "step": 72, "phase": "save", "action": "HANG"},
    ]
    spec = drill.Spec(str(tmp_path / "run"), 1, save_every="30 steps", settings={"grace_period": 4.0}, faults=faults)
    outcome = server.run(spec)
    assert outcome.codes == [143], outcome.log
    assert outcome.after_notice_s < AFTER_NOTICE_S
    assert assert_whole(spec.dir).step == 60
    assert server.run(drill.Spec(spec.dir, 1)).digest == uninterrupted(server, spec).digest
