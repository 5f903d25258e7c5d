"""The state machine of a run: from a notice to the commit, and back at the next start.

::

    RUNNING ──notice──► NOTICED ──kill_wait──► AGREEING ──decision──► STOPPING ──boundary──► SAVING ──► LEFT
       │                                                                  │
       │◄── a round that was called to save and go on ────────────────────┤
       │                                                                  └─ boundary out of reach ─► rescue
       └── crash of this rank or a peer ──────────────────────────────────────────────────────────► rescue

In steady state nothing of this runs. A step boundary costs one comparison: ``step >= next_stop``, where
``next_stop`` is the step of the next periodic save. Whoever wants the training thread's attention
lowers it to zero. All waiting is done by threads that are blocked until there is something to do.

Nothing hangs: whatever a peer or a store does, :meth:`Engine._guard` ends the process before the
deadline.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.agree import Agreement, BoardLostError, BoardSilentError, Call, Decision
from holdfast.base.clock import SYSTEM_CLOCK, Clock, Deadline
from holdfast.config import Every, Settings
from holdfast.engine.saving import MARGIN_S, Files, Save, Saver
from holdfast.errors import Preempted, StoreError
from holdfast.notice.base import Notice, NoticeSource
from holdfast.store.manifest import Manifest

log = logging.getLogger("holdfast")

NEVER = sys.maxsize
CRASHED = 1
"""Exit code of a rank that saved and left since another one has failed."""

_REHEARSAL_S = 20.0
"""How long training waits for what the ranks decide after a notice of ``holdfast check``."""
_REST_WAIT_S = 0.5
"""How long a training thread that rests at the agreed step may take to come by: from there it leaves more cleanly."""

_LISTEN_AGAIN_S = 0.2
"""Between two looks at a board that does not answer."""
_JOIN_S = 2.0
"""For the thread that waits for a call, once its board is closed."""

_BURIAL_S = 0.05
"""From the end of a process's connections, which its peers see, to the end of the process."""


class State(enum.Enum):
    RUNNING = "running"
    NOTICED = "noticed"
    AGREEING = "agreeing"
    STOPPING = "stopping"
    SAVING = "saving"
    FINISHING = "finishing"
    LEFT = "left"


class Training(Protocol):
    """What an adapter tells the engine of its framework."""

    def soonest(self) -> int:
        """The step that can be stopped at soonest.

        The one just completed if its boundary is still ahead, else the one in flight.
        """

    def last_boundary(self) -> int:
        """The last step that was completed."""

    def epoch(self) -> int | None: ...

    def freeze(self, wait_s: float) -> bool:
        """Keep the state as it is at the last boundary.

        True once no step can change it any more; False if a step is in the middle of changing it and does not end
        within ``wait_s``.
        """

    def files(self, *, live: bool, at_boundary: bool) -> Files:
        """The state at the last boundary.

        ``live``: read while it is written, else copied out of the way first. ``at_boundary``: called by the training
        thread at a boundary; else random state and position are those noted there.
        """

    def size(self) -> int:
        """Bytes of a save, for estimates."""

    def prepare(self) -> None:
        """The state has its full size since the first step is done: get what periodic saves need, in the background."""

    # Optional: ``rests_at(step) -> bool``, whether the state is that of ``step``, which is complete, and the training
    # thread is busy with what belongs to it, such as an evaluation, and looks in at its own pace.


@dataclass(slots=True)
class _Stop:
    """A stop that is under way."""

    source: str
    detail: str
    began: float
    deadline: Deadline
    kill_wait_s: float
    crash: bool = False
    """It began with a rank that failed, this one or another: whoever restarts the job has to count it."""


class Engine:
    """One rank's engine. The training thread calls :meth:`at_boundary`, :meth:`finish` and :meth:`crashed`."""

    def __init__(
        self,
        *,
        settings: Settings,
        training: Training,
        agreement: Agreement,
        saver: Saver | None,
        sources: Sequence[NoticeSource],
        journal: Any,
        clock: Clock = SYSTEM_CLOCK,
        leave: Callable[[int], None] | None = None,
    ) -> None:
        """``leave``: how a process is ended, with an exit code, whose training thread does not come out by itself."""
        self.settings = settings
        self.training = training
        self.agreement = agreement
        self.saver = saver
        self.sources = sources
        self.journal = journal
        self.clock = clock
        self.state = State.RUNNING
        self.next_stop: int = NEVER
        """The training thread comes to :meth:`at_boundary` once its step has reached this."""
        self.board_lost = False
        self.stalled_s = 0.0
        self._changed = threading.Condition()
        self._stop: _Stop | None = None
        self._decision: Decision | None = None
        self._save_at: int | None = None
        self._round_open = False
        self._saving = threading.Lock()
        self._left = False
        self._broken = False
        """The training thread has left its loop with an exception."""
        self._leave = leave or _leave_now
        self._last_save_step = 0
        self._last_save_epoch = 0
        self._unprepared = False
        self._rehearse_at = NEVER
        self._due: threading.Timer | None = None
        self._writer: threading.Thread | None = None
        self._watcher: threading.Thread | None = None
        if saver is not None:
            saver.gone = lambda: self._decision.silent if self._decision is not None else ()

    # ------------------------------------------------------------------ start and end

    def start(self, step: int, epoch: int) -> None:
        """Listen. ``step`` and ``epoch``: where the run begins or goes on."""
        self._last_save_step, self._last_save_epoch = step, epoch
        self._unprepared = self.saver is not None and self.settings.save_every != Every()
        self._schedule()
        self._watcher = threading.Thread(target=self._watch, name="holdfast-watch", daemon=True)
        self._watcher.start()
        for source in self.sources:
            source.start(self.on_notice)

    def close(self) -> None:
        self._left = True
        if self._due is not None:
            self._due.cancel()
        for source in self.sources:
            source.stop()
        self.agreement.board.close()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(_JOIN_S)  # the interpreter may end next

    @property
    def notice(self) -> str | None:
        """The notice that this rank is leaving for; None: there was none, however it leaves."""
        return self._stop.detail if self._stop is not None and self._stop.source != "crash" else None

    # ------------------------------------------------------------------ notices and rounds, on threads of their own

    def on_notice(self, notice: Notice) -> None:
        """Called by a source, on its thread."""
        with self._changed:
            if self._left:
                return
            if self._stop is not None:
                left = self._stop.deadline.remaining_s()
                log.warning("%s received again, already saving (%.1f s left)", notice.detail, left)
                self.journal.record("notice", source=notice.source, detail=notice.detail, repeated=True)
                return
            grace_s = self.settings.grace_period if notice.grace_s is None else notice.grace_s
            kill_wait_s = min(self.settings.kill_wait, max(0.0, grace_s - self._needed_s()))
            self._begin_stop(notice.source, notice.detail, notice.at, grace_s, kill_wait_s)
        self.journal.record(
            "notice",
            source=notice.source,
            detail=notice.detail,
            grace_s=grace_s,
            kill_wait_s=kill_wait_s,
            step=self.training.last_boundary(),
            dead=self._dead_peers(),
        )
        self._call_stop()

    def rehearse(self, step: int) -> None:
        """Behave as if a notice came at the boundary of ``step``, exactly there: training waits for the agreement."""
        self._rehearse_at = step

    def _preempt_here(self, step: int) -> None:
        self._rehearse_at = NEVER
        self.on_notice(Notice("check", f"the notice of holdfast check at step {step}", time.monotonic(), time.time()))
        with self._changed:
            self._changed.wait_for(lambda: self._decision is not None or self.board_lost, _REHEARSAL_S)

    def _begin_stop(
        self, source: str, detail: str, at: float, grace_s: float, kill_wait_s: float, *, crash: bool = False
    ) -> None:
        self._stop = _Stop(source, detail, at, Deadline(at + grace_s, self.clock), kill_wait_s, crash)
        if self.state is State.FINISHING:
            log.warning("%s received while the run commits its end: it has %.0f s for that", detail, grace_s)
        else:
            self.state = State.NOTICED
            log.warning("%s received, initiating JIT checkpoint in %.1fs", detail, kill_wait_s)
        threading.Thread(target=self._guard, name="holdfast-guard", daemon=True).start()

    def _needed_s(self) -> float:
        """Seconds that must be left when the agreement begins."""
        if self.saver is None:
            return MARGIN_S
        return self.saver.expected_s(self.saver.backends[0], self.training.size()) + 2 * MARGIN_S

    def _call_stop(self) -> None:
        stop = self._stop
        assert stop is not None
        kill_wait_s = max(0.0, stop.kill_wait_s - (self.clock.monotonic() - stop.began))
        agreement, grace_s = self.agreement, stop.deadline.remaining_s()
        self._call(Call(agreement.round, "stop", agreement.rank, stop.source, stop.detail, kill_wait_s, grace_s))

    def _call(self, call: Call) -> None:
        try:
            self.agreement.call(call)
        except BoardLostError:
            self._on_board_lost()

    def _watch(self) -> None:
        """The one thread that is blocked until a round is called."""
        try:
            while not self._left:
                try:
                    call = self.agreement.wait_for_call()
                    self.board_lost = False
                    self._take_part(call)
                except BoardSilentError:
                    self._on_board_lost()
                    if self._stop is not None:
                        return
                    time.sleep(_LISTEN_AGAIN_S)  # it may wake up: the rounds of the meantime are then caught up with
                    continue
                if call.kind == "stop":
                    return
                if self._stop is not None:
                    # This rank's own call to stop came while the round was taken by a call to save: call again.
                    self._call_stop()
        except BoardLostError:
            if not self._left:
                self._on_board_lost()
        except Exception:
            log.exception("the agreement failed; this rank saves on its own if it has to")
            self._on_board_lost()

    def _take_part(self, call: Call) -> None:
        if call.kind == "stop":
            with self._changed:
                if self._stop is None:
                    detail = f"{call.detail} (rank {call.rank})"
                    now, crash = self.clock.monotonic(), call.source == "crash"
                    self._begin_stop("peer", detail, now, call.grace_s, call.kill_wait_s, crash=crash)
            self._pause(call.kill_wait_s)
        with self._changed:
            self._round_open = True
            if call.kind == "stop" and self.state is State.NOTICED:
                self.state = State.AGREEING
            # The order is what makes this free of races: first ask for attention, then look where training is. A
            # boundary that did not see the request has already set the step in flight that soonest() reports.
            self.next_stop = 0
            soonest = self.training.soonest()
        self._carry_out(call, self.agreement.decide(soonest, broken=self._broken, dead=self._dead_peers), soonest)

    def _dead_peers(self) -> list[int]:
        return self.saver.dead_peers() if self.saver is not None else []

    def _pause(self, seconds: float) -> None:
        """Training goes on; a crash of this rank ends the wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self.state in (State.SAVING, State.LEFT), seconds)

    def _carry_out(self, call: Call, decision: Decision, soonest: int) -> None:
        self.journal.record(
            "agreement",
            kind=call.kind,
            step=decision.step,
            rescue=decision.rescue,
            silent=list(decision.silent),
            seconds=round(decision.seconds, 4),
        )
        # Decided without a rank that may be further already, it would be two saves of which each lacks a part.
        agreed = not decision.rescue and soonest <= decision.step
        with self._changed:
            # In one go: a boundary that waits must find either the open round or its outcome.
            self._round_open = False
            if call.kind == "save":
                self._save_at = decision.step if agreed else None
            else:
                self._decision = decision
                if self.state is State.AGREEING:
                    self.state = State.STOPPING
            self._changed.notify_all()
            if self._broken and call.kind == "stop":
                return  # the training thread saves
        if call.kind == "save":
            if not agreed:
                self._leave_out(decision)
        elif decision.rescue:
            reason = f"ranks {list(decision.silent)} are silent" if decision.silent else "a rank cannot go on"
            log.warning("%s: each survivor saves what it has", reason)
            self._save_where_it_stands(wait_for_training_s=0.0)
        else:
            # Inside a long evaluation, say, the state is that of the step already: its end need not be waited for.
            rests = getattr(self.training, "rests_at", None)
            waits = rests is None or not rests(decision.step)
            self._save_where_it_stands(wait_for_training_s=None if waits else _REST_WAIT_S)

    def _leave_out(self, decision: Decision) -> None:
        """A save by time that not all ranks can make."""
        why = f"rank {decision.silent[0]} did not answer" if decision.silent else "a rank had passed that step"
        self.journal.record("skipped", step=decision.step, why=why)
        if not decision.rescue and self.saver is not None:
            # This rank had given the round up, and the others wait for its part.
            self.saver.decline(Save(step=decision.step, reason="periodic"), why)

    def _on_board_lost(self) -> None:
        """The process that kept the board is gone. Training may be ending everywhere, or a peer has died."""
        with self._changed:
            self.board_lost = True
            self._round_open = False
            self._changed.notify_all()
            if self._stop is None or self.state in (State.FINISHING, State.SAVING, State.LEFT):
                return
            self._decision = Decision(self.training.last_boundary(), rescue=self.agreement.world > 1)
            if self.agreement.world == 1:
                self._decision = Decision(self.training.soonest())
            self.state = State.STOPPING
            self.next_stop = 0
        self._save_where_it_stands(wait_for_training_s=0.0 if self._decision.rescue else None)

    def _save_where_it_stands(self, wait_for_training_s: float | None) -> None:
        """Save on this thread if training does not come to its boundary while there is still time.

        None: wait as long as the deadline allows.
        """
        assert self._stop is not None
        if wait_for_training_s is None:
            wait_for_training_s = max(0.0, self._stop.deadline.remaining_s(reserve_s=self._needed_s() + MARGIN_S))
        with self._changed:
            ends = (State.SAVING, State.FINISHING, State.LEFT)
            if self._changed.wait_for(lambda: self.state in ends, wait_for_training_s):
                return
        if not self.training.freeze(wait_s=max(0.0, self._stop.deadline.remaining_s(self._needed_s()))):
            log.error("training is inside an optimizer step and does not come out of it: step not saved")
            self.wait_for_writer(self._stop.deadline.earlier(MARGIN_S))
            return
        self._save_and_leave("rescue" if self._rescuing() else "jit", at_boundary=False)
        self._leave(self.exit_code)

    @property
    def exit_code(self) -> int:
        """How this rank leaves: as one that was preempted, unless another rank has failed."""
        return CRASHED if self._stop is not None and self._stop.crash else self.settings.exit_code

    def _rescuing(self) -> bool:
        return self._decision is not None and self._decision.rescue

    def _guard(self) -> None:
        """End the process before the deadline, whatever happens."""
        assert self._stop is not None
        while not self._stop.deadline.passed(reserve_s=MARGIN_S / 3):
            time.sleep(min(0.5, max(0.01, self._stop.deadline.remaining_s(reserve_s=MARGIN_S / 3))))
            if self.state is State.LEFT and self._stop.source == "crash":
                return  # nobody will kill this process: what it does now is the user's own
            if self.state is State.LEFT and self._stop.deadline.passed(reserve_s=2 * MARGIN_S):
                break  # saved, but the way out hangs in a library's clean-up
        if self.state is not State.LEFT:
            log.error("out of time at the deadline: leaving with what is committed")
            self.journal.record("end", step=self.training.last_boundary(), outcome="failed", error="out of time")
        self._leave(self.exit_code)

    # ------------------------------------------------------------------ called by the training thread

    def at_boundary(self, step: int, *, epoch: int | None = None) -> None:
        """The slow path of a boundary: something wants attention. ``epoch``: epochs completed, at the end of one."""
        if step >= self._rehearse_at:
            self._preempt_here(step)
        with self._changed:
            while self._round_open:
                # A round is being decided: to run ahead now could pass the step that is decided.
                self._changed.wait(0.5)
            while self.state is State.SAVING:
                # Another thread saves the state as it stands, and then ends the process.
                self._changed.wait()
            decision = self._decision
            asked = self._save_at
        if decision is not None and (decision.rescue or step >= decision.step):
            self._save_and_leave("rescue" if decision.rescue else "jit", at_boundary=True)
            raise Preempted(self.exit_code, step, self._stop.detail if self._stop else "")
        if asked is not None and step >= asked:
            self._save_periodic(step, asked=asked)
        if self._unprepared and step > self._last_save_step:
            self._unprepared = False
            self.training.prepare()
        if self._is_due(step, epoch):
            self._save_periodic(step)
        self._schedule()

    def _is_due(self, step: int, epoch: int | None) -> bool:
        # A notice alone changes nothing here: the ranks hear of it at different moments, and a save needs all of them.
        if self.saver is None or step <= self._last_save_step:
            return False
        every = self.settings.save_every
        if every.steps:
            return step - self._last_save_step >= every.steps
        if every.epochs and epoch is not None:
            return epoch - self._last_save_epoch >= every.epochs
        return False

    def _schedule(self) -> None:
        """Set when the training thread is to come back, and the clock for saves by time."""
        every = self.settings.save_every
        with self._changed:
            if self._called() or self._stop is not None or self._unprepared:
                self.next_stop = 0
            elif every.steps and self.saver is not None:
                self.next_stop = self._last_save_step + every.steps
            else:
                self.next_stop = NEVER
            self.next_stop = min(self.next_stop, self._rehearse_at)
            mine = self.agreement.rank == 0 and self.saver is not None
            if every.seconds and mine and self._due is None and not self._called():
                self._due = threading.Timer(every.seconds, self._on_due)
                self._due.daemon = True
                self._due.start()

    def _called(self) -> bool:
        """Whether a save by time was called that this rank has not begun."""
        return self._round_open or self._save_at is not None

    def _on_due(self) -> None:
        """A save by time is due. Rank 0 calls a round, so that all ranks save the same step."""
        with self._changed:
            self._due = None
            if self._left or self._stop is not None or self._called():
                # A second step would take the place of the first, which other ranks may have passed and saved: each
                # would wait for the other's part. When this rank has come to that step the clock is set again.
                return
            call = Call(self.agreement.round, "save", 0, "clock", str(self.settings.save_every))
        if self._writer is not None and self._writer.is_alive():
            # The stated rule: a save by time that comes due while one is being written is skipped.
            self.journal.record(
                "skipped", step=self.training.last_boundary(), why="the last save is still being written"
            )
            self._schedule()
            return
        self._call(call)

    def save(self, step: int) -> None:
        """The framework asks for a periodic save of its own. All ranks ask at the same point of the same step."""
        self._save_periodic(step)
        self._schedule()

    def _save_periodic(self, step: int, *, asked: int | None = None, end: bool = False) -> None:
        """Copy the state out of the way, and write it behind training's back.

        ``asked``: the step that was to be saved, where several may lie between two boundaries. ``end``: the run may be
        complete here.
        """
        if self.saver is not None:
            self._stage(self.saver, step, step if asked is None else asked, end=end)
        with self._changed:
            if self._save_at is not None and self._save_at <= step:
                self._save_at = None

    def _stage(self, saver: Saver, step: int, asked: int, *, end: bool) -> None:
        began = time.monotonic()
        # The stated rule: a save that comes due by steps or epochs while one is being written waits for it, since all
        # ranks must take the same decision without asking each other.
        self.wait_for_writer()
        committed = saver.committed
        if step == 0 or (committed is not None and committed.step >= asked):
            return  # a round by time can come to a step that is saved already, or before the first one
        waited = time.monotonic() - began
        reason = "final" if end else "periodic"
        save = Save(step=step, reason=reason, epoch=self.training.epoch(), complete=end)
        files = self.training.files(live=False, at_boundary=True)
        self._writer = threading.Thread(
            target=self._write_behind, args=(save, files), name="holdfast-save", daemon=True
        )
        self._writer.start()
        files.settle()
        stall = time.monotonic() - began
        self.stalled_s += stall
        self._last_save_step, self._last_save_epoch = step, self.training.epoch() or 0
        self.journal.record(
            "staged",
            step=step,
            reason=reason,
            stall_s=round(stall, 4),
            waited_s=round(waited, 4),
            bytes=self.training.size(),
        )

    def _write_behind(self, save: Save, files: Files) -> None:
        assert self.saver is not None
        try:
            self.saver.write(save, files, self.training.size())
        except StoreError as error:
            log.error("%s save of step %d failed, training goes on: %s", save.reason, save.step, error)
        except Exception:
            log.exception("%s save of step %d failed, training goes on", save.reason, save.step)
        if self.settings.save_every.seconds:
            self._schedule()

    def wait_for_writer(self, deadline: Deadline | None = None) -> None:
        """Until the save that is being written is committed or has failed."""
        writer = self._writer
        if writer is not None and writer is not threading.current_thread():
            writer.join(deadline.remaining_s() if deadline else None)

    def _save_and_leave(self, reason: str, *, at_boundary: bool) -> Manifest | None:
        """The just-in-time save. Returns when it is committed or has failed; only the first caller saves."""
        if not self._saving.acquire(blocking=False):
            # The other thread saves and ends the process.
            while True:
                time.sleep(1.0)
        with self._changed:
            self.state = State.SAVING
            self._changed.notify_all()
        stop = self._stop
        deadline = stop.deadline if stop else Deadline.after(self.settings.grace_period, self.clock)
        step = self.training.last_boundary()
        manifest: Manifest | None = None
        outcome = "preempted" if reason == "jit" else "rescued"
        began = time.monotonic()
        known = False
        if self.saver is not None:
            # What is being written already is finished first, if there is time for both.
            self.wait_for_writer(deadline.earlier(self._needed_s()))
            committed = self.saver.committed
            if committed is not None and committed.step >= step:
                manifest = committed
                known = stop is not None and stop.crash  # a replay that failed, say, has nothing to tell of
            elif step > 0:
                manifest = self._try_save(step, reason, deadline, at_boundary=at_boundary)
                outcome = outcome if manifest is not None else "failed"
        since = time.monotonic() - (stop.began if stop else began)
        if manifest is not None and not known:
            log.warning("JIT checkpoint completed in %.1fs: %s", time.monotonic() - began, manifest.name)
        self.journal.record("end", step=step, outcome=outcome, reason=reason, since_notice_s=round(since, 4))
        self.journal.sync()
        with self._changed:
            self.state = State.LEFT
            self._changed.notify_all()
        return manifest

    def _try_save(self, step: int, reason: str, deadline: Deadline, *, at_boundary: bool) -> Manifest | None:
        assert self.saver is not None
        claimed = reason == "rescue" and self.saver.replicated and self.agreement.world > 1
        save = Save(step=step, reason=reason, epoch=self.training.epoch(), deadline=deadline, claimed=claimed)
        try:
            files = self.training.files(live=True, at_boundary=at_boundary)
            return self.saver.write(save, files, self.training.size())
        except Exception as error:
            log.error("step %d could not be saved: %s", step, error, exc_info=not isinstance(error, StoreError))
            self.journal.record("save_failed", step=step, reason=reason, error=str(error))
            return None

    def crashed(self, error: BaseException) -> None:
        """The training thread was thrown out of its loop: by its own fault, or since a peer has died.

        Tells the peers not to wait, and saves the last boundary if the state is still that of the last boundary.
        """
        cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        with self._changed:
            if self._left or self.state is State.LEFT:
                return
            if self._stop is None:
                deadline = Deadline.after(self.settings.grace_period, self.clock)
                self._stop = _Stop("crash", cause, self.clock.monotonic(), deadline, 0.0, crash=True)
                threading.Thread(target=self._guard, name="holdfast-guard", daemon=True).start()
            self._broken = True
            self.next_stop = 0
            self._changed.notify_all()
        dead = self._dead_peers()
        if not dead and self.agreement.world > 1:
            time.sleep(_BURIAL_S)
            dead = self._dead_peers()
        self.journal.record("rescue", step=self.training.last_boundary(), cause=cause, dead=dead)
        if self.agreement.world > 1 and not self.board_lost:
            self._call_stop()
        if not self.training.freeze(wait_s=0.0):
            log.error("the crash came inside an optimizer step: its state is not saved")
            self.wait_for_writer(self._stop.deadline.earlier(MARGIN_S))
            self.journal.record("end", step=self.training.last_boundary(), outcome="failed", error=cause)
            with self._changed:
                self.state = State.LEFT
                self._changed.notify_all()
            return
        self._save_and_leave("rescue", at_boundary=False)

    def finish(self, step: int) -> Manifest | None:
        """The run is complete: commit the end, so that starting it again has nothing left to do."""
        with self._changed:
            while self._round_open:
                self._changed.wait(0.5)
            self.state = State.FINISHING
            self._changed.notify_all()
        manifest: Manifest | None = None
        if self.saver is not None:
            self.wait_for_writer()
            save = Save(step=step, reason="final", epoch=self.training.epoch(), complete=True)
            committed = self.saver.committed
            if committed is not None and committed.step >= step and committed.complete:
                manifest = committed
            elif step > 0:
                manifest = self._commit_end(save, again=committed is not None and committed.step == step)
        self.journal.record("end", step=step, outcome="complete")
        self.journal.sync()
        self.state = State.LEFT
        return manifest

    def rest(self, step: int) -> Manifest | None:
        """A part of the run is complete, and nobody knows whether another follows: commit it as the end; stay ready.

        For scripts that train several times. A notice that comes from now on finds everything saved.
        """
        if self.saver is None:
            return None
        self.wait_for_writer()
        committed = self.saver.committed
        if committed is None or committed.step < step:
            self._save_periodic(step, end=True)
            self.wait_for_writer()
        elif not committed.complete:
            self.saver.complete(Save(step=committed.step, reason="final"))
        return self.saver.committed

    def _commit_end(self, save: Save, *, again: bool) -> Manifest | None:
        assert self.saver is not None
        if again:
            return self.saver.complete(save)
        files, size = self.training.files(live=True, at_boundary=True), self.training.size()
        try:
            return self.saver.write(save, files, size)
        except StoreError:
            if not (self.saver.replicated and self._dead_peers()):
                raise
            log.warning("ranks %s died while the end was saved: a survivor saves it", self._dead_peers())
            return self.saver.write(dataclasses.replace(save, claimed=True), files, size)


def _leave_now(code: int) -> None:
    """End the process from a thread while the training thread is stuck: its clean-up could hang for ever."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
