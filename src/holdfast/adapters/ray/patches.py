"""The table of Ray Train: what is replaced and read in ``ray``.

On the driver, a run config takes ``jit_checkpoint_config=``. The rest is done in a worker, from the start of its
training context to its end (scope ``worker``, on that worker's own objects), and while a loop is followed there
(``follow``).
"""

from __future__ import annotations

import importlib
from types import ModuleType

from holdfast.base.patching import MissingTargetsError, Patch, PatchSet, Reads

_EXECUTION = "ray.train.v2._internal.execution"
_CONTEXT = f"{_EXECUTION}.context"
_LOADER = "ray.train.torch.train_loop_utils:_WrappedDataLoader"

RAY = PatchSet(
    framework="ray",
    oldest="2.58",
    newest="2.60.0",
    patches=(
        Patch(
            target="ray.train:JITCheckpointConfig",
            wrap="jit_checkpoint_config",
            why="the explicit way to switch just-in-time checkpoints on",
            adds=True,
        ),
        Patch(
            target="ray.train.v2.api.config:RunConfig.__init__",
            wrap="run_config_init",
            why="takes jit_checkpoint_config=",
        ),
        Patch(
            target=f"{_EXECUTION}.worker_group.thread_runner:ThreadRunner.run",
            wrap="run",
            why="the training function is followed, and parked after a preemption",
            scope="worker",
        ),
        Patch(
            target=f"{_CONTEXT}:TrainContext.report",
            wrap="report",
            why="the step at which a checkpoint was reported",
            scope="reports",
        ),
        Patch(
            target=f"{_CONTEXT}:TrainContext._wait_then_report",
            wrap="put",
            why="a note of every reported checkpoint, before Ray learns of it",
            scope="reports",
        ),
        Patch(
            target=f"{_LOADER}.__iter__",
            wrap="iterate",
            why="passes over loaders that fetch one batch ahead",
            scope="follow",
            loaded=True,
            direct=True,
        ),
    ),
    reads=(
        Reads("ray.train.v2._internal.constants:is_v2_enabled"),
        Reads(f"{_EXECUTION}.callback:WorkerGroupCallback.before_worker_group_start"),
        Reads(f"{_EXECUTION}.callback:WorkerCallback.after_init_train_context"),
        Reads(f"{_EXECUTION}.callback:WorkerCallback.before_worker_shutdown"),
        *(
            Reads(f"{_CONTEXT}:{name}")
            for name in (
                "get_train_context",
                "TrainRunContext.run_config",
                "TrainRunContext.backend_config",
                "ExecutionContext.training_thread_runner",
                "TrainContext.train_run_context",
                "TrainContext.execution_context",
                "TrainContext.preemption_context",
                "TrainContext.checkpoint",
                "TrainContext.report_call_index",
                "TrainContext.get_checkpoint",
                "TrainContext.get_experiment_name",
                "TrainContext.get_storage",
                "TrainContext.get_world_rank",
                "TrainContext.get_world_size",
            )
        ),
        Reads(f"{_EXECUTION}.preemption:PreemptionContext.preemption_info"),
        Reads("ray.train.v2.api.preemption:PreemptionInfo"),
        Reads(f"{_EXECUTION}.storage:StorageContext.experiment_fs_path"),
        Reads(f"{_EXECUTION}.storage:StorageContext.storage_filesystem"),
        Reads(f"{_EXECUTION}.storage:StorageContext._check_validation_file"),
        Reads(f"{_EXECUTION}.train_fn_utils:set_train_fn_utils"),
        Reads(f"{_EXECUTION}.train_fn_utils:DistributedTrainFnUtils.report"),
        Reads(f"{_EXECUTION}.train_fn_utils:DistributedTrainFnUtils.get_checkpoint"),
        Reads("ray._private.state:state"),
        Reads("ray._private.state:GlobalState.get_draining_nodes"),
        Reads(f"{_LOADER}._dataloader", loaded=True),
        Reads(f"{_LOADER}._move_to_device", loaded=True),
        Reads(f"{_LOADER}._wait_for_batch", loaded=True),
    ),
    entry="ray.train.v2.api.data_parallel_trainer:DataParallelTrainer.fit",
)

TABLES = (RAY,)


def install(module: ModuleType) -> None:
    """Let run configs of Ray Train take ``jit_checkpoint_config=``. ``module``: ``ray.train``."""
    if missing := RAY.missing():  # before what needs them is imported
        raise MissingTargetsError(RAY, missing)
    RAY.apply(importlib.import_module("holdfast.adapters.ray.hooks"))
