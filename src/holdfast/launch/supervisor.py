"""The launcher: starts the script, starts it again when it was interrupted, and leaves nobody behind.

::

    RUNNING ──pause──► STOPPING ──all gone──► PAUSED ──resume──► RUNNING
       │                   ▲                     │
       ├──TERM, INT, HUP───┘ ──all gone──► LEFT ◄┘ TERM, INT, HUP
       ├──exit 0──────────────────────────► LEFT
       └──anything else──► judged: start again at once, or after a wait, or LEFT

Guarantees:

- A signal to the launcher reaches each rank once and nobody else: not the ranks' loader workers, which
  would die of it while their rank still needs them. The launcher waits for the ranks as long as the
  grace period lasts, then kills what is left.
- When the launcher has ended, every process that descends from the script has ended too. Processes
  that lose their parent become children of the launcher.
- If the launcher itself is killed, the kernel sends the ranks SIGTERM (:mod:`holdfast.launch.leash`), and
  they save and leave. The kernel does so when the thread that started them ends: hence everything here
  runs in the main thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
from types import FrameType
from typing import Any, Protocol

from holdfast.base.clock import Deadline
from holdfast.base.process import Owner
from holdfast.base.run_directory import home_of
from holdfast.base.small_files import read_json
from holdfast.config import Settings, settings_table, without_credentials
from holdfast.errors import ConfigError, LocationBusyError
from holdfast.launch import own_starts, procs
from holdfast.launch.family import Family
from holdfast.launch.outcome import Ended, Verdict, exit_code, judge, what_happened, what_is_saved
from holdfast.launch.records import (
    ENDED,
    PAUSED,
    RUNNING,
    Attempt,
    Launch,
    LaunchSpec,
    carried_names,
    read_attempt,
    read_launch,
    read_request,
    write_json,
)
from holdfast.launch.runs import FOLDER, RUNS, STARTING, RunPlace
from holdfast.launch.watch import Tail, View
from holdfast.locations import expanded
from holdfast.progress import Journal, redact_uri

_ENDINGS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
_LOOK_S = 0.25
_MARGIN_S = 5.0
"""Beyond the grace period, for the way out of the processes."""
_LONGEST_BACKOFF_S = 30.0
_OLD_REQUEST_S = 5.0
"""Made that long before this launcher was there, a request was for another; clocks may be set a little."""
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_WARNINGS = {
    "save_failed": "a save failed",
    "unusable": "cannot use",
    "handler_replaced": "a preemption would not be noticed, the signal handler was replaced",
}
_LAUNCHER_RANK = -1


def carried_environ() -> dict[str, str]:
    """What of this environment has to be the same when the run is started again."""
    names = carried_names() - set(settings_table()["resume"].env)
    return without_credentials({name: value for name, value in os.environ.items() if name in names})


class Screen(Protocol):
    """Where a launcher tells people what happens."""

    def stdio(self) -> tuple[int | None, int | None]:
        """Descriptors for the script's output and errors; None: those of this process."""

    def say(self, event: str, text: str, **values: Any) -> None:
        """Something happened: one line."""

    def show(self, view: View) -> None:
        """How it is going, several times a second."""


class _Wish(enum.Enum):
    """What someone wants of the launcher."""

    NONE = "go on"
    PAUSE = "pause"
    END = "end"


class Supervisor:
    """Runs one script until it is done, given up, or told to end.

    Use it once, in the main thread of a process that has no other children: all of them are ended with the run.
    """

    def __init__(self, spec: LaunchSpec, screen: Screen) -> None:
        self.spec = spec
        self.screen = screen
        self.environ = child_environ(spec)
        self.settings = Settings.load(self.environ)
        if self.settings.resume == "never":
            for name in settings_table()["resume"].env:
                self.environ.pop(name, None)  # for the first start only, see _start
        self.place: RunPlace | None = None
        """Where the run is, once that is known: the script may choose the location itself."""
        self.view = View()
        self._owner = Owner("launcher")
        self._journal: Journal | None = None
        self._tail: Tail | None = None
        self._attempt: Attempt | None = None
        self._announced = (0, 0)
        self._first_number = 0
        self._events: list[dict[str, Any]] = []
        self._family = Family(self._wait)
        self._started = False
        self._fresh = self.settings.resume == "never"
        self._starts = 0
        self._launched = 0.0
        self._failures = 0
        self._wish = _Wish.NONE
        self._ending = signal.SIGTERM
        self._request, self._asked = "", False
        self._born = time.time()
        self._interrupts = 0
        self._deadline: Deadline | None = None
        self._signals: list[int] = []
        self._folder = ""
        self._wake = (-1, -1)

    # ------------------------------------------------------------------ start and end

    def run(self) -> int:
        """Returns the exit code: the script's, or that of the signal that ended it."""
        home = expected_home(self.spec, self.settings)
        check_free(home)
        self._folder = tempfile.mkdtemp(prefix=FOLDER)
        write_json(os.path.join(self._folder, STARTING), self._owner.as_dict())
        before = self._listen()
        try:
            procs.become_subreaper()
            if os.path.isdir(home):
                self._know(home)
            while True:
                code = self._after(self._try())
                if code is not None:
                    return code
        finally:
            self._family.kill()
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._wake[0])
            os.close(self._wake[1])
            shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self) -> dict[signal.Signals, Any]:
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        before: dict[signal.Signals, Any] = {}
        for number in (*_ENDINGS, signal.SIGUSR1, signal.SIGCHLD):
            if number is not signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored: under nohup
                before[number] = signal.signal(number, self._on_signal)
        return before

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:  # that one only ends the wait
            self._signals.append(number)

    def _leave(self, code: int) -> int:
        self._write(ENDED, code=code)
        self._record("exit", code=code, step=self.view.saved_step)
        if self._journal is not None:
            self._journal.sync()
        return code

    def _after(self, ended: Ended) -> int | None:
        """What follows from the end of an attempt: an exit code, or None to start again."""
        jit_code = self.settings.exit_code
        verdict = judge(ended, jit_code)
        if verdict is Verdict.DONE and (self._wish is _Wish.NONE or "complete" in ended.outcomes):
            step = f" at step {ended.step}" if ended.step is not None else ""
            self.screen.say("complete", f"complete{step}", step=ended.step)
            return self._leave(0)
        if self._wish is _Wish.NONE:
            happened = "; ".join(text for text in (what_happened(ended, jit_code), what_is_saved(ended)) if text)
            self._failures = self._failures + 1 if verdict is Verdict.RETRY else 0
            if self._failures > self.spec.max_restarts:
                code = exit_code(ended)
                self.screen.say(
                    "gave_up",
                    f"{happened}. Given up after {self.spec.max_restarts} restarts without a new checkpoint "
                    f"(--max-restarts), exit code {code}",
                    code=code,
                )
                return self._leave(code)
            self._announce_restart(happened, verdict)
        if self._wish is _Wish.PAUSE:
            self._stay_paused()
        return self._end() if self._wish is _Wish.END else None

    def _announce_restart(self, happened: str, verdict: Verdict) -> None:
        wait_s = min(_LONGEST_BACKOFF_S, 2.0 ** (self._failures - 1)) if verdict is Verdict.RETRY else 0.0
        saved = self.view.saved_step
        where = "from the start" if saved is None else f"from step {saved}"
        when = f"in {wait_s:.0f} s " if wait_s else ""
        count = f" (restart {self._failures} of {self.spec.max_restarts})" if verdict is Verdict.RETRY else ""
        self.view.restarts += 1
        self.screen.say("restart", f"{happened}; going on {when}{where}{count}", step=saved, wait_s=wait_s)
        until = Deadline.after(wait_s)
        self.view.state = "waiting"
        while not until.passed() and self._wish is _Wish.NONE:
            self._wait(until.remaining_s())

    def _end(self) -> int:
        saved = self.view.saved_step
        what = "nothing was saved" if saved is None else f"saved at step {saved}; the same command goes on from there"
        self.screen.say("stopped", f"{self._ending.name}: {what}", step=saved)
        return self._leave(_ENDINGS[self._ending])

    # ------------------------------------------------------------------ one attempt

    def _try(self) -> Ended:
        """Start the script; returns when it and all that it started are gone."""
        self._events, self._attempt, self._announced, self._deadline = [], None, (0, 0), None
        announced, report = os.path.join(self._folder, "announced"), os.path.join(self._folder, "report")
        for path in (announced, report):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._start(announced, report)
        while (code := self._family.poll()) is None:
            self._wait(_LOOK_S)
            self._look(announced)
            if self._out_of_time():
                self._family.kill()
            elif self._wish is not _Wish.NONE:
                self._family.tell_ranks()
        ranks = self._live_ranks()
        if ranks and self._deadline is None:  # torchrun is gone and they are not
            self._deadline = Deadline.after(self._grace_s() + _MARGIN_S)
        self._family.clear_up(ranks, self._out_of_time)
        self._started = False
        self._look(announced)
        codes = {int(rank): int(code) for rank, code in read_json(report).items()}
        return Ended(code, codes, self._events, "the script" if self.spec.workers is None else "torchrun")

    def _start(self, announced: str, report: str) -> None:
        self._starts += 1
        environ = {**self.environ, "HOLDFAST_ANNOUNCE": announced}
        if self._fresh:
            environ["HOLDFAST_RESUME"] = "never"
        wait_s = self._grace_s() + _MARGIN_S
        environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(max(math.ceil(wait_s), _number(environ, _SHUTDOWN)))
        command = [sys.executable, "-u", *self.spec.program]
        if self.spec.workers is not None:
            agent = [sys.executable, "-m", "holdfast.launch.agent", report, str(wait_s), self.spec.workers, "--"]
            command = agent + command
        self.view.state = "starting"
        self._write(RUNNING)
        self._launched = time.time()
        self._record("launch", pid=os.getpid(), start=self._starts)
        self._started = True
        self._family.start(
            command,
            torchrun=self.spec.workers is not None,
            environ=environ,
            cwd=self.spec.cwd,
            stdio=self.screen.stdio(),
        )

    def _grace_s(self) -> float:
        attempt = self._attempt or (read_attempt(self.place.home) if self.place else None)
        return max(self.settings.grace_period, attempt.grace_s if attempt else 0.0)

    def _wait(self, seconds: float) -> None:
        """Until something happens, and no longer than that."""
        with contextlib.suppress(InterruptedError):
            select.select([self._wake[0]], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake[0], 4096)
        procs.reap_adopted(but=self._family.pid)
        while self._signals:
            self._take(signal.Signals(self._signals.pop(0)))

    def _take(self, number: signal.Signals) -> None:
        if number is signal.SIGUSR1:
            self._asked = True
            self._take_request()
            return
        if self._wish is not _Wish.END:
            self._wish, self._ending = _Wish.END, number
            if self._started:
                self._begin_stop(f"{number.name}: saving, then leaving")
        if number is signal.SIGINT:
            self._interrupts += 1
            left = self._deadline.remaining_s() if self._deadline is not None else 0.0
            if self._interrupts == 2:
                self.screen.say("waiting", f"still saving, {left:.0f} s left at most. Ctrl-C once more kills it")
            elif self._interrupts > 2:
                self._deadline = Deadline.after(0.0)

    def _take_request(self) -> None:
        if self.place is None:
            return
        request, action = read_request(self.place.home, since=self._born - _OLD_REQUEST_S)
        if request in ("", self._request):
            return  # it may lie in the home that rank 0 is about to name: asked for again when it does
        self._request, self._asked = request, False
        if action == "pause" and self._wish is _Wish.NONE:
            self._wish = _Wish.PAUSE
            if self._started:
                self._begin_stop("pausing: saving first")
        elif action == "resume" and self._wish is _Wish.PAUSE and not self._started:
            self._wish = _Wish.NONE

    def _begin_stop(self, text: str) -> None:
        if self._deadline is None:
            self._deadline = Deadline.after(self._grace_s() + _MARGIN_S)
        self.view.state = "saving"
        self.screen.say("stopping", text)

    def _live_ranks(self) -> set[int]:
        live = self._attempt.live() if self._attempt is not None else {}
        return {owner.pid for owner in live.values()}

    def _out_of_time(self) -> bool:
        return self._deadline is not None and self._deadline.passed()

    # ------------------------------------------------------------------ what is seen of it

    def _look(self, announced: str) -> None:
        with contextlib.suppress(OSError):
            stat = os.stat(announced)
            if self._announced != (stat.st_ino, stat.st_mtime_ns):  # a script may have one run after the other
                self._announced = (stat.st_ino, stat.st_mtime_ns)
                with open(announced, encoding="utf-8") as file:
                    self._on_announced(file.read())
        if self._tail is not None and self._attempt is not None:
            for event in self._tail.new():
                if event.get("attempt", -1) >= self._first_number and event.get("rank", -1) >= 0:
                    self._events.append(event)
                    self._note(event)
            assert self.place is not None
            self.view.take_progress(self.place.progress())
        self.screen.show(self.view)

    def _on_announced(self, home: str) -> None:
        """Rank 0 says where the run is."""
        attempt = read_attempt(home)
        if attempt is None:
            return
        first_word = self._journal is None or self.place is None or self.place.home != home
        if self._attempt is None or first_word:
            self._first_number = attempt.number
        self._attempt = attempt
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._folder, STARTING))
        self.environ["HOLDFAST_RUN_ID"] = attempt.run
        self.view.attempt, self.view.ranks = attempt.number, len(attempt.ranks)
        if first_word:
            if self.spec.dir is not None and home != expected_home(self.spec, self.settings):
                where = redact_uri(attempt.location)
                self.screen.say("elsewhere", f"--dir is not used: the script itself saves to {where}", location=where)
            self._know(home)
            self._write(RUNNING)
            if self._asked:
                self._take_request()
            self._record("launch", pid=os.getpid(), start=self._starts, at=self._launched)

    def _know(self, home: str) -> None:
        """From now on this is the run's home."""
        attempt = self._attempt or read_attempt(home)
        location = attempt.location if attempt is not None else self.settings.dir or os.path.dirname(home)
        self.place = RunPlace(location, home)
        # A run that announces itself has lines already; those of its earlier attempts are told apart by number.
        self._tail = Tail(self.place.journal_path, from_start=self._attempt is not None)
        if attempt is not None:
            self._journal = Journal(
                self.place.journal_path, run_id=attempt.run, attempt=attempt.number, rank=_LAUNCHER_RANK
            )

    def _note(self, event: dict[str, Any]) -> None:
        """What people should see of a line in the journal."""
        self.view.take_event(event)
        what, rank = event["event"], event.get("rank")
        if what == "attempt":
            self._fresh = False  # what was there is set aside now; the next start goes on from here
            self.view.state = "loading"
            self.view.step = event.get("step")
            if self._starts == 1:
                resumed = event.get("resumed_from")
                where = "from the start" if resumed is None else f"from step {resumed}"
                said = redact_uri(str(event.get("location", "")))
                self.screen.say("started", f"training {where}, checkpoints in {said}", step=resumed, location=said)
        elif what == "training":
            self.view.state = "running"
        elif what == "notice" and not event.get("repeated") and self.view.state != "saving":
            self.view.state = "saving"
            assert self._attempt is not None
            gone = sorted(self._attempt.ranks.keys() - self._attempt.live().keys())
            text = f"rank {rank} got {event.get('detail', 'a notice')}, saving"
            if gone and rank not in gone:  # torchrun tells the others to leave
                text = f"rank {gone[0]} is gone, rank {rank} saves"
            self.screen.say("notice", text, rank=rank, step=event.get("step"))
        elif what in _WARNINGS:
            told = event.get("error") or event.get("by") or ""
            self.screen.say("warning", f"{_WARNINGS[what]} {event.get('name', '')}: {told}".replace(" :", ":"))

    def _record(self, event: str, **values: Any) -> None:
        if self._journal is not None:
            if self._attempt is not None:
                self._journal.attempt = self._attempt.number
            self._journal.record(event, **values)

    def _write(self, state: str, **values: Any) -> None:
        if self.place is not None:
            other = read_launch(self.place.home)
            if state != RUNNING and other is not None and other.owner != self._owner and other.is_alive():
                return  # another launcher has taken over while this one was paused
            launch = Launch(
                owner=self._owner,
                spec=dataclasses.replace(self.spec, fresh=self._fresh),
                state=state,
                step=self.view.saved_step,
                control=self._request,
                **values,
            )
            own_starts.remember(self.place.home, launch.spec)
            try:
                launch.write(self.place.home)
            except OSError as error:
                self.screen.say("warning", f"cannot write into {self.place.home}: {error.strerror}")

    def _stay_paused(self) -> None:
        """Until someone wants to go on, or the launcher to end."""
        saved = self.view.saved_step
        where = "before the first checkpoint" if saved is None else f"at step {saved}"
        self._record("paused", step=saved)
        self._write(PAUSED)
        self.view.state = "paused"
        self.screen.say("paused", f"paused {where}. Go on with: holdfast resume {self._shown()}", step=saved)
        while self._wish is _Wish.PAUSE:
            self.screen.show(self.view)
            self._wait(_LOOK_S if self._signals else 1.0)
        if self._wish is _Wish.NONE:
            self._failures = 0
            self._record("resumed", step=saved)
            self.screen.say("resumed", f"going on from step {saved}" if saved is not None else "going on", step=saved)

    def _shown(self) -> str:
        assert self.place is not None
        location = self.place.location
        inside = "://" not in location and os.path.commonpath([location, os.getcwd()]) == os.getcwd()
        return os.path.relpath(location) if inside else redact_uri(location)


def child_environ(spec: LaunchSpec) -> dict[str, str]:
    """The environment of the script."""
    environ = without_credentials({**os.environ, **spec.environ, **spec.settings})
    if not environ.get("HOLDFAST_ENABLED"):
        environ["HOLDFAST_ENABLED"] = "1"
    if spec.dir is not None:
        environ["HOLDFAST_DIR"] = spec.dir
    if spec.fresh:
        environ["HOLDFAST_RESUME"] = "never"
        # Not the old run gone on, but another one in its place: its history is not to be counted as lost work.
        environ["HOLDFAST_RUN_ID"] = f"{spec.name}-{secrets.token_hex(4)}"
    if spec.workers is not None and spec.workers.isdigit() and "OMP_NUM_THREADS" not in environ:
        environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // int(spec.workers)))
    return environ


def expected_home(spec: LaunchSpec, settings: Settings) -> str:
    """Where the run's home will be, if the script does not choose another location."""
    location = settings.dir or os.path.join(RUNS, spec.name)
    return home_of(location if "://" in location else os.path.join(spec.cwd, expanded(location)))


def check_free(home: str) -> None:
    """Raises if a launcher or a rank lives there already."""
    launch, attempt = read_launch(home), read_attempt(home)
    if launch is not None and launch.is_alive() and launch.owner.pid != os.getpid():
        what = "is paused there; go on with: holdfast resume" if launch.state == PAUSED else "runs there"
        raise LocationBusyError(f"{os.path.dirname(home)}: a launcher, process {launch.owner.pid}, {what}")
    if attempt is not None and (live := attempt.live()):
        pids = ", ".join(str(owner.pid) for owner in live.values())
        who = f"process{'es' if len(live) > 1 else ''} {pids}"
        raise LocationBusyError(f"{attempt.location} is being written by run {attempt.run!r}, {who}")


def _number(environ: dict[str, str], name: str) -> int:
    try:
        return int(environ.get(name, "0"))
    except ValueError:
        raise ConfigError(f"{name}={environ[name]!r} is not accepted; it must be a whole number of seconds") from None
