"""The attempt that one call of ``Trainer.train`` is: where it starts, how it saves, and what its end leaves."""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Callable
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerState
from transformers.trainer_utils import TrainOutput

from holdfast.adapters.transformers.final import write_final
from holdfast.adapters.transformers.loop import TrainerLoop
from holdfast.adapters.transformers.progress import look
from holdfast.adapters.transformers.resume import Start, choose, remove_download, set_aside
from holdfast.adapters.transformers.retention import Keeper, output_of
from holdfast.adapters.transformers.save import TRAINER_STATE, TrainerFiles
from holdfast.config import Settings
from holdfast.engine.engine import Engine
from holdfast.recorder.blackbox import BlackBox
from holdfast.runtime.host import Host
from holdfast.runtime.unfinished import Command
from holdfast.store.manifest import Manifest, checkpoint_name
from holdfast.torch.ranks import torch_place

log = logging.getLogger("holdfast")


class Attempt:
    """State and duties of one call of ``train``."""

    def __init__(
        self,
        trainer: Any,
        settings: Settings,
        resume_from_checkpoint: Any,
        trial: Any,
        ignore_keys: Any,
        command: Command | None = None,
    ) -> None:
        self.trainer = trainer
        self.trial = trial
        self.ignore_keys = ignore_keys
        self.settings = settings
        self.asked = resume_from_checkpoint
        self.explicit = os.fspath(self.asked) if isinstance(self.asked, str | os.PathLike) else None
        self.sharded = bool(trainer.is_fsdp_enabled)
        self.host = Host(self.settings, torch_place(), command=command)
        if command is not None:
            self._stay_in(self.host.session.location)
        self.start = Start()
        self.loop: TrainerLoop
        self.keeper: Keeper
        self._downloaded = True
        self._committed_at_start: Manifest | None = None

    @property
    def engine(self) -> Engine:
        return self.host.engine

    # ------------------------------------------------------------------ the start

    def _stay_in(self, location: str) -> None:
        """The run began in another folder than the script has named now: what the Trainer writes goes there too."""
        args = self.trainer.args
        folder, _, number = location.rpartition("/train-")
        folder = folder if number.isdigit() else location
        if os.path.realpath(folder) != os.path.realpath(args.output_dir):
            args.output_dir = folder

    def begin(self) -> None:
        """Choose where to start, and start the engine."""
        trainer, host = self.trainer, self.host
        self.start = choose(host, self.explicit, host.session.world) if self.settings.checkpointing else Start()
        self.loop = self._make_loop(self.explicit)
        before = None
        if self.start.path is not None:
            before = TrainerState.load_from_json(os.path.join(self.start.path, TRAINER_STATE))
        show = functools.partial(look, trainer, before, self.loop, host)
        self.loop.engine = host.start(self.loop, show, replicated=not self.sharded)
        self.loop.saver = host.saver
        self._settle_saver(before)
        if host.rank == 0 and self.settings.checkpointing:
            log.warning("[Kubeflow] JIT checkpoint signal handler registered for SIGTERM")
            log.warning("[Kubeflow] JIT checkpointing enabled")

    def _make_loop(self, explicit: str | None) -> TrainerLoop:
        host, settings = self.host, self.settings
        box = BlackBox(host.box_path(), host.rank)
        world = host.session.world
        loop = TrainerLoop(self.trainer, box, host.rank, world, rescue=settings.rescue, sharded=self.sharded)
        scratch = os.path.join(host.session.home, f"scratch-{host.rank}") if self.sharded else None
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
            os.makedirs(scratch)
        loop.files_of = TrainerFiles(self.trainer, scratch)
        start, run = self.start, self.start.run
        loop.step = start.step
        loop.origin = os.path.abspath(explicit) if explicit is not None else None
        if run is not None:
            loop.initial_step = run["initial_step"]
            loop.seconds_before = run["seconds"]
            loop.place = (run["epoch"], run["passes"], {})
            loop.origin = loop.origin or run["origin"]
        elif start.path is not None:
            loop.initial_step = loop.step
        return loop

    def _settle_saver(self, before: Any) -> None:
        saver = self.host.saver
        self.keeper = Keeper(self.trainer, self.settings, saver, self.host.session)
        if saver is None:
            return
        saver.retire = self.keeper.retire
        if self.start.foreign_step is not None and saver.committed is None:
            # Where the run begins is saved, if not by us: a stop before the first step has nothing to write.
            saver.committed = Manifest(
                step=self.start.foreign_step,
                reason="periodic",
                world_size=self.host.session.world,
                files=(),
                created="",
                run=self.host.session.run,
                attempt=0,
            )
        self._committed_at_start = saver.committed
        self.keeper.best_before = before.best_model_checkpoint if before is not None else None
        self.keeper.tidy()

    def begin_again(self) -> None:
        """The Trainer looks for a batch size that fits, and starts over: what it saved on the way was another run's."""
        loop, saver = self.loop, self.host.saver
        self.engine.wait_for_writer()
        loop.start_over(self.start.step)
        if saver is not None:
            saver.committed = self._committed_at_start
            if self.host.rank == 0:
                set_aside(saver.backends, lambda step: step > self.start.step, "training starts over")

    def forget_download(self) -> None:
        """A step is done, so every rank has loaded what was fetched for the start."""
        if self._downloaded and self.host.rank == 0:
            remove_download(self.host.session.token)
        self._downloaded = False

    # ------------------------------------------------------------------ saving

    def save_checkpoint(self, model: Any, trial: Any) -> None:
        """The Trainer saves. It waits for a copy; the write happens behind its back."""
        trainer, loop, saver = self.trainer, self.loop, self.host.saver
        assert saver is not None
        loop.leave_boundary()
        trainer.store_flos()
        self.keeper.note_best()
        if saver.committed is None or saver.committed.step != loop.step:
            loop.save_now(loop.now())
        if self._somebody_reads():
            self.engine.wait_for_writer()
        if trainer.args.push_to_hub:
            self.keeper.push(checkpoint_name(loop.step))

    def _somebody_reads(self) -> bool:
        """Whether a callback, or the hub, wants the files of a checkpoint as soon as it is saved."""
        return bool(self.trainer.args.push_to_hub) or any(map(_reads, self.trainer.callback_handler.callbacks))

    # ------------------------------------------------------------------ the end

    def finalize_training(
        self, original: Callable[..., Any], trial: Any, num_train_samples: Any, start_time: float
    ) -> Any:
        """Commit the end of the run, and let the Trainer do what it does then."""
        trainer, loop = self.trainer, self.loop
        loop.leave_boundary()
        trainer.store_flos()
        loop.finish()
        self.engine.close()  # from here on a signal acts as it would without holdfast
        trainer._initial_global_step = loop.initial_step
        limit, trainer.args.save_total_limit = trainer.args.save_total_limit, None
        try:
            with self.keeper.best_at_hand():
                output = original(trial, num_train_samples, start_time - loop.seconds_before)
        finally:
            trainer.args.save_total_limit = limit
        self.keeper.finished(output)
        self._write_final(output.global_step)
        return output

    def output_again(self) -> Any:
        """What ``train`` returned when the run was finished, and its model."""
        trainer, checkpoint = self.trainer, self.start.checkpoint
        assert checkpoint is not None
        finished = output_of(checkpoint.manifest)
        state = trainer.state
        best = finished.get("best_model_checkpoint")
        if best is not None:
            state.best_model_checkpoint = best
        if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            with self.keeper.best_at_hand():
                trainer._load_best_model()
        trainer.is_in_train = False
        metrics = finished.get("metrics", {})
        step = finished.get("global_step", checkpoint.step)
        self.engine.finish(checkpoint.step)
        self._write_final(step)
        if self.host.rank == 0:
            log.warning("this run is complete at step %d; HOLDFAST_RESUME=never starts it anew", step)
        if metrics:
            state.global_step = step
            logged = {"total_flos": state.total_flos, **metrics, "epoch": state.epoch, "step": step}
            state.log_history.append(logged)
        return TrainOutput(step, finished.get("training_loss", 0.0), metrics)

    def _write_final(self, step: int) -> None:
        if self.settings.final_model and self.settings.checkpointing:
            write_final(self.trainer, self.host.session, step, sharded=self.sharded)

    def close(self, *, crashed: bool) -> None:
        loop = getattr(self, "loop", None)
        if loop is not None:
            for feed in loop.place[2].values():
                feed.close()
        self.host.close()
        if loop is not None and self.host.saved_all(loop.step) and not crashed:
            loop.remove_traces()  # else a peer that came one step further may need them
        self._downloaded = True  # the best one, perhaps
        self.forget_download()


def _reads(callback: Any) -> bool:
    """Whether a callback looks into checkpoints. Those of the logging services do so only if they are told to."""
    if type(callback).on_save is TrainerCallback.on_save:
        return False
    if not type(callback).__module__.startswith("transformers.integrations"):
        return True
    switches = ("_log_model", "_log_artifacts", "_should_upload_checkpoint", "sync_checkpoints")
    wishes = [getattr(callback, name) for name in switches if hasattr(callback, name)]
    return any(wish is True or getattr(wish, "value", wish) in ("checkpoint", "all") for wish in wishes)
