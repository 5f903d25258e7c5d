"""Lightning: what ``Trainer.fit`` goes through, so that the fit of an unmodified script survives preemption.

The replacements are methods of :class:`~holdfast.adapters.lightning.wrappers.Wrappers`. Each of them acts only while a
fit that holdfast protects is under way, and otherwise calls what it replaces.

Lightning is published as ``lightning`` and as ``pytorch-lightning``; the tables differ in their module prefixes.
"""

from __future__ import annotations

from typing import Any

from holdfast.base.patching import Patch, PatchSet, Reads

_NAMES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
_LOGGER = "lightning.pytorch.trainer.connectors.logger_connector.logger_connector:_LoggerConnector"

LIGHTNING = PatchSet(
    framework="lightning",
    oldest="2.6",
    newest="2.6.6",
    patches=(
        Patch(
            target="lightning.pytorch.trainer.trainer:Trainer._run",
            wrap="run",
            why="a fit begins and ends",
        ),
        Patch(
            target="lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector.resume_start",
            wrap="resume_start",
            why="load the newest committed checkpoint instead of the one that the script names",
        ),
        Patch(
            target="lightning.pytorch.trainer.trainer:Trainer._run_stage",
            wrap="run_stage",
            why="training begins, is complete, or fails",
        ),
        Patch(
            target="lightning.pytorch.utilities.combined_loader:CombinedLoader.__iter__",
            wrap="iterate",
            why="a pass over the data, which can be resumed in the middle",
        ),
        Patch(
            target="lightning.pytorch.utilities.combined_loader:CombinedLoader._state_dicts",
            wrap="state_dicts",
            why="leave the state of loaders out of Lightning's checkpoints: it is not where training is",
        ),
        Patch(
            target="lightning.pytorch.utilities.combined_loader:_Sequential._load_current_iterator",
            wrap="load_current_iterator",
            why="a pass over validation data, whose workers do not die of a SIGTERM to all processes",
        ),
        Patch(
            target="lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop.advance",
            wrap="advance",
            why="a batch: the step boundary is at its end",
        ),
        Patch(
            target="lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop.reset",
            wrap="reset",
            why="silence the warning that a loader is not resumable: its position is restored",
        ),
        Patch(
            target="lightning.pytorch.loops.optimization.automatic:_AutomaticOptimization.run",
            wrap="optimize",
            why="the loss, for the progress",
        ),
        Patch(
            target="lightning.pytorch.plugins.precision.precision:Precision._after_closure",
            wrap="after_closure",
            why="from here to the boundary, weights and counters disagree",
        ),
        Patch(
            target="lightning.pytorch.loops.evaluation_loop:_EvaluationLoop.run",
            wrap="evaluate",
            why="a validation begins, during which the boundary can be saved",
        ),
        Patch(
            target="lightning.pytorch.loops.evaluation_loop:_EvaluationLoop._evaluation_step",
            wrap="evaluation_step",
            why="a notice does not wait for the end of a validation",
        ),
        Patch(
            target="lightning.pytorch.trainer.call:_interrupt",
            wrap="interrupt",
            why="callbacks save nothing after a just-in-time save: there is no time for it",
        ),
        Patch(
            target="lightning.pytorch.trainer.connectors.signal_connector:_SignalConnector.register_signal_handlers",
            wrap="register_signal_handlers",
            why="SIGTERM stays with holdfast: Lightning's handler talks to other ranks from inside the handler",
        ),
        Patch(
            target="lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop._broadcast_sigterm_tensor",
            wrap="broadcast_sigterm",
            why="ranks agree on a preemption by themselves, without a collective at each batch",
        ),
        Patch(
            target="lightning.fabric.strategies.launchers.subprocess_script:_ChildProcessObserver._terminate_all",
            wrap="terminate_all",
            why="surviving ranks get the grace period to save: Lightning kills them within seconds",
        ),
        Patch(
            target="lightning.fabric.loggers.csv_logs:_ExperimentWriter.log_metrics",
            wrap="log_row",
            why="count the rows of a table: those after the boundary are taken back at a resume",
        ),
        Patch(
            target="lightning.pytorch.callbacks.model_checkpoint:ModelCheckpoint._save_checkpoint",
            wrap="save_checkpoint",
            why="know which files are of the part of a run that is lost",
        ),
        Patch(
            target="lightning.pytorch.callbacks.model_checkpoint:ModelCheckpoint._link_checkpoint",
            wrap="link_checkpoint",
            why="the same of links",
        ),
        Patch(
            target="lightning.pytorch.callbacks.model_checkpoint:ModelCheckpoint._remove_checkpoint",
            wrap="remove_checkpoint",
            why="the same of files that are removed",
        ),
    ),
    reads=(
        Reads("lightning.pytorch.trainer.trainer:Trainer._checkpoint_connector"),
        Reads("lightning.pytorch.trainer.trainer:Trainer._logger_connector"),
        Reads("lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector._ckpt_path"),
        Reads("lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector._loaded_checkpoint"),
        Reads("lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector.dump_checkpoint"),
        Reads(f"{_LOGGER}._callback_metrics"),
        Reads(f"{_LOGGER}._logged_metrics"),
        Reads(f"{_LOGGER}._progress_bar_metrics"),
        Reads(f"{_LOGGER}._first_loop_iter"),
        Reads(f"{_LOGGER}._current_fx"),
        Reads("lightning.pytorch.trainer.connectors.logger_connector.result:_Metadata"),
        Reads("lightning.pytorch.trainer.connectors.logger_connector.result:_ResultMetric"),
        Reads("lightning.pytorch.trainer.connectors.logger_connector.result:_Sync._group"),
        Reads("lightning.pytorch.trainer.connectors.logger_connector.result:_Sync._should"),
        Reads("lightning.pytorch.loops.fit_loop:_FitLoop._combined_loader"),
        Reads("lightning.pytorch.loops.fit_loop:_FitLoop._data_fetcher"),
        Reads("lightning.pytorch.loops.fit_loop:_FitLoop._last_train_dl_reload_epoch"),
        Reads("lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop._batches_that_stepped"),
        Reads("lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop._num_ready_batches_reached"),
        Reads("lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop._results"),
        Reads("lightning.pytorch.utilities.combined_loader:_SUPPORTED_MODES"),
        Reads("lightning.pytorch.utilities.combined_loader:CombinedLoader._iterator"),
        Reads("lightning.pytorch.utilities.combined_loader:CombinedLoader._limits"),
        Reads("lightning.pytorch.utilities.combined_loader:CombinedLoader._mode"),
        Reads("lightning.pytorch.utilities.combined_loader:_MaxSizeCycle._consumed"),
        Reads("lightning.pytorch.utilities.combined_loader:_ModeIterator._idx"),
        Reads("lightning.pytorch.utilities.combined_loader:_Sequential._iterator_idx"),
    ),
    entry="lightning.pytorch.trainer.trainer:Trainer.fit",
)

TORCHMETRICS = PatchSet(
    framework="torchmetrics",
    oldest="0.9.0",
    newest="1.9.0",
    patches=(),
    reads=(
        Reads("torchmetrics.metric:Metric._computed"),
        Reads("torchmetrics.metric:Metric._defaults"),
        Reads("torchmetrics.metric:Metric._forward_cache"),
        Reads("torchmetrics.metric:Metric._update_count"),
    ),
    entry=LIGHTNING.entry,
)
"""Lightning keeps what ``self.log`` gathers in metrics; their state is saved and restored."""

TABLES = (LIGHTNING, LIGHTNING.renamed("pytorch-lightning", _NAMES), TORCHMETRICS)
_METRICS = {"lightning": TORCHMETRICS, "pytorch-lightning": TORCHMETRICS.renamed("torchmetrics", _NAMES)}


def install(module: Any) -> None:
    """``module``: ``lightning.pytorch.trainer.trainer`` or ``pytorch_lightning.trainer.trainer``."""
    from holdfast.adapters.lightning.wrappers import wrappers_of

    root = module.__name__.removesuffix(".trainer.trainer")
    table = next(one for one in TABLES if one.entry.startswith(f"{root}."))
    wrappers = wrappers_of(root)
    _METRICS[table.framework].apply(wrappers)
    table.apply(wrappers)
