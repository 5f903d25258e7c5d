"""One attempt of a run in this process, whichever framework trains: the parts that all adapters need alike.

An adapter says what a step is, what the state is and how to restore it; the host meets the other
ranks, finds the checkpoint to go on from, listens, tells people how it goes, and cleans up::

    host = Host(settings, place)
    checkpoint = host.resume(load)
    host.start(training, look)
    …          # the training thread: if step >= host.engine.next_stop: host.engine.at_boundary(step)
    host.engine.finish(step) or host.engine.crashed(error), then host.close()
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.agree import Agreement, BoundedBoard
from holdfast.base.bars import keep_apart
from holdfast.base.process import Owner
from holdfast.config import STOP_AT, Settings
from holdfast.engine.engine import Engine, Training
from holdfast.engine.reporter import Reporter
from holdfast.engine.saving import Saver
from holdfast.errors import StoreError
from holdfast.notice import FileSource, NoticeSource, SignalSource, cloud_source, late
from holdfast.progress import Checkpointing, Progress, ProgressFile, redact_uri
from holdfast.runtime.environment import surroundings
from holdfast.runtime.session import Load, Place, Session, announce, journal_of, open_session, resume, withdraw
from holdfast.runtime.unfinished import Command
from holdfast.store import Backend
from holdfast.store.checkpoints import Checkpoint

if TYPE_CHECKING:
    from holdfast.progress.push import Pusher

log = logging.getLogger("holdfast")


class Host:
    """The framework-free part of an adapter."""

    def __init__(
        self, settings: Settings, place: Place, *, announced: bool = True, command: Command | None = None
    ) -> None:
        """Take the location; all ranks call this together.

        ``command``: tells this run from others where the script names the location; see :mod:`.unfinished`.
        ``announced``: it is certain that the training is here. Otherwise :meth:`announce` comes later, or never.
        """
        keep_apart(log)
        self.settings = settings
        self.session: Session = open_session(settings, place, command)
        self.checkpoint: Checkpoint | None = None
        """What this attempt goes on from; None: from scratch."""
        self.saver: Saver | None = None
        self._engine: Engine | None = None
        self._reporter: Reporter | None = None
        self._pusher: Pusher | None = None
        self._created_before = 0
        self._announced = False
        if announced:
            self.announce()

    @property
    def rank(self) -> int:
        return self.session.rank

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "start() comes first"
        return self._engine

    @property
    def resumed_from(self) -> str | None:
        return self.checkpoint.name if self.checkpoint is not None else None

    def announce(self) -> None:
        """Say that the training is here."""
        if self.rank == 0 and not self._announced:
            announce(self.session)
        self._announced = True

    def box_path(self) -> str | None:
        """Where this rank's black box lies; None where nothing is kept for survivors."""
        return os.path.join(self.session.box_folder, f"rank-{self.rank}") if self.settings.rescue else None

    def resume(self, load: Load, spare: Callable[[Backend, str], bool] = lambda *_: False) -> Checkpoint | None:
        """Let every rank ``load`` the newest checkpoint that all of them can; ``spare``: see :func:`session.resume`."""
        if self.settings.checkpointing:
            self.checkpoint = resume(self.session, load, spare)
        return self.checkpoint

    def start(
        self,
        training: Training,
        look: Callable[[], Progress],
        *,
        replicated: bool = True,
        sources: Sequence[NoticeSource] = (),
    ) -> Engine:
        """Listen and report. ``replicated``: each rank holds all that the ranks share, so that any of them can lead.

        ``sources``: where notices come from besides signals and what the settings name.
        """
        session, settings = self.session, self.settings
        board = BoundedBoard(session.board, settings.agree_timeout)
        if settings.checkpointing:
            self.saver = Saver(
                backends=session.backends,
                take=self._take,
                rank=session.rank,
                world=session.world,
                run=session.run,
                attempt=session.attempt,
                token=session.token,
                keep=settings.keep,
                journal=session.journal,
                replicated=replicated,
                peers=session.peers,
                board=board,
            )
            if self.checkpoint is not None:
                self.saver.go_on_from(self.checkpoint)
                self._created_before = self._commits_before()
        around = surroundings()
        late.withdraw(settings.signals)
        signals = SignalSource(settings.signals)
        listening: list[NoticeSource] = [signals, *sources, *around.sources()]
        if settings.notice_file:
            listening.append(FileSource(settings.notice_file))
        if settings.cloud:
            listening.append(cloud_source(settings.cloud, settings.metadata_url))
        self._engine = Engine(
            settings=settings,
            training=training,
            agreement=Agreement(board, session.rank, session.world, settings.agree_timeout),
            saver=self.saver,
            sources=listening,
            journal=session.journal,
            leave=around.leave,
        )
        if rehearsal := os.environ.get(STOP_AT):
            self._engine.rehearse(int(rehearsal))
        if self.rank == 0:
            self._tell_start(training.last_boundary())
            self._reporter = Reporter(
                self._progress_file() if self._tells_progress() else None,
                look,
                signals,
                lambda other: session.journal.record("handler_replaced", by=other),
                only_when_poked=settings.progress_every is not None,
            )
        self._engine.start(training.last_boundary(), training.epoch() or 0)
        around.started(self._engine)
        if self._reporter is not None:
            self._reporter.start()
            self._reporter.poke()
        return self._engine

    def _tells_progress(self) -> bool:
        settings = self.settings
        somewhere = settings.progress_file or settings.termination_log or settings.progress_url
        return settings.progress and (self.session.kept or somewhere is not None)

    def _progress_file(self) -> ProgressFile:
        settings = self.session.settings
        self._pusher = _pusher(settings)
        return ProgressFile(
            self.session.progress_file,
            last_words=settings.termination_log,
            tell=self._pusher.push if self._pusher is not None else None,
        )

    def _tell_start(self, step: int) -> None:
        checkpoint = self.checkpoint
        self.session.journal.record(
            "attempt",
            pid=os.getpid(),
            world=self.session.world,
            process_started=self.session.process_started,
            resumed_from=checkpoint.step if checkpoint else None,
            step=step,
            location=self.session.backends[0].uri,
        )
        if checkpoint is None:
            log.info("starting from scratch, checkpoints go to %s", self.session.taken[0].uri)
        elif not checkpoint.manifest.complete:
            log.warning("resuming from %s, step %d", checkpoint.location, checkpoint.step)

    def tell_training(self, step: int) -> None:
        """The first batch of this attempt is there: what came before was start-up."""
        if self.rank == 0:
            self.session.journal.record("training", step=step)

    def poke(self) -> None:
        """Write the progress file now."""
        if self._reporter is not None:
            self._reporter.poke()

    def checkpointing(self) -> Checkpointing:
        """What the progress file says of checkpoints."""
        saver = self.saver
        latest = None
        if saver is not None and saver.committed is not None and saver.committed_at is not None:
            latest = f"{saver.committed_at.uri.rstrip('/')}/{saver.committed.name}"
        return Checkpointing(
            enabled=self.settings.checkpointing,
            latest_checkpoint=latest,
            checkpoints_created=self._created_before + saver.created if saver is not None else None,
            latest_checkpoint_time=saver.committed_wall if saver is not None else None,
        )

    def _take(self, backend: Backend, leads: bool) -> None:
        """Take a location that could not be taken at the start, before anything is written there. Raises StoreError."""
        session = self.session
        if backend in session.taken:
            return
        if session.rank == 0:
            backend.acquire(Owner(session.run))
            session.taken.append(backend)
            log.warning("%s can be used again", backend.uri)
        elif leads:
            raise StoreError(f"{backend.uri} could not be used when this run began, and it has not taken it since")

    def _commits_before(self) -> int:
        """Checkpoints that earlier attempts of this run have made. The journal of a run in an object store stays on the
        machine that wrote it: on another one, the checkpoint that this attempt goes on from is all that is known of."""
        session = self.session
        events = journal_of(session.home) if self.rank == 0 else ()
        mine = (event for event in events if event.get("run") == session.run and event["event"] == "commit")
        return max(1, sum(1 for event in mine if event.get("attempt") in range(session.attempt)))

    def close(self) -> None:
        """Let go of everything: handlers, threads, the location."""
        if self._engine is not None:
            self._engine.close()
            if self._engine.notice is not None:
                late.expect(self.settings.signals, self._engine.exit_code)
        if self._reporter is not None:
            self._reporter.stop()
        if self._pusher is not None:
            self._pusher.close()
        if not self._announced and self.rank == 0:
            withdraw(self.session)
        for backend in self.session.backends:
            backend.close()
        self.session.journal.close()

    def saved_all(self, step: int) -> bool:
        """Whether nothing is left behind that a survivor would need."""
        return self.saver is None or (self.saver.committed is not None and self.saver.committed.step >= step)


def _pusher(settings: Settings) -> Pusher | None:
    if settings.progress_url is None:
        return None
    from holdfast.progress.push import Pusher

    try:
        return Pusher(settings.progress_url, settings.progress_token_file, settings.progress_ca)
    except (OSError, ValueError) as error:  # certificates that are none
        log.warning("the progress is not told to %s: %s", redact_uri(settings.progress_url), error)
        return None
