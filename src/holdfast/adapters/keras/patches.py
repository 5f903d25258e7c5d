"""Everything that the adapter replaces or reads in Keras 3, in tf-keras and in TensorFlow under them.

For the life of the process there are only wrappers of ``fit``, of two constructors and of what shuffles, adds up
gradients and applies them. Each acts only inside a ``fit`` that is protected, but for the last, which reports training
outside of any. All else is patched on the very objects of a ``fit``.

TensorFlow has a table of its own: Keras 3 may run on JAX or torch, and TensorFlow may then be absent or not imported.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import sys
from typing import Any

from holdfast.adapters.keras.installed import LEFT_ALONE
from holdfast.adapters.keras.scopes import (
    CALLBACKS,
    DATA,
    DATASET,
    EVALUATION,
    LOCAL_READS,
    RESUME,
    SHUFFLES,
    SKIP_CALLBACKS,
    SKIP_MODEL,
)
from holdfast.base.patching import MissingTargetsError, Patch, PatchSet, Reads


def _callbacks(kind: str) -> tuple[Patch, ...]:
    heard = {
        "on_train_begin": "the state is put back between two epochs",
        "on_train_end": "the callbacks get the logs of the last epoch after a resume",
        "on_epoch_begin": "where the fit is",
        "on_epoch_end": "where the fit is: the boundary between two epochs",
        "on_train_batch_begin": "the batch of a step is there",
        "on_train_batch_end": "a step is computed",
        "on_test_begin": "the batches of an epoch are done",
    }
    return tuple(
        Patch(target=f"{kind}.{name}", wrap=name, why=why, scope=CALLBACKS, direct=True) for name, why in heard.items()
    )


_V3 = "keras.src"
_ITERATOR = f"{_V3}.trainers.epoch_iterator:EpochIterator"
_PY_DATASET = f"{_V3}.trainers.data_adapters.py_dataset_adapter:PyDatasetAdapter"
_CALLBACK_LIST = f"{_V3}.callbacks.callback_list:CallbackList"
_TRAINERS = ("tensorflow.trainer:TensorFlowTrainer", "torch.trainer:TorchTrainer")
_V3_SAVING = f"{_V3}.saving.saving_lib"

KERAS = PatchSet(
    framework="keras",
    oldest="3.11",
    newest="3.15.1",
    entry=f"{_V3}.models.model:Trainer.fit",
    patches=(
        # The backend's own class, under the name by which Model inherits from it.
        Patch(target=f"{_V3}.models.model:Trainer.fit", wrap="follow_fit", why="a fit begins and ends"),
        Patch(target=f"{_ITERATOR}.__init__", wrap="follow_data", why="the data of a fit"),
        Patch(target=f"{_CALLBACK_LIST}.__init__", wrap="follow_callbacks", why="the callbacks of a fit"),
        Patch(
            target=f"{_V3}.trainers.data_adapters.array_data_adapter:ArrayDataAdapter.get_tf_dataset",
            wrap="remember_shuffles",
            why="arrays without a seed are shuffled by a stream that is saved",
        ),
        Patch(
            target=f"{_V3}.optimizers.base_optimizer:BaseOptimizer.apply",
            wrap="follow_apply",
            why="training outside of fit is reported",
        ),
        *_callbacks(_CALLBACK_LIST),
        Patch(target=f"{_ITERATOR}._get_iterator", wrap="follow_iterator", why="a pass over the data", scope=DATA),
        Patch(target=f"{_ITERATOR}._enumerate_iterator", wrap="follow_steps", why="the step boundary", scope=DATA),
        Patch(
            target=f"{_ITERATOR}._get_iterator",
            wrap="follow_iterator",
            why="the same order on resume",
            scope=EVALUATION,
        ),
        Patch(
            target=f"{_ITERATOR}._enumerate_iterator",
            wrap="follow_steps",
            why="a notice does not wait for the end of a validation",
            scope=EVALUATION,
        ),
        Patch(target=f"{_PY_DATASET}.on_epoch_begin", wrap="on_epoch_begin", why="repeated on resume", scope=DATASET),
        Patch(target=f"{_PY_DATASET}.on_epoch_end", wrap="on_epoch_end", why="repeated on resume", scope=DATASET),
        Patch(
            target=f"{_V3}.trainers.trainer:Trainer._get_metrics_result_or_logs",
            wrap="metrics_result",
            why="an epoch of which no batch is left has the logs of its last step",
            scope=RESUME,
        ),
    ),
    reads=(
        Reads(f"{_V3_SAVING}:H5IOStore.make"),
        Reads(f"{_V3_SAVING}:H5IOStore.close"),
        Reads(f"{_V3_SAVING}:H5IOStore.h5_file"),
        Reads(f"{_V3_SAVING}:_save_state"),
        Reads(f"{_V3_SAVING}:_load_state"),
        Reads(f"{_V3}.optimizers.base_optimizer:BaseOptimizer.save_own_variables"),
        Reads(f"{_V3}.optimizers.base_optimizer:BaseOptimizer._iterations"),
        Reads(f"{_V3}.optimizers.base_optimizer:BaseOptimizer._trainable_variables"),
        Reads(f"{_V3}.backend.common.global_state:get_global_attribute"),
        Reads(f"{_V3}.random.seed_generator:global_seed_generator"),
        Reads(f"{_V3}.random.seed_generator:GLOBAL_SEED_GENERATOR", required=False),
        Reads(f"{_V3}.backend.common.variables:Variable._value"),
        Reads(f"{_V3}.layers.layer:Layer._flatten_layers"),
        Reads(f"{_V3}.layers.layer:Layer._seed_generators"),
        Reads(f"{_V3}.trainers.trainer:Trainer._symbolic_build"),
        Reads(f"{_V3}.trainers.trainer:Trainer._initial_epoch"),
        Reads(f"{_CALLBACK_LIST}._history"),
        Reads(f"{_ITERATOR}._num_batches"),
        Reads(f"{_ITERATOR}._current_iterator"),
        Reads(f"{_ITERATOR}._steps_seen"),
        Reads(f"{_PY_DATASET}.py_dataset"),
        Reads(f"{_PY_DATASET}.enqueuer"),
        Reads(f"{_V3}.trainers.data_adapters.tf_dataset_adapter:TFDatasetAdapter._dataset"),
        Reads(f"{_V3}.trainers.data_adapters.tf_dataset_adapter:TFDatasetAdapter.get_tf_dataset"),
        Reads(f"{_V3}.backend.tensorflow.trainer:TFEpochIterator._distributed_dataset", loaded=True),
        *(Reads(f"{_V3}.backend.{trainer}._eval_epoch_iterator", loaded=True) for trainer in _TRAINERS),
        *(Reads(f"{_V3}.backend.{trainer}._initial_epoch", loaded=True) for trainer in _TRAINERS),
    ),
)

_V2 = "tf_keras.src"
_MODEL = f"{_V2}.engine.training:Model"
_HANDLER = f"{_V2}.engine.data_adapter:DataHandler"
_SEQUENCE = f"{_V2}.engine.data_adapter:KerasSequenceAdapter"
_V2_SAVING = f"{_V2}.saving.saving_lib"

TF_KERAS = PatchSet(
    framework="tf-keras",
    oldest="2.18",
    newest="2.21.0",
    entry=f"{_MODEL}.fit",
    patches=(
        Patch(target=f"{_MODEL}.fit", wrap="follow_fit", why="a fit begins and ends"),
        Patch(target=f"{_HANDLER}.__init__", wrap="follow_data", why="the data of a fit"),
        Patch(target=f"{_V2}.callbacks:CallbackList.__init__", wrap="follow_callbacks", why="the callbacks of a fit"),
        Patch(
            target=f"{_V2}.engine.data_adapter:TensorLikeDataAdapter.__init__",
            wrap="remember_shuffles",
            why="arrays without a seed are shuffled by a stream that is saved",
        ),
        Patch(
            target=f"{_V2}.optimizers.optimizer:Optimizer.aggregate_gradients",
            wrap="count_exchanges",
            why="tells whether a step that lost its peer has changed the weights",
        ),
        Patch(
            target=f"{_V2}.engine.training:reduce_per_replica",
            wrap="count_after_logs",
            why="tells whether a step that lost its peer has changed the weights",
        ),
        Patch(
            target=f"{_V2}.optimizers.optimizer:_BaseOptimizer.apply_gradients",
            wrap="follow_apply",
            why="training outside of fit is reported",
        ),
        Patch(
            target=f"{_V2}.optimizers.legacy.optimizer_v2:OptimizerV2.apply_gradients",
            wrap="follow_apply",
            why="training outside of fit is reported",
        ),
        *_callbacks(f"{_V2}.callbacks:CallbackList"),
        Patch(target=f"{_HANDLER}.enumerate_epochs", wrap="follow_epochs", why="a pass over the data", scope=DATA),
        Patch(target=f"{_HANDLER}.steps", wrap="follow_steps", why="the step boundary", scope=DATA),
        Patch(
            target=f"{_HANDLER}.enumerate_epochs",
            wrap="follow_epochs",
            why="the same order on resume",
            scope=EVALUATION,
        ),
        Patch(
            target=f"{_HANDLER}.steps",
            wrap="follow_steps",
            why="a notice does not wait for the end of a validation",
            scope=EVALUATION,
        ),
        Patch(target=f"{_SEQUENCE}.on_epoch_end", wrap="on_epoch_end", why="repeated on resume", scope=DATASET),
        Patch(
            target=f"{_MODEL}._maybe_load_initial_counters_from_ckpt",
            wrap="initial_counters",
            why="the epoch and the step at which fit begins",
            scope=RESUME,
        ),
        Patch(
            target=f"{_V2}.callbacks:CallbackList.on_train_batch_begin",
            wrap="nothing",
            why="the callbacks have heard of this step",
            scope=SKIP_CALLBACKS,
        ),
        Patch(
            target=f"{_V2}.callbacks:CallbackList.on_train_batch_end",
            wrap="nothing",
            why="the callbacks have heard of this step",
            scope=SKIP_CALLBACKS,
        ),
        Patch(
            target=f"{_MODEL}.train_function",
            wrap="train_function",
            why="the step is done: its logs are those that were saved",
            scope=SKIP_MODEL,
        ),
    ),
    reads=(
        Reads(f"{_V2}.engine.base_layer:Layer.save_own_variables"),
        Reads(f"{_V2}.engine.base_layer:Layer._trainable_weights"),
        Reads(f"{_V2}.engine.base_layer:Layer._non_trainable_weights"),
        Reads(f"{_V2}.engine.base_layer:Layer._flatten_layers"),
        Reads(f"{_V2}.engine.base_layer:BaseRandomLayer._random_generator"),
        Reads(f"{_V2}.backend:RandomGenerator._generator"),
        Reads(f"{_V2}.mixed_precision.autocast_variable:AutoCastVariable._variable"),
        Reads(f"{_V2}.optimizers.optimizer:_BaseOptimizer.save_own_variables"),
        Reads(f"{_V2}.optimizers.legacy.optimizer_v2:OptimizerV2._hyper"),
        Reads(f"{_V2_SAVING}:H5IOStore.get"),
        Reads(f"{_V2_SAVING}:H5IOStore.close"),
        Reads(f"{_V2_SAVING}:_save_state"),
        Reads(f"{_V2_SAVING}:_load_state"),
        Reads(f"{_V2}.callbacks:CallbackList._history"),
        Reads(f"{_MODEL}._train_counter"),
        Reads(f"{_MODEL}._test_counter"),
        Reads(f"{_MODEL}._eval_data_handler"),
        Reads(f"{_HANDLER}._adapter"),
        Reads(f"{_HANDLER}._dataset"),
        Reads(f"{_HANDLER}._inferred_steps"),
        Reads(f"{_HANDLER}.step_increment"),
        Reads(f"{_V2}.engine.data_adapter:DatasetAdapter.get_dataset"),
        Reads(f"{_V2}.engine.data_adapter:DataAdapter.should_recreate_iterator"),
        Reads(f"{_V2}.engine.data_adapter:DataAdapter.on_epoch_end"),
        Reads(f"{_SEQUENCE}._keras_sequence"),
        Reads(f"{_SEQUENCE}._shuffle_sequence"),
        Reads(f"{_SEQUENCE}._enqueuer"),
        Reads(f"{_SEQUENCE}.get_size"),
    ),
)

_PYTHON = "tensorflow.python"
_DISTRIBUTIONS = ("tensorflow-cpu", "tensorflow", "tensorflow-intel", "tensorflow-macos")


def _tensorflow() -> str:
    """The distribution that TensorFlow is installed from."""
    for name in _DISTRIBUTIONS:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return "tensorflow"


TENSORFLOW = PatchSet(
    framework=_tensorflow(),
    oldest="2.18",
    newest="2.21.0",
    patches=(
        Patch(
            target=f"{_PYTHON}.data.util.random_seed:get_seed",
            wrap="seed_datasets",
            why="datasets that the script shuffles without a seed get one that is saved",
        ),
        # Where Keras and tf-keras look it up: both are names for tensorflow.python.ops.random_ops.random_shuffle.
        Patch(
            target="tensorflow._api.v2.random:shuffle",
            wrap="shuffle_again",
            why="arrays without a seed are shuffled by a stream that is saved",
            scope=SHUFFLES,
        ),
        Patch(
            target="tensorflow._api.v2.compat.v2.random:shuffle",
            wrap="shuffle_again",
            why="arrays without a seed are shuffled by a stream that is saved",
            scope=SHUFFLES,
        ),
        Patch(
            target=f"{_PYTHON}.distribute.values:SyncOnReadVariable._get_cross_replica",
            wrap="read_here",
            why="weights are read from this process alone: asking the others would wait for them",
            scope=LOCAL_READS,
        ),
    ),
    reads=(
        Reads(f"{_PYTHON}.distribute.values:DistributedValues._values"),
        Reads(f"{_PYTHON}.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._num_workers"),
        Reads(f"{_PYTHON}.distribute.multi_worker_util:id_in_cluster"),
        Reads(f"{_PYTHON}.eager.context:context"),
        Reads(f"{_PYTHON}.eager.context:executing_eagerly"),
        Reads(f"{_PYTHON}.eager.context:global_seed"),
        Reads(f"{_PYTHON}.eager.context:Context.set_config_key_value"),
        Reads(f"{_PYTHON}.eager.context:Context.get_config_key_value"),
        Reads(f"{_PYTHON}.eager.context:Context.abort_collective_ops"),
        Reads(f"{_PYTHON}.eager.polymorphic_function.polymorphic_function:Function._list_all_concrete_functions"),
        Reads(f"{_PYTHON}.framework.errors:UNAVAILABLE"),
        Reads(f"{_PYTHON}.framework.ops:Operation._add_control_inputs"),
        Reads(f"{_PYTHON}.ops.resource_variable_ops:ResourceVariable"),
        Reads(f"{_PYTHON}.ops.stateful_random_ops:global_generator"),
        Reads(f"{_PYTHON}.data.ops.dataset_ops:DatasetV2._inputs"),
        Reads(f"{_PYTHON}.data.ops.shuffle_op:_ShuffleDataset._seed"),
        Reads(f"{_PYTHON}.data.ops.shuffle_op:_ShuffleDataset._seed2"),
        Reads(f"{_PYTHON}.data.ops.map_op:_ParallelMapDataset._map_func"),
        Reads(f"{_PYTHON}.data.ops.structured_function:StructuredFunctionWrapper.function"),
    ),
)

TABLES: tuple[PatchSet, ...] = (KERAS, TF_KERAS, TENSORFLOW)


def _is_older(module: Any, oldest: str) -> bool:
    numbers = [int(number) for number in re.findall(r"\d+", getattr(module, "__version__", ""))]
    return bool(numbers) and numbers < [int(number) for number in oldest.split(".")]


def install(module: Any) -> None:
    """Follow the ``fit`` of ``keras`` or ``tf_keras``, which was just imported."""
    name = module.__name__.partition(".")[0]
    table = TF_KERAS if name == "tf_keras" else KERAS
    for needed in (table, TENSORFLOW) if "tensorflow" in sys.modules else (table,):
        missing = needed.missing()
        if needed is KERAS and _is_older(module, KERAS.oldest):
            # Its names are the same, but its iterator does not say where a group of batches ends.
            missing.append(f"{_ITERATOR}._enumerate_iterator of keras {KERAS.oldest}")
        if missing:
            LEFT_ALONE.add(name)
            raise MissingTargetsError(dataclasses.replace(needed, entry=table.entry), missing)
    from holdfast.adapters.keras.training import follow

    follow(module, table, TENSORFLOW)
    LEFT_ALONE.discard(name)
