"""Signals as notices: every test sends real signals to a real process."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.notice import SignalSource
from holdfast.notice.signals import _Call, _Listener, _Reader

PRELUDE = """
import asyncio, contextlib, ctypes, logging, multiprocessing, os, queue, signal, subprocess, sys, threading, time
from signal import SIGINT, SIGTERM, SIGUSR1, SIGUSR2
from holdfast.errors import HoldfastError
from holdfast.notice import SignalSource, listen

notices = queue.Queue()
logged = []

class Log(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())

logging.getLogger("holdfast").addHandler(Log())

def send(signum):
    os.kill(os.getpid(), signum)

def heard():
    return notices.get(timeout=20).detail

def nothing_more():
    try:
        extra = notices.get(timeout=0.2)
    except queue.Empty:
        return
    raise AssertionError(f"one notice too many: {extra}")

def get_stuck():
    # A mutex that this thread holds already: no signal ends the wait, and no bytecode runs.
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    print("stuck", flush=True)
    libc.pthread_mutex_lock(mutex)

def ended_by(pid):
    status = os.waitpid(pid, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
"""


def start(body: str) -> subprocess.Popen[str]:
    code = PRELUDE + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the script hangs\n{out}\n{err}")
    return process.returncode, out, err


def passes(body: str) -> None:
    """Runs a script that asserts by itself."""
    code, out, err = finish(start(textwrap.dedent(body) + "\nprint('reached the end')\n"))
    assert (code, out.strip().splitlines()[-1:]) == (0, ["reached the end"]), f"exit {code}\n{out}\n{err}"


def wait_until_stuck(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "stuck\n"
    # The main thread sleeps only once it is inside the mutex: the other thread never wants the interpreter.
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.001)


class TestDelivery:
    def test_a_notice_comes_at_once_while_the_main_thread_is_stuck_in_c(self) -> None:
        process = start("""
            def deliver(notice):
                assert threading.current_thread() is not threading.main_thread()
                print(notice.source, notice.detail, notice.at, notice.wall, time.monotonic(), flush=True)
                os._exit(0)

            source = SignalSource()
            source.start(deliver)
            get_stuck()
        """)
        wait_until_stuck(process)
        sent, sent_wall = time.monotonic(), time.time()
        process.send_signal(signal.SIGTERM)
        code, out, err = finish(process)
        assert code == 0, err
        who, what, at, wall, delivered = out.split()
        assert (who, what) == ("signal", "SIGTERM")
        assert sent <= float(at) <= float(delivered) < sent + 20.0
        assert float(wall) == pytest.approx(sent_wall, abs=20.0)

    def test_every_further_signal_is_a_notice_of_its_own_while_the_main_thread_is_stuck(self) -> None:
        process = start("""
            source = SignalSource()
            source.start(lambda notice: print(notice.detail, flush=True))
            get_stuck()
        """)
        wait_until_stuck(process)
        assert process.stdout is not None
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "SIGTERM\n"
        process.kill()
        code, out, _ = finish(process)
        assert (code, out) == (-signal.SIGKILL, "")

    def test_one_signal_is_one_notice(self) -> None:
        passes("""
            source = SignalSource([SIGTERM, SIGUSR1])
            source.start(notices.put)
            for _ in range(100):
                send(SIGTERM)
                assert heard() == "SIGTERM"
            send(SIGUSR1)
            assert heard() == "SIGUSR1"
            nothing_more()
        """)

    def test_one_signal_is_one_notice_when_another_thread_takes_it(self) -> None:
        passes("""
            source = SignalSource()
            source.start(notices.put)
            over = threading.Event()
            other = threading.Thread(target=over.wait)
            other.start()
            for _ in range(100):
                signal.pthread_kill(other.ident, SIGTERM)
                while notices.empty():
                    pass  # keeps the main thread in bytecode, where it runs the handler before the byte is written
                assert heard() == "SIGTERM"
            nothing_more()
            over.set()
        """)

    def test_a_main_thread_waiting_for_a_lock_does_not_delay_the_notice(self) -> None:
        passes("""
            source = SignalSource()
            lock = threading.Lock()
            lock.acquire()
            source.start(lambda notice: (notices.put(notice), lock.release()))
            threading.Timer(0.05, send, [SIGTERM]).start()
            assert lock.acquire(timeout=20)
            assert heard() == "SIGTERM"
        """)

    def test_other_signals_are_not_notices(self) -> None:
        passes("""
            seen = []
            signal.signal(SIGUSR2, lambda *_: seen.append("SIGUSR2"))
            source = SignalSource()
            source.start(notices.put)
            send(SIGUSR2)
            send(SIGTERM)
            assert heard() == "SIGTERM"
            assert seen == ["SIGUSR2"]
            nothing_more()
        """)

    def test_a_receiver_that_fails_does_not_end_the_listening(self) -> None:
        passes("""
            def deliver(notice):
                notices.put(notice)
                raise SystemExit(9)

            source = SignalSource()
            source.start(deliver)
            for _ in range(2):
                send(SIGTERM)
                assert heard() == "SIGTERM"
        """)

    def test_several_sources_hear_the_same_signal_until_each_stops(self) -> None:
        passes("""
            first, second = SignalSource(), SignalSource([SIGTERM, SIGUSR1])
            others = queue.Queue()
            first.start(notices.put)
            second.start(others.put)
            send(SIGTERM)
            assert heard() == others.get(timeout=20).detail == "SIGTERM"
            first.stop()
            send(SIGTERM)
            assert others.get(timeout=20).detail == "SIGTERM"
            nothing_more()
            second.stop()
            assert signal.getsignal(SIGTERM) is signal.getsignal(SIGUSR1) is signal.SIG_DFL
        """)

    def test_a_handler_called_by_hand_is_a_notice(self) -> None:
        passes("""
            source = SignalSource()
            source.start(notices.put)
            signal.getsignal(SIGTERM)(SIGTERM, None)
            assert heard() == "SIGTERM"
            nothing_more()
        """)


class TestPairing:
    """The two reports of a signal: its byte (b); the handler's call while the descriptor was ours (c) or not (x)."""

    @pytest.mark.parametrize(
        ("reports", "notices"),
        [
            pytest.param([("b", 0.0), ("c", 0.0)], 1, id="the usual order"),
            pytest.param([("b", 0.0), ("c", 600.0)], 1, id="the main thread was in C for minutes"),
            pytest.param([("c", 0.0), ("b", 0.001)], 1, id="another thread wrote the byte after the handler ran"),
            pytest.param([("b", 0.0), ("b", 0.1), ("c", 0.1), ("c", 0.1)], 2, id="a second one inside the handler"),
            pytest.param([("b", 0.0), ("b", 0.1), ("c", 9.0)], 2, id="Python merged two calls"),
            pytest.param([("x", 0.0), ("x", 0.001)], 2, id="no bytes, somebody has the descriptor"),
            pytest.param([("b", 0.0), ("x", 0.0)], 1, id="the descriptor was taken between byte and handler"),
            pytest.param([("b", 0.0), ("b", 0.0), ("c", 0.0), ("x", 9.0)], 3, id="taken long after merged calls"),
            pytest.param([("c", 0.0), ("c", 0.01), ("b", 0.02)], 2, id="two handlers before the second byte"),
        ],
    )
    def test_one_signal_is_one_notice_in_whatever_order_they_come(
        self, reports: list[tuple[str, float]], notices: int
    ) -> None:
        listener = _Listener()
        reader = _Reader(listener, fd=-1)
        for kind, at in reports:
            if kind == "b":
                reader._on_byte(signal.SIGTERM, at, at)
            else:
                reader._on_call(_Call(signal.SIGTERM, at, at, fd_was_ours=kind == "c"))
        assert len(listener.pending) == notices


class TestEarlierHandlers:
    def test_an_earlier_handler_still_runs_in_the_main_thread_with_its_arguments(self) -> None:
        passes("""
            seen = []
            signal.signal(SIGTERM, lambda *args: seen.append((threading.current_thread().name, *args)))
            source = SignalSource()
            source.start(notices.put)
            send(SIGTERM)
            [(thread, signum, frame)] = seen
            assert (thread, signum) == ("MainThread", SIGTERM)
            assert frame.f_globals is globals()
            assert heard() == "SIGTERM"
        """)

    @pytest.mark.parametrize("raised", ["SystemExit(3)", "KeyboardInterrupt()", "RuntimeError('no')"])
    def test_an_earlier_handler_that_raises_does_not_end_the_training_loop(self, raised: str) -> None:
        passes(f"""
            def on_term(signum, frame):
                raise {raised}

            signal.signal(SIGTERM, on_term)
            source = SignalSource()
            source.start(notices.put)
            assert source.deferred_exit is None
            send(SIGTERM)
            assert heard() == "SIGTERM"
            assert repr(source.deferred_exit) == repr({raised})
            assert source.deferred_exit.__traceback__ is None
            source.stop()
            assert len(logged) == 1 and "__main__.on_term" in logged[0] and repr({raised}) in logged[0], logged
        """)

    def test_control_c_is_a_notice_and_not_a_keyboard_interrupt(self) -> None:
        passes("""
            source = SignalSource([SIGINT])
            source.start(notices.put)
            send(SIGINT)
            assert heard() == "SIGINT"
            assert source.deferred_exit is None
            source.stop()
            with contextlib.suppress(KeyboardInterrupt):
                send(SIGINT)
                raise AssertionError("after stop() it interrupts again")
        """)

    def test_an_ignored_signal_becomes_a_notice_and_is_ignored_again_after_stop(self) -> None:
        passes("""
            signal.signal(SIGTERM, signal.SIG_IGN)
            source = SignalSource()
            source.start(notices.put)
            send(SIGTERM)
            assert heard() == "SIGTERM"
            source.stop()
            send(SIGTERM)
            nothing_more()
        """)


class TestStopping:
    def test_stop_restores_the_handler_and_the_wakeup_descriptor_and_ends_the_thread(self) -> None:
        passes("""
            def mine(signum, frame):
                pass

            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            signal.set_wakeup_fd(writing)
            signal.signal(SIGTERM, mine)
            source = SignalSource()
            source.start(notices.put)
            assert signal.getsignal(SIGTERM) is not mine
            assert threading.active_count() == 2
            source.stop()
            assert signal.getsignal(SIGTERM) is mine
            assert signal.set_wakeup_fd(-1) == writing
            assert threading.active_count() == 1
        """)

    def test_after_stop_the_signal_kills_as_ever(self) -> None:
        code, _, err = finish(
            start("""
                source = SignalSource()
                source.start(notices.put)
                source.stop()
                send(SIGTERM)
            """)
        )
        assert code == -signal.SIGTERM, err

    def test_start_and_stop_may_repeat_without_leaving_anything_behind(self) -> None:
        passes("""
            source = SignalSource()
            counts = set()
            for _ in range(20):
                source.start(notices.put)
                send(SIGTERM)
                assert heard() == "SIGTERM"
                source.stop()
                counts.add((len(os.listdir("/proc/self/fd")), threading.active_count()))
            assert len(counts) == 1, counts
            nothing_more()
        """)

    def test_stop_leaves_a_handler_alone_that_replaced_ours(self) -> None:
        passes("""
            def theirs(signum, frame):
                pass

            source = SignalSource()
            source.start(notices.put)
            signal.signal(SIGTERM, theirs)
            source.stop()
            assert signal.getsignal(SIGTERM) is theirs
        """)

    def test_a_source_stopped_in_another_thread_leaves_the_signal_deadly(self) -> None:
        code, _, err = finish(
            start("""
                source = SignalSource()
                source.start(notices.put)
                stopper = threading.Thread(target=source.stop)
                stopper.start()
                stopper.join()
                send(SIGTERM)
                time.sleep(20)
            """)
        )
        assert code == -signal.SIGTERM, err


class TestReplacement:
    def test_who_replaced_our_handler_is_named(self) -> None:
        passes("""
            class Library:
                def on_term(self, signum, frame):
                    pass

            class Callable:
                def __call__(self, signum, frame):
                    pass

            source = SignalSource([SIGTERM, SIGUSR1, SIGUSR2])
            source.start(notices.put)
            assert source.replaced() is None
            signal.signal(SIGTERM, Library().on_term)
            assert source.replaced() == "SIGTERM by __main__.Library.on_term"
            signal.signal(SIGUSR1, signal.SIG_IGN)
            signal.signal(SIGUSR2, Callable())
            assert source.replaced() == (
                "SIGTERM by __main__.Library.on_term, SIGUSR1 by SIG_IGN, SIGUSR2 by __main__.Callable"
            )
        """)

    def test_reinstall_hears_again_and_still_calls_the_replacement(self) -> None:
        passes("""
            seen = []
            source = SignalSource()
            source.start(notices.put)
            signal.set_wakeup_fd(-1)
            signal.signal(SIGTERM, lambda *_: seen.append("theirs"))
            send(SIGTERM)
            nothing_more()
            assert source.reinstall()
            assert source.replaced() is None
            send(SIGTERM)
            assert heard() == "SIGTERM"
            assert seen == ["theirs", "theirs"]
            nothing_more()
        """)

    def test_after_reinstall_a_stuck_main_thread_delays_nothing_and_the_other_descriptor_is_served(self) -> None:
        process = start("""
            reading, writing = os.pipe()
            os.set_blocking(writing, False)

            def deliver(notice):
                print(notice.detail, flush=True)
                os._exit(0)

            source = SignalSource()
            source.start(deliver)
            signal.set_wakeup_fd(writing)
            signal.signal(SIGUSR2, lambda *_: None)
            source.reinstall()
            send(SIGUSR2)
            assert os.read(reading, 10) == bytes([SIGUSR2])
            get_stuck()
        """)
        wait_until_stuck(process)
        process.send_signal(signal.SIGTERM)
        code, out, err = finish(process)
        assert (code, out) == (0, "SIGTERM\n"), err

    def test_a_replacement_that_calls_ours_reaches_the_handler_before_it_once(self) -> None:
        passes("""
            seen = []
            signal.signal(SIGTERM, lambda *_: seen.append("oldest"))
            source = SignalSource()
            source.start(notices.put)
            ours = signal.getsignal(SIGTERM)

            def chaining(signum, frame):
                seen.append("chaining")
                ours(signum, frame)

            signal.signal(SIGTERM, chaining)
            for _ in range(3):
                send(SIGTERM)
                assert heard() == "SIGTERM"
                assert seen == ["chaining", "oldest"]
                seen.clear()
                source.reinstall()
            source.stop()
            send(SIGTERM)
            assert seen == ["chaining", "oldest"]
            nothing_more()
        """)

    def test_a_notice_comes_though_another_library_took_the_wakeup_descriptor(self) -> None:
        passes("""
            source = SignalSource()
            source.start(notices.put)
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            signal.set_wakeup_fd(writing)
            for _ in range(3):
                send(SIGTERM)
                assert heard() == "SIGTERM"
            nothing_more()
            assert os.read(reading, 10) == bytes([SIGTERM] * 3)
            assert signal.set_wakeup_fd(-1) == writing
        """)

    def test_a_forwarded_byte_never_lands_in_a_file_that_got_the_number_of_a_closed_descriptor(self) -> None:
        passes("""
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            signal.set_wakeup_fd(writing)
            source = SignalSource()
            source.start(notices.put)
            send(SIGTERM)
            assert heard() == "SIGTERM"
            assert os.read(reading, 10) == bytes([SIGTERM])
            checkpoint = os.memfd_create("checkpoint")
            os.dup2(checkpoint, writing)
            send(SIGTERM)
            assert heard() == "SIGTERM"
            source.stop()
            assert os.fstat(checkpoint).st_size == 0
        """)


class TestAsyncio:
    def test_a_loop_that_was_there_first_keeps_its_signals(self) -> None:
        passes("""
            async def main():
                loop, theirs = asyncio.get_running_loop(), asyncio.Event()
                loop.add_signal_handler(SIGUSR1, theirs.set)
                source = SignalSource()
                source.start(notices.put)
                send(SIGUSR1)
                await asyncio.wait_for(theirs.wait(), 20)
                send(SIGTERM)
                assert await asyncio.to_thread(heard) == "SIGTERM"
                source.stop()
                theirs.clear()
                send(SIGUSR1)
                await asyncio.wait_for(theirs.wait(), 20)

            asyncio.run(main())
            nothing_more()
        """)

    def test_a_loop_that_comes_later_leaves_us_our_signals(self) -> None:
        passes("""
            source = SignalSource()
            source.start(notices.put)

            async def main():
                loop, theirs = asyncio.get_running_loop(), asyncio.Event()
                loop.add_signal_handler(SIGUSR1, theirs.set)
                send(SIGTERM)
                assert await asyncio.to_thread(heard) == "SIGTERM"
                send(SIGUSR1)
                await asyncio.wait_for(theirs.wait(), 20)

            asyncio.run(main())
            for _ in range(2):
                send(SIGTERM)
                assert heard() == "SIGTERM"
            nothing_more()
        """)

    def test_a_loop_that_takes_our_very_signal_is_named_and_shares_it_after_reinstall(self) -> None:
        passes("""
            source = SignalSource()
            source.start(notices.put)

            async def main():
                loop, theirs = asyncio.get_running_loop(), asyncio.Event()
                loop.add_signal_handler(SIGTERM, theirs.set)
                assert source.replaced() == "SIGTERM by asyncio.unix_events._sighandler_noop"
                source.reinstall()
                send(SIGTERM)
                assert await asyncio.to_thread(heard) == "SIGTERM"
                await asyncio.wait_for(theirs.wait(), 20)

            asyncio.run(main())
            nothing_more()
        """)


class TestForkedChildren:
    def test_a_forked_child_dies_of_the_signal_and_the_parent_hears_nothing(self) -> None:
        passes("""
            source = SignalSource()
            source.start(notices.put)
            pid = os.fork()
            if pid == 0:
                signal.pause()
                os._exit(0)
            os.kill(pid, SIGTERM)
            assert ended_by(pid) == -SIGTERM
            send(SIGTERM)
            assert heard() == "SIGTERM"
            nothing_more()
        """)

    def test_a_signal_in_the_first_moment_of_a_child_is_not_the_parents(self) -> None:
        passes("""
            def in_the_window():
                # Registered before ours, so it runs while the child still has the parent's handler and pipe.
                os.write(writing, b"!")
                deadline = time.monotonic() + 5
                while SIGTERM not in signal.sigpending() and time.monotonic() < deadline:
                    pass

            reading, writing = os.pipe()
            os.register_at_fork(after_in_child=in_the_window)
            source = SignalSource()
            source.start(notices.put)
            pid = os.fork()
            if pid == 0:
                signal.pause()
                os._exit(0)
            assert os.read(reading, 1) == b"!"
            os.kill(pid, SIGTERM)
            assert ended_by(pid) == -SIGTERM
            nothing_more()
            assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
            send(SIGTERM)
            assert heard() == "SIGTERM"
        """)

    def test_a_child_gets_back_the_handler_and_the_mask_of_before(self) -> None:
        passes("""
            signal.signal(SIGTERM, lambda *_: os._exit(7))
            source = SignalSource()
            source.start(notices.put)
            pid = os.fork()
            if pid == 0:
                if signal.set_wakeup_fd(-1) == -1 and not signal.pthread_sigmask(signal.SIG_BLOCK, ()):
                    send(SIGTERM)
                    signal.pause()
                os._exit(0)
            assert ended_by(pid) == 7
            nothing_more()
        """)

    def test_a_child_forked_by_another_thread_dies_of_the_signal(self) -> None:
        passes("""
            def fork():
                pid = os.fork()
                if pid == 0:
                    signal.pause()
                    os._exit(0)
                os.kill(pid, SIGTERM)
                ends.append(ended_by(pid))

            ends = []
            source = SignalSource()
            source.start(notices.put)
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
            assert ends == [-SIGTERM]
            nothing_more()
        """)

    def test_a_child_may_listen_for_itself(self) -> None:
        passes("""
            source = SignalSource()
            source.start(notices.put)
            pid = os.fork()
            if pid == 0:
                source.stop()
                assert not source.deaf
                source.start(notices.put)
                send(SIGTERM)
                os._exit(5 if heard() == "SIGTERM" else 6)
            assert ended_by(pid) == 5
            nothing_more()
            send(SIGTERM)
            assert heard() == "SIGTERM"
        """)

    def test_a_multiprocessing_worker_can_be_terminated(self) -> None:
        passes("""
            source = SignalSource()
            source.start(notices.put)
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            worker.start()
            worker.terminate()
            worker.join(20)
            assert worker.exitcode == -SIGTERM, worker.exitcode
            nothing_more()
        """)

    def test_a_terminated_dataloader_worker_is_no_notice(self) -> None:
        pytest.importorskip("torch")
        passes("""
            from torch.utils.data import DataLoader, Dataset

            class Pids(Dataset):
                def __len__(self):
                    return 1000

                def __getitem__(self, index):
                    return os.getpid()

            source = SignalSource()
            source.start(notices.put)
            batches = iter(DataLoader(Pids(), batch_size=1, num_workers=2))
            workers = {int(next(batches)) for _ in range(2)}
            assert len(workers) == 2 and os.getpid() not in workers
            # torch's own handler raises in the main thread at any later moment; a quiet one keeps SIGCHLD coming.
            signal.signal(signal.SIGCHLD, lambda *_: None)
            victim = batches._workers[0]
            subprocess.run(["kill", "-TERM", str(victim.pid)], check=True)
            victim.join(20)
            assert victim.exitcode == -SIGTERM, victim.exitcode
            nothing_more()
            send(SIGTERM)
            assert heard() == "SIGTERM"
        """)


class TestOutsideTheMainThread:
    def test_a_source_says_that_it_is_deaf_and_what_to_do(self) -> None:
        passes("""
            source = SignalSource([SIGTERM, SIGUSR1])
            thread = threading.Thread(target=source.start, args=(notices.put,), name="trainer")
            thread.start()
            thread.join()
            assert source.deaf
            [warning] = logged
            for word in ("SIGTERM, SIGUSR1", "holdfast.listen()", "main thread", "'trainer'"):
                assert word in warning, warning
            source.stop()
            assert not source.deaf
            assert signal.getsignal(SIGTERM) is signal.SIG_DFL
        """)

    def test_a_source_hears_what_the_main_thread_listens_for(self) -> None:
        passes("""
            listen()
            listen()
            source = SignalSource()
            thread = threading.Thread(target=source.start, args=(notices.put,))
            thread.start()
            thread.join()
            assert not source.deaf and not logged
            send(SIGTERM)
            assert heard() == "SIGTERM"
            nothing_more()
        """)

    def test_a_deaf_source_hears_once_the_main_thread_listens(self) -> None:
        passes("""
            source = SignalSource()
            thread = threading.Thread(target=source.start, args=(notices.put,))
            thread.start()
            thread.join()
            listen()
            assert not source.deaf
            send(SIGTERM)
            assert heard() == "SIGTERM"
        """)

    def test_listen_in_another_thread_is_refused(self) -> None:
        passes("""
            def attempt():
                try:
                    listen([SIGUSR1])
                except HoldfastError as error:
                    refusals.append(str(error))

            refusals = []
            thread = threading.Thread(target=attempt, name="trainer")
            thread.start()
            thread.join()
            [refusal] = refusals
            assert "SIGUSR1" in refusal and "'trainer'" in refusal and "main thread" in refusal, refusal
            source = SignalSource()
            source.start(notices.put)
            assert signal.getsignal(SIGUSR1) is signal.SIG_DFL
        """)

    def test_a_signal_between_listen_and_start_is_not_lost(self) -> None:
        passes("""
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            signal.set_wakeup_fd(writing)
            signal.signal(SIGUSR2, lambda *_: None)
            listen()
            before = time.monotonic()
            send(SIGTERM)
            assert os.read(reading, 1) == bytes([SIGTERM])
            after = time.monotonic()
            send(SIGUSR2)
            assert os.read(reading, 1) == bytes([SIGUSR2])  # forwarded: the one before has been dealt with
            source = SignalSource()
            source.start(notices.put)
            notice = notices.get(timeout=20)
            assert notice.detail == "SIGTERM" and before <= notice.at < after + 1
            nothing_more()
        """)

    def test_a_second_signal_before_any_start_acts_as_without_us(self) -> None:
        code, out, err = finish(
            start("listen()\nsend(SIGTERM)\nprint('kept', flush=True)\nsend(SIGTERM)\nprint('alive')")
        )
        assert (code, out) == (-signal.SIGTERM, "kept\n"), err

    def test_after_the_last_source_stopped_the_signal_kills_though_the_listener_stays(self) -> None:
        code, out, err = finish(
            start("""
                listen()
                source = SignalSource()
                source.start(notices.put)
                send(SIGTERM)
                print(heard(), flush=True)
                source.stop()
                send(SIGTERM)
                print("alive")
            """)
        )
        assert (code, out) == (-signal.SIGTERM, "SIGTERM\n"), err


class TestImport:
    def test_importing_installs_nothing(self) -> None:
        passes("""
            assert threading.active_count() == 1
            assert signal.getsignal(SIGTERM) is signal.SIG_DFL
            assert signal.set_wakeup_fd(-1) == -1
            assert "torch" not in sys.modules
        """)


class TestChoice:
    @pytest.mark.parametrize(("name", "reason"), [("SIGKILL", "never shows it"), ("SIGSEGV", "repeats the fault")])
    def test_signals_that_cannot_be_notices_are_refused_with_the_reason(self, name: str, reason: str) -> None:
        with pytest.raises(ConfigError, match=f"{name}.*{reason}"):
            SignalSource([signal.Signals[name]])

    def test_a_source_needs_a_signal(self) -> None:
        with pytest.raises(ConfigError, match="empty"):
            SignalSource([])
