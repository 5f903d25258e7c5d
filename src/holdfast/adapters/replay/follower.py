"""Plain PyTorch loops that know nothing of holdfast: followed as they run, and replayed, not retrained, on resume.

:class:`Follower` looks at a loop from outside: what it makes, which batches it fetches, when its optimizers step.
A checkpoint holds the state at a *point* of the loop, and how the loop came there. On resume the script runs again;
until that point loaders hand out one and the same batch, modules answer without computing, and what the script
reads out of tensors is what it read before. There the state is loaded, and from there on everything is real: the
script's own variables, its counters, its open files have come out right by themselves.

Where a point is: before a fetch that follows an optimizer step, and before a pass over a loader begins. What the
loop does after a step, such as an evaluation, is done by then. Loops without a loader have points after their steps.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from _holdfast_startup import required
from holdfast.adapters.replay.beginning import beginning, differences, in_words
from holdfast.adapters.replay.byhand import ByHand
from holdfast.adapters.replay.events import Events
from holdfast.adapters.replay.folders import dated_folders, link_to
from holdfast.adapters.replay.hooks import Hooks
from holdfast.adapters.replay.identity import WAIT_S, Identity
from holdfast.adapters.replay.loop import Followed
from holdfast.adapters.replay.provenance import Birth
from holdfast.adapters.replay.reads import Reading, Seen
from holdfast.adapters.replay.resume import Replay
from holdfast.adapters.replay.trace import AFTER, astray
from holdfast.base.patching import MissingTargetsError
from holdfast.base.run_directory import default_location, home_of
from holdfast.config import Settings
from holdfast.errors import HoldfastError, LocationBusyError, Preempted, StateError
from holdfast.notice import NoticeSource
from holdfast.progress import Progress
from holdfast.recorder.blackbox import BlackBox
from holdfast.runtime.host import Host
from holdfast.runtime.ownership import _claims, tell_no_more, tell_of_claims
from holdfast.runtime.protection import unprotected
from holdfast.runtime.session import Place
from holdfast.store.checkpoints import Checkpoint
from holdfast.torch import rng
from holdfast.torch.codec import encode
from holdfast.torch.ranks import torch_place
from holdfast.torch.restore import Contents
from holdfast.torch.state import _has_state

log = logging.getLogger("holdfast")

_SAYS_ITSELF = "with holdfast.Run(model=…) a loop says itself what a step is"

_current: Follower | None = None


def current() -> Follower | None:
    """Who follows in this process."""
    return _current


class Follower(Events):
    """Follows one training loop of this process, in one thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        place: Callable[[], Place] = torch_place,
        sources: Sequence[NoticeSource] = (),
        on_preempted: Callable[[Preempted], NoReturn] | None = None,
        name: str = "torch",
        around: str | None = None,
        identity: Identity | None = None,
    ) -> None:
        """``place`` is called at the first training act. ``on_preempted``: instead of raising out of the boundary.
        ``around``: file of holdfast's that calls the script, where that is a function. ``identity``: whose run this
        process works on; None: that of the location in the settings."""
        super().__init__()
        self.settings = settings
        self.name = name
        self._place, self._sources, self._on_preempted, self._around = place, sources, on_preempted, around
        self._identity = identity
        self._hooks = Hooks(self)
        self._by_hand = ByHand()
        self._refusal: HoldfastError | None = None
        self._foreign = False
        """Whether the checkpoint that was found is of another run."""
        self._environ = dict(os.environ)
        self._beginning: dict[str, Any] | None = None
        """What the script begins with; known when its loop begins."""

    @property
    def step(self) -> int:
        """Optimizer steps completed, over all attempts."""
        return self.loop.step if self._following else 0

    # ------------------------------------------------------------------ start and end

    def start(self) -> None:
        """From here on what is constructed is noted, and training acts are followed."""
        global _current
        if _current is not None and _current is not self:
            _current.close()
        first = _current is None and not self._hooks.active
        self._hooks.begin()
        if first:
            os.register_at_fork(after_in_parent=functools.partial(self._files.forked, child=False))
            os.register_at_fork(after_in_child=self.stay_behind)
        _current = self
        self._birth = self._born()
        self._files.begin(self._birth.history(), again=self._birth.again)
        tell_of_claims(self.stand_back)

    def _born(self, loads: Sequence[str] = ()) -> Birth:
        if self._identity is not None:
            return Birth(self.settings, self._identity.random_file(), loads)
        home = home_of(self.settings.dir or default_location())
        return Birth(self.settings, os.path.join(home, f"birth-{os.environ.get('RANK') or 0}"), loads)

    def begin_again(self) -> None:
        """This process has turned out to be a child of another, and its function is about to run."""
        if not self._following and not self._over:
            self._birth = self._born(self._birth.loads)
            self._files.begin(self._birth.history(), again=self._birth.again)

    def serve(self) -> None:
        """This process is a child of another that serves its loop."""
        self._files.serve()

    def state_at_start(self) -> bytes:
        """The random numbers that the script began with, for its processes."""
        return self._birth.encoded()

    @property
    def follows(self) -> bool:
        """Whether a loop of this process is followed."""
        return self._following and not self._over

    def finish(self) -> None:
        """The script or function ended well: commit the end. Raises StateError if it ended during the replay."""
        if self._failure is not None:
            raise self._failure
        if self._over:
            return
        if not self._following:
            self._tell_what_was_missed()
            return
        if self.replaying:
            raise self._fail(astray(f"it ends after {self.trace.steps} optimizer steps, before step {self.step}"))
        assert self.host is not None
        if self._unsettled:
            self._settle()
        self.loop.over = True
        if self.loop.step:
            if not self._look_around():
                return
        else:
            self._tell_what_was_missed()
        self.host.engine.finish(self.loop.step)
        self._files.note_end()
        if self._identity is not None:
            self._identity.end(self.host.session.home, self.host.rank)

    def _tell_what_was_missed(self) -> None:
        if self._missed:
            why = self._why_missed()
            unprotected(
                f"{self._missed} optimizer steps were not followed, since {why}: nothing was saved; {_SAYS_ITSELF}"
            )

    def crashed(self, error: BaseException) -> None:
        """The script or function ended with an error: save the last point if the state is still that."""
        if not self._following or self._over or isinstance(error, Preempted):
            return
        assert self.host is not None
        if self.replaying and not isinstance(error, StateError):
            log.error(
                "the script failed while its loop was replayed, where modules do not compute: %s. Nothing is lost, the "
                "checkpoint of step %d stays. holdfast.Run needs no replay; HOLDFAST_RESUME=never starts anew",
                error,
                self.step,
            )
        traceback = error.__traceback__
        while traceback is not None:
            self.loop.broken = traceback.tb_frame
            traceback = traceback.tb_next
        self.host.engine.crashed(error)

    def stay_behind(self) -> None:
        """In a child process: the loop that is followed is its parent's. One that is not yet, may become its own."""
        self._files.forked(child=True)
        if not self._following:
            self._process = os.getpid()
            self.host = self._replay = self._refusal = None  # the parent's, which has met the other ranks
        elif not self._over:
            self._over = True
            self.loop.seen.thread = 0
            self._hooks.end()

    def close(self, *, end_passes: bool = True) -> None:
        """Take the hooks away and let go of the location. ``end_passes``: also of the loaders' workers."""
        global _current
        if _current is self:
            _current = None
        if self._over:
            return
        self._over = True
        self._hooks.end()
        if not self._following:
            self._files.commit()
        self._files.end()
        tell_no_more(self.stand_back)
        if not self._following:
            if self.host is not None:
                self.host.close()
            return
        self._let_go()
        for one in self.loop.open_passes() if end_passes else ():
            if one.batches is not None:
                one.batches.close()
        assert self.host is not None
        self.host.close()
        if self.host.saved_all(self.loop.step):
            self.loop.remove_traces()

    def _let_go(self) -> None:
        self._reading.end()
        if self._replay is not None:
            self._replay.end()
        self.loop.unhook()

    def _leave(self, leaving: Preempted) -> NoReturn:
        self.close()
        if self._on_preempted is not None:
            self._on_preempted(leaving)
        raise leaving

    # ------------------------------------------------------------------ the first training act

    def first_act(self, *, training: bool = True) -> bool:
        """Something trains, or is about to. Returns whether there is nothing more to wait for.

        ``training``: it does, certainly; a call of a module may mean nothing yet.
        """
        if self._following or self._over:
            return True
        if not self.registry.alive("optimizer") or not self._is_ours():
            return False
        if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1 and not (dist.is_available() and dist.is_initialized()):
            return False
        if not self._is_left_alone():
            self._meet()
            self._compare_beginnings()
        if self._is_left_alone():
            if training:
                self._leave_alone()
            return training
        if self._refusal is not None and not training:
            return False
        self._follow()
        return True

    def _is_left_alone(self) -> bool:
        """Whether nothing may be followed here, since a later attempt would not find this run, or another has it."""
        identity = self._identity
        if identity is None:
            return False
        if not identity.left_alone and self.host is None and (identity.is_process or identity.has_processes()):
            groups = [group for optimizer in self.registry.alive("optimizer") for group in optimizer.param_groups]
            if any(one.device.type == "cpu" and one.is_shared() for group in groups for one in group["params"]):
                identity.left_alone = "its model is in memory that several processes share, each of which may step it"
        return bool(identity.left_alone)

    def _leave_alone(self) -> None:
        assert self._identity is not None
        if not required():  # else it is refused each time, whoever catches the error
            self.close()
        if self._identity.shall_say():
            unprotected(f"this training goes on unprotected, since {self._identity.left_alone}")

    def _meet(self) -> None:
        """Meet the other ranks, and find the checkpoint to go on from. What goes wrong is told when the loop begins:
        until then it may turn out to be another's."""
        if self.host is not None or self._refusal is not None:
            return
        try:
            self._open()
        except HoldfastError as error:
            self._refusal = error

    def _compare_beginnings(self) -> None:
        """A complete run that has begun otherwise is another one, although its arguments were the same."""
        if self._refusal is not None or self._is_left_alone():
            return
        if self._beginning is None:
            with self._files.real():
                self._beginning = beginning(
                    self.registry.alive("optimizer"), self._files.settings(), self._environ, self._birth.seed
                )
        try:
            while self._identity is not None and self._replay is not None and (how := self._how_it_differs()):
                assert self.host is not None
                location = self.host.session.location
                self._identity.differ(in_words(how))
                self.host.close()
                self.host = self._replay = None
                self._open("another", f"{location} holds a complete run that began otherwise")
        except HoldfastError as error:
            self._refusal = error

    def _how_it_differs(self) -> list[str]:
        """From the complete run that would be replayed. Rank 0 decides."""
        replay, place = self._replay, self._place_now
        assert replay is not None
        assert self._beginning is not None
        saved = replay.saved["birth"].get("beginning")
        same_job = self.settings.run_id is not None and self.settings.run_id == replay.run_name
        if saved is None or same_job or not replay.complete:
            return []
        if place.rank == 0:
            how = differences(saved, self._beginning)
            if place.world > 1:
                place.board.put_once("beginning", json.dumps(how).encode())
            return how
        told = place.board.wait("beginning", WAIT_S)
        if told is None:
            raise TimeoutError(f"rank 0 did not say whether its script begins as before within {WAIT_S:.0f} s")
        return [str(one) for one in json.loads(told)]

    def _open(self, unless: str = "", why: str = "") -> None:
        identity = self._identity
        while True:
            self._place_now = self._place()
            settings = self.settings if identity is None else identity.settle(self._place_now, unless=unless)
            if settings is None:
                assert identity is not None
                identity.left_alone = why
                return
            try:
                self.host = Host(settings, self._place_now, announced=False)
            except LocationBusyError as error:
                if identity is None or not error.beside:
                    raise
                unless, why = "busy", str(error)
                continue
            except OSError as error:
                if identity is None or self.settings.dir:
                    raise
                identity.left_alone = f"nothing can be written to {default_location()}: {error}. Set HOLDFAST_DIR"
                return
            self._foreign = False
            if self.host.resume(self._load) is None:
                self._replay = None  # this rank could load it, another could not
            if not self._foreign:
                return
            unless, why = "another", f"{self.host.session.location} holds checkpoints of another run"
            self.host.close()
            self.host = self._replay = None

    def _load(self, checkpoint: Checkpoint) -> None:
        self._replay = None
        self._replay = replay = Replay(Contents(checkpoint, self._place_now.rank, self._place_now.world))
        if self._identity is not None:
            whose = replay.saved["birth"].get("whose")
            self._foreign = self._identity.is_of_another(whose, complete=replay.complete)

    def stand_back(self) -> None:
        """Somebody else is in charge of the training that is about to begin."""
        self._claimed = True
        self._hooks.forget_first_call()
        if not self._following or not (self.loop.step or self.trace.steps):
            self._files.commit()
            self._files.end()
        if self.host is None or self._over or (self._following and (self.loop.step or self.trace.steps)):
            return
        if self._following:
            self._let_go()
            self.loop.pending = self.replaying = self._following = False
            if self._identity is not None:
                self._identity.withdraw(self.host.session.home, self.host.rank)
        self.host.close()
        self.host = self._replay = self._refusal = None

    def _follow(self) -> None:
        """The loop begins."""
        if self._refusal is not None:
            self._files.end()
            raise self._refusal
        self._hooks.forget_first_call()
        self._hooks.forget_backward()
        host, place = self.host, self._place_now
        assert host is not None
        host.announce()
        if self._identity is not None:
            self._identity.begin(host.session.home, host.session.run, host.rank, anew=self._replay is None)
            if self._identity.said and host.rank == 0:
                log.warning("%s: checkpoints of this one go to %s", self._identity.said, host.session.backends[0].uri)
        box = BlackBox(host.box_path(), host.rank)
        mirror = f"{box.path}.seen" if box.path is not None and place.world > 1 else None
        seen = Seen(mirror, around=self._around)
        self.loop = Followed(self.registry, self.trace, seen, box, place, self.settings)
        self.loop.frames.note_start(sys._getframe())
        self.loop.saves = self._files.note_save
        self._files.loop_begins(replays=self._replay is not None)
        if self._replay is not None:
            self._replay.begin(self.loop, self._birth)
            self.loop.birth = {**self.loop.birth, "beginning": self._tell_how_it_differs(self.loop.birth)}
            if host.rank == 0:
                with self._files.real():
                    linked = link_to(self.loop.birth.get("folders", {}))
                self._files.folders_linked(linked)
            self.replaying = True
        else:
            self.loop.start = rng.capture()
            born = self._birth.content(self.loop.start)
            self.loop.birth = {**born, "folders": dated_folders(), "beginning": self._beginning}
            if self._identity is not None:
                self.loop.birth["whose"] = self._identity.saved()
            self._birth.leave()
            for order in self.registry.orders():
                order.watch()
        self.loop.leave_base()
        self.loop.engine = host.start(self.loop, self._progress, sources=self._sources)
        self.loop.saver = host.saver
        self._thread = threading.get_ident()
        self._following = True
        self._reading = Reading(seen)
        self._reading.begin()
        for state in self.loop.hook_states() if host.rank == 0 else ():
            log.warning("what DDP's communication hook keeps is not saved (%s): a resume will not be exact", state)
        if self._replay is None:
            self.loop.note(AFTER)
        elif host.rank == 0:
            complete = ", where it is complete (HOLDFAST_RESUME=never starts it anew)" if self._replay.complete else ""
            log.warning(
                "replaying the loop up to step %d%s; what it prints until then it printed before", self.step, complete
            )

    def _tell_how_it_differs(self, birth: dict[str, Any]) -> dict[str, Any] | None:
        """An unfinished run goes on also if its script begins otherwise. Returns what it begins with from here on."""
        saved, now = birth.get("beginning"), self._beginning
        if saved and now and self.host is not None and self.host.rank == 0 and (how := differences(saved, now)):
            log.warning(
                "the script begins otherwise than the run that it resumes (%s); what was saved counts",
                in_words(how),
            )
        return now

    # ------------------------------------------------------------------ told by the hooks

    def made_module(self, module: torch.nn.Module) -> None:
        self.registry.note_module(module)

    def made(self, kind: str, thing: Any) -> None:
        self.registry.note(kind, thing)
        if kind == "optimizer" and not self._following and not self._over and not self._claimed:
            try:
                self._hooks.watch_loaders()
            except MissingTargetsError as error:
                self.close()
                unprotected(f"this script is not followed, since its loaders cannot be: {error}")
                return
            self._hooks.watch_first_call()

    def loads(self, file: Any) -> Any:
        """``torch.load``; returns what is loaded instead, by native code too."""
        if not self._following:
            self._birth.note_load(file)
        self._files.check_weights(file)
        return self._files.readable(file)

    def before_backward(self, outputs: Any, inputs: Sequence[torch.Tensor] | None = None) -> bool:
        """Returns whether to look at what it leaves. An optimizer, or somebody else, may yet be in charge."""
        if self._following or self._over or _claims or self.registry.alive("optimizer") or not self._is_ours():
            return False
        trained, looked_at = self._by_hand.before(outputs, self.registry.roots(), inputs)
        if trained:
            self._hooks.forget_backward()
            unprotected(
                "this script trains without a torch.optim.Optimizer that steps: its parameters have moved along their "
                f"gradients since its last backward pass. Nothing is followed or saved; {_SAYS_ITSELF}"
            )
        return looked_at and not trained

    def after_backward(self, grads: Sequence[torch.Tensor | None] | None = None) -> None:
        self._by_hand.after(grads)
        if self._by_hand.done:
            self._hooks.forget_backward()

    def made_ddp(self, module: Any) -> None:
        """All ranks are here together: a good moment to meet."""
        order = self.registry.note_order(module)
        if self._following:
            if not self.replaying:
                order.watch()
        elif not self._over and self._is_ours() and not self._is_left_alone():
            self._meet()

    def track(self, value: Any, frame: FrameType | None) -> Any:
        """See :func:`holdfast.track`."""
        if isinstance(value, torch.Generator | MutableMapping) or _has_state(value):
            self.registry.track(value)
            return value
        encode(value, "tracked", {})  # raises StateError for what cannot be saved, now and not at a preemption
        if not self._acts():
            return value
        return self.loop.seen.read(value, "track", lambda same: same, frame)

    def _progress(self) -> Progress:
        assert self.host is not None
        optimizers = self.registry.alive("optimizer")
        rate = optimizers[0].param_groups[0].get("lr") if optimizers else None
        return Progress(
            epoch=self.loop.epoch() + 1 if self._trained else None,
            step=self.loop.step,
            learning_rate=float(rate) if isinstance(rate, int | float) else None,
            resumed_from=self.host.resumed_from,
            checkpointing=self.host.checkpointing(),
        )
