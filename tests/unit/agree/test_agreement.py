"""All ranks choose one step, on every kind of board."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.agree import Agreement, BoardLostError, BoundedBoard, Call, DirectoryBoard, LocalBoard
from holdfast.agree.torch_board import TorchBoard


@pytest.fixture(params=["local", "directory", "torch", "bounded"])
def boards(request, tmp_path):
    """Makes a rank's own view of one board."""
    if request.param == "local":
        one = LocalBoard()
        return lambda: one
    if request.param == "directory":
        return lambda: DirectoryBoard(str(tmp_path / "board"), poll_s=0.01)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    if request.param == "bounded":
        return lambda: BoundedBoard(TorchBoard(store, "test/"), 5.0)
    return lambda: TorchBoard(store, "test/")


def decide(agreements, steps, silent=(), broken=(), dead=()):
    def one(rank):
        agreements[rank].wait_for_call()
        return agreements[rank].decide(steps[rank], broken=rank in broken, dead=lambda: dead)

    with ThreadPoolExecutor(len(agreements)) as pool:
        ranks = [rank for rank in range(len(agreements)) if rank not in silent]
        decisions = [pool.submit(one, rank) for rank in ranks]
        agreements[ranks[-1]].call(Call(agreements[ranks[-1]].round, "stop", ranks[-1]))
        return [decision.result(20) for decision in decisions]


def test_the_highest_step_wins_and_all_hear_the_same(boards):
    agreements = [Agreement(boards(), rank, 4, 5.0) for rank in range(4)]
    for steps in ([3, 4, 3, 3], [9, 9, 9, 9], [12, 11, 11, 12]):
        decisions = decide(agreements, steps)
        assert {decision.step for decision in decisions} == {max(steps)}
        assert not any(decision.rescue for decision in decisions)


def test_a_silent_rank_turns_the_decision_into_a_rescue(boards):
    agreements = [Agreement(boards(), rank, 3, 2.0) for rank in range(3)]
    decisions = decide(agreements, [5, 5, 5], silent={1})
    assert all(decision.rescue and decision.silent == (1,) for decision in decisions)


def test_nobody_waits_for_ranks_that_are_seen_to_be_dead(boards):
    agreements = [Agreement(boards(), rank, 3, 60.0) for rank in range(3)]
    decisions = decide(agreements, [5, 5, 5], silent={1}, dead={1})
    assert all(decision.rescue and decision.silent == (1,) for decision in decisions)
    assert max(decision.seconds for decision in decisions) < 30


def test_a_silent_rank_elsewhere_is_waited_for_though_another_is_dead(boards):
    agreements = [Agreement(boards(), rank, 4, 3.0) for rank in range(4)]
    decisions = decide(agreements, [5, 5, 5, 5], silent={1, 2}, dead={1})
    assert all(decision.rescue and decision.silent == (1, 2) for decision in decisions)
    assert max(decision.seconds for decision in decisions) > 2.9


def test_a_broken_rank_turns_the_decision_into_a_rescue_at_once(boards):
    agreements = [Agreement(boards(), rank, 2, 60.0) for rank in range(2)]
    decisions = decide(agreements, [5, 6], broken={0})
    assert all(decision.rescue and not decision.silent for decision in decisions)


def test_several_callers_of_a_round_are_one_call(boards):
    agreements = [Agreement(boards(), rank, 3, 5.0) for rank in range(3)]
    for rank, agreement in enumerate(agreements):
        agreement.call(Call(0, "stop", rank, detail=f"from {rank}"))
    assert {agreement.wait_for_call().rank for agreement in agreements} == {0}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(0, 1000))
def test_no_rank_is_asked_to_stop_where_it_has_been_already(offsets, base):
    """Ranks are at most a step apart; each posts the step it is in. The decision is none that a rank has passed."""
    board = LocalBoard()
    agreements = [Agreement(board, rank, len(offsets), 5.0) for rank in range(len(offsets))]
    steps = [base + offset for offset in offsets]
    decisions = decide(agreements, steps)
    assert all(decision.step >= step for decision, step in zip(decisions, steps, strict=True))


def test_a_board_that_is_closed_wakes_its_own_waiter_and_no_other_one_for_good(boards):
    closing, staying, third = boards(), boards(), boards()
    if closing is staying:
        pytest.skip("one board for all ranks of a process is closed for all of them")
    with ThreadPoolExecutor(2) as pool:
        for round in range(3):
            woken, waiting = (pool.submit(board.wait, f"{round}/call", 30.0) for board in (closing, staying))
            time.sleep(0.05)  # both are blocked, most likely; the outcome is the same if not
            closing.close()
            with pytest.raises(BoardLostError):
                woken.result(20)
            assert third.put_once(f"{round}/call", b"now") == b"now"
            assert waiting.result(20) == b"now"
            assert staying.put_once(f"{round}/call", b"later") == third.get(f"{round}/call") == b"now"
            closing = boards()


KEEPER = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
AT_THE_END = """
import subprocess, sys, threading, time
import torch.distributed as dist
from holdfast.agree import BoardLostError, BoundedBoard
from holdfast.agree.torch_board import TorchBoard

kind, source = sys.argv[1:]
keeper = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
board = TorchBoard(dist.TCPStore("127.0.0.1", int(keeper.stdout.readline()), None, False, wait_for_workers=False), "a/")
if kind == "bounded":
    board = BoundedBoard(board, 30.0)

def watch():
    try:
        board.wait("never", 1000.0)
    except BoardLostError:
        pass

class AtTheEnd:
    def __init__(self, kill=keeper.kill, wait=keeper.wait, sleep=time.sleep):
        self.calls = kill, wait, lambda: sleep(1.0)
    def __del__(self):  # while the interpreter ends
        for call in self.calls:
            call()

last = AtTheEnd()
threading.Thread(target=watch, daemon=True).start()
time.sleep(0.5)
board.close()
print("closed")
"""


@pytest.mark.parametrize("kind", ["torch", "bounded"])
def test_a_process_ends_in_peace_when_the_keeper_of_its_closed_board_ends_in_the_same_moment(kind):
    command = [sys.executable, "-c", AT_THE_END, kind, KEEPER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


def test_a_board_whose_keeper_dies_says_so_to_who_waits():
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    board = TorchBoard(store, "test/")
    failed = []

    def wait():
        try:
            board.wait("never", 30.0)
        except BoardLostError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    del store  # ends the server
    import gc

    gc.collect()
    thread.join(60)
    if thread.is_alive():
        pytest.skip("this torch keeps the server alive in the process that waits")
    assert failed


def test_a_board_whose_keeper_hangs_is_lost_and_comes_back_with_it():
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert keeper.stdout is not None
        client = dist.TCPStore("127.0.0.1", int(keeper.stdout.readline()), None, False, wait_for_workers=False)
        board = BoundedBoard(TorchBoard(client, "test/"), 1.0)
        assert board.put_once("a", b"1") == b"1"
        keeper.send_signal(signal.SIGSTOP)
        for question in (lambda: board.wait("b", 0.1), lambda: board.get("a"), lambda: board.entries("a")):
            began = time.monotonic()
            with pytest.raises(BoardLostError, match="answer"):
                question()
            assert time.monotonic() - began < 15
        keeper.send_signal(signal.SIGCONT)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                assert board.get("a") == b"1"
                return
            except BoardLostError:
                time.sleep(0.05)
        pytest.fail("the board does not come back")
    finally:
        keeper.kill()
        keeper.wait()
