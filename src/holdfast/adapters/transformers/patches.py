"""The patch tables of ``transformers.Trainer``, and of trainers made from it such as TRL's.

As little as possible is patched for good: ``Trainer.train``, which hands over to
:mod:`holdfast.adapters.transformers.run` where holdfast is switched on; ``Trainer.__init__``, for the arguments that a
platform sets; the signal handler of ``enable_jit_checkpoint``, which holdfast takes over; and ``get_last_checkpoint``,
which must not name an incomplete checkpoint. Everything else is in place while a Trainer trains or saves, and the
methods of the Trainer on that one instance, so that subclasses keep theirs.

=================  ========================================================================
``TRAINING``       one Trainer, while it trains
``CHECKPOINTING``  the same, where holdfast writes its checkpoints
``DATA``           its data loaders, while it trains
``SAVE``           one Trainer, while its own save is captured
``LEADING``        its model, where this rank saves for all and is not rank 0
``ALONE``          calls of the saving thread, where the other ranks do not save
``SHARDS``         what reads the shards of a Trainer whose model is spread over the ranks
=================  ========================================================================
"""

from __future__ import annotations

import importlib
from types import ModuleType

from holdfast.base.patching import MissingTargetsError, Patch, PatchSet, Reads
from holdfast.torch import patches as toolkit

TRAINING = "training"
CHECKPOINTING = "checkpointing"
DATA = "data"
SAVE = "save"
LEADING = "leading"
ALONE = "alone"
SHARDS = "shards"

_TRAINER = "transformers.trainer:Trainer"
TRAIN = f"{_TRAINER}.train"
SET_TRAINER = "transformers.trainer_jit_checkpoint:JITCheckpointCallback.set_trainer"
LOAD_RNG_STATE = f"{_TRAINER}._load_rng_state"


def _method(name: str, why: str, scope: str = TRAINING, *, wrap: str = "", direct: bool = False) -> Patch:
    return Patch(target=f"{_TRAINER}.{name}", wrap=wrap or name.lstrip("_"), why=why, scope=scope, direct=direct)


TRANSFORMERS = PatchSet(
    framework="transformers",
    oldest="5.3",
    newest="5.22.2",
    entry=TRAIN,
    patches=(
        Patch(target=TRAIN, wrap="train", why="resumes, and checkpoints on a preemption notice"),
        Patch(target=f"{_TRAINER}.__init__", wrap="take_arguments", why="applies HOLDFAST_TRAINER_ARGUMENTS"),
        Patch(target=SET_TRAINER, wrap="take_over_handler", why="holdfast handles SIGTERM itself"),
        Patch(
            target="transformers.trainer_utils:get_last_checkpoint",
            wrap="newest_complete",
            why="never names an incomplete checkpoint, also where a script has imported it by name",
            in_place=True,
        ),
        _method("_init_training_state", "counters of a resumed run"),
        _method("_prepare_for_training", "model, optimizer and loader are ready"),
        _method("_load_rng_state", "the random state is restored where the step boundary is"),
        _method("_run_epoch", "an epoch begins, perhaps in its middle"),
        _method("get_batch_samples", "batches are counted, and a stop may come before them", direct=True),
        _method("compute_loss", "a forward pass is complete", direct=True),
        _method("_get_grad_norm", "the gradients of a step are complete", direct=True),
        _method("_get_learning_rate", "the logged learning rate is part of the state", direct=True),
        _method("_evaluate", "eval_on_start is not repeated on resume"),
        _method("get_eval_dataloader", "its workers survive a SIGTERM to the job"),
        _method("get_test_dataloader", "its workers survive a SIGTERM to the job"),
        _method("_finalize_training", "commits the end of the run"),
        _method("_save_checkpoint", "periodic saves are holdfast's", CHECKPOINTING),
        _method("_get_output_dir", "checkpoints are in the run's location", CHECKPOINTING),
        Patch(
            target="transformers.trainer:skip_first_batches",
            wrap="skip_first_batches",
            why="a feed begins behind what was trained on",
            scope=DATA,
        ),
        _method("_get_output_dir", "the captured save has a folder of its own", SAVE, wrap="output_dir"),
        _method("_push_from_checkpoint", "a captured save uploads nothing", SAVE, wrap="nothing"),
        _method("store_flos", "a captured save adds nothing up over the ranks", SAVE, wrap="nothing"),
        Patch(
            target="transformers.distributed.mixin:DistributedMixin.should_save_on_this_rank",
            wrap="should_save_on_this_rank",
            why="the rank that leads writes for all, whatever its number",
            scope=LEADING,
            required=False,
        ),
    ),
    reads=(
        Reads(f"{_TRAINER}._maybe_log_save_evaluate"),
        Reads(f"{_TRAINER}._load_best_model"),
        Reads(f"{_TRAINER}._tr_loss"),
        Reads(f"{_TRAINER}._total_loss_scalar"),
        Reads(f"{_TRAINER}._globalstep_last_logged"),
        Reads(f"{_TRAINER}._initial_global_step", required=False),
        Reads("transformers.integrations.peft:PeftAdapterMixin._hf_peft_config_loaded"),
    ),
)

TORCH = PatchSet(
    framework="torch",
    oldest="2.6",
    newest="2.13.0",
    entry=TRAIN,
    patches=(
        Patch(
            target="torch.utils.data.dataloader:DataLoader.__iter__",
            wrap="iterate",
            why="a pass over the Trainer's data comes from a feed that another process can continue",
            scope=DATA,
        ),
        Patch(
            target="torch.distributed:barrier",
            wrap="barrier",
            why="a captured save does not wait for ranks that may be elsewhere",
            scope=ALONE,
            required=False,
        ),
        Patch(
            target="torch.distributed.checkpoint.filesystem:pickle",
            wrap="pickle",
            why="metadata of shards runs no code",
            scope=SHARDS,
            loaded=True,
        ),
        Patch(
            target="torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.load_bytes",
            wrap="load_bytes",
            why="values among the shards run no code",
            scope=SHARDS,
            loaded=True,
        ),
    ),
)

_GRPO = "trl.trainer.grpo_trainer:GRPOTrainer"

TRL = PatchSet(
    framework="trl",
    oldest="1.16.0",
    newest="1.16.0",
    patches=(),
    reads=(
        Reads(f"{_GRPO}._metrics", loaded=True),
        Reads(f"{_GRPO}._total_train_tokens", loaded=True),
        Reads(f"{_GRPO}._buffered_inputs", loaded=True),
    ),
)
"""Metrics that TRL's trainers gather between two logs; a trainer without them is saved without them."""

TABLES = (TRANSFORMERS, TORCH, TRL)


def install(module: ModuleType) -> None:
    """Patch ``transformers.trainer``, which was just imported."""
    toolkit.check()
    if missing := TORCH.missing():
        raise MissingTargetsError(TORCH, missing)
    # By name: the hooks know this table.
    TRANSFORMERS.apply(importlib.import_module("holdfast.adapters.transformers.hooks"))
