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


def test_a_board_that_is_closed_wakes_who_waits(boards):
    board, other = boards(), boards()
    ended = threading.Event()

    def wait():
        with pytest.raises(BoardLostError):
            board.wait("never", 600.0)
        ended.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    other.put_once("something", b"else")
    board.close()
    thread.join(60)
    assert ended.is_set(), "the thread is still inside the store, where the end of the interpreter would abort it"


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
    script = "import sys, time, torch.distributed as dist\n" + (
        "store = dist.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\nsys.stdin.read()"
    )
    keeper = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
