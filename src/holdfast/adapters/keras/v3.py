"""Keras 3: what it calls things, and the wrappers that follow its ``fit``, whichever backend computes.

The wrappers act only inside a ``fit`` that is protected. From its data iterator and its list of callbacks on, methods
of those very objects are followed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from holdfast.adapters.keras import seeds as keras_seeds
from holdfast.adapters.keras import tensorflow as keras_tensorflow
from holdfast.adapters.keras.data import EpochData, Evaluation
from holdfast.adapters.keras.fit import Fit, Mode
from holdfast.adapters.keras.held import generators_of, optimizers_of
from holdfast.adapters.keras.hooks import FitHooks, Tables, Training
from holdfast.adapters.keras.scopes import RESUME
from holdfast.agree import LocalBoard
from holdfast.config import Settings
from holdfast.runtime.session import Place

log = logging.getLogger("holdfast")

_BACKENDS = ("tensorflow", "torch")
"""On which Keras trains in a way that is followed."""


class Keras3:
    """What Keras 3 calls things."""

    def __init__(self, keras: Any) -> None:
        self.keras = keras
        self.backend = str(keras.config.backend())

    # ------------------------------------------------------------------ variables

    def extras(self, model: Any) -> dict[str, Any]:
        held = self._held_by_weights(model)
        found: dict[int, tuple[str, Any]] = {}

        def add(kind: str, variables: list[Any]) -> None:
            for index, variable in enumerate(variables):
                if id(variable) not in held and id(variable) not in found:
                    found[id(variable)] = (f"{kind}/{index}", variable)

        add("model", model.variables)
        for number, optimizer in enumerate(optimizers_of(model)):
            # One that is not the model's own has a number in its name.
            add("optimizer" if optimizer is model.optimizer else f"optimizer/{number}", list(optimizer.variables))
        add("metrics", model.metrics_variables)
        add("generator", [generator.state for generator in generators_of(model)])
        generator = self._global_seed_generator()
        if generator is not None:
            add("seed", [generator.state])
        return dict(found.values())

    def _held_by_weights(self, model: Any) -> set[int]:
        """The variables that the weights file holds."""
        from keras.src.optimizers.base_optimizer import BaseOptimizer
        from keras.src.saving import saving_lib

        seen: set[int] = set()

        class Recorder(saving_lib.H5IOStore):  # type: ignore[misc]
            def __init__(self) -> None:
                self.h5_file = True

            def __bool__(self) -> bool:
                return True

            def make(self, path: str, metadata: Any = None) -> Any:
                return self

            def __setitem__(self, key: str, value: Any) -> None:
                seen.add(id(value))

        saving_lib._save_state(model, Recorder(), None, inner_path="", visited_saveables=set())
        for optimizer in optimizers_of(model):
            named = optimizer is model.optimizer or any(value is optimizer for value in vars(model).values())
            if named and type(optimizer).save_own_variables is BaseOptimizer.save_own_variables:
                seen |= {id(variable) for variable in optimizer.variables}
        return seen

    def _global_seed_generator(self) -> Any:
        from keras.src.backend.common import global_state
        from keras.src.random import seed_generator

        # Keras has a constant for this name from 3.13 on.
        name = getattr(seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator")
        return global_state.get_global_attribute(name)

    def read(self, variable: Any) -> Any:
        if self.backend == "tensorflow":
            return keras_tensorflow.read(variable)
        return np.array(self.keras.ops.convert_to_numpy(variable))

    def in_weights(self, model: Any) -> list[Any]:
        return [*model.variables, *(variable for one in optimizers_of(model) for variable in one.variables)]

    def hold(self, variable: Any) -> Any:
        return keras_tensorflow.hold(variable) if self.backend == "tensorflow" else self.read(variable)

    def write(self, variable: Any, value: Any) -> None:
        if self.backend == "tensorflow":
            keras_tensorflow.write(variable, value)
        else:
            variable.assign(value)

    def weights(self, model: Any) -> memoryview:
        from keras.src.saving import saving_lib

        file = io.BytesIO()
        store = saving_lib.H5IOStore(file, mode="w")
        saving_lib._save_state(model, store, None, inner_path="", visited_saveables=set())
        store.close()
        return file.getbuffer()

    def load_weights(self, model: Any, data: memoryview) -> None:
        from keras.src.saving import saving_lib

        store = saving_lib.H5IOStore(io.BytesIO(data), mode="r")
        failed: set[int] = set()
        errors: dict[Any, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Keras warns where it loads a part only
            saving_lib._load_state(
                model,
                weights_store=store,
                assets_store=None,
                inner_path="",
                visited_saveables=set(),
                failed_saveables=failed,
                error_msgs=errors,
            )
        store.close()
        if failed:
            raise ValueError(" ".join(str(next(iter(errors.values()))[1]).split()))

    def build(self, fit: Fit) -> None:
        model = fit.model
        assert isinstance(fit.data, EpochData)
        if self.backend != "tensorflow":
            # Elsewhere fit has built the model: TensorFlow makes variables while it traces the first step.
            if model.optimizer is not None and not model.optimizer.built and not self._has_own_step(model):
                model.optimizer.build(model.trainable_variables)
        elif self._has_own_step(model):
            self._trace(model, fit.data.specification())
        else:
            model._symbolic_build(data_batch=fit.data.specification())
        # What only a step builds that cannot be traced; which variables it has trained is known.
        variables = model.variables
        for optimizer, trained in zip(optimizers_of(model), fit.trained(), strict=False):
            if not optimizer.built and trained and max(trained) < len(variables):
                optimizer.build([variables[index] for index in trained])

    def trained(self, model: Any) -> list[list[int]]:
        numbers = {id(variable): index for index, variable in enumerate(model.variables)}
        return [
            [numbers[id(variable)] for variable in optimizer._trainable_variables if id(variable) in numbers]
            for optimizer in optimizers_of(model)
        ]

    def _has_own_step(self, model: Any) -> bool:
        """Whether the script says itself what a step is: only that makes all variables, and knows what trains which."""
        return not type(model).train_step.__module__.startswith("keras.")

    def _trace(self, model: Any, specification: Any) -> None:
        """Trace the first step, which makes all variables, on data of the same kind of which there is none."""
        import tensorflow as tf

        strategy = model.distribute_strategy
        whole = [function for function in keras_tensorflow.functions_in(model.train_function) if _is_loop(function)]
        if not whole:  # it runs eagerly
            whole = [tf.function(lambda batches: strategy.run(model.train_step, args=(next(batches),)))]
        empty = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=specification)
        try:
            whole[0].get_concrete_function(iter(strategy.experimental_distribute_dataset(empty)))
        except Exception:
            if not model.run_eagerly:
                raise
            log.debug("the step of this model runs eagerly alone", exc_info=True)

    # ------------------------------------------------------------------ facts

    def learning_rate(self, model: Any) -> float | None:
        optimizer = model.optimizer
        return None if optimizer is None else float(self.keras.ops.convert_to_numpy(optimizer.learning_rate))

    def is_data_error(self, error: BaseException) -> bool:
        return keras_tensorflow.is_data_error(error)

    def is_peer_lost(self, error: BaseException) -> bool:
        return False

    def counters(self, model: Any) -> dict[str, Any]:
        if self.backend != "tensorflow":
            return {}
        generators = [generator for layer in model._flatten_layers() for generator in layer._seed_generators]
        everyones = self._global_seed_generator()
        counted = [generator.state for generator in (*generators, everyones) if generator is not None]
        counted += [optimizer._iterations for optimizer in optimizers_of(model)]
        return {str(number): variable for number, variable in enumerate(counted)}

    def moving(self, model: Any) -> dict[str, Any]:
        return {}

    def doubts(self, fit: Fit) -> list[str]:
        found: list[str] = []
        if self.backend == "tensorflow":
            assert isinstance(fit.data, EpochData)
            found += keras_seeds.doubts_of(fit.data.users_dataset())
            ops: set[str] = set()
            for function in keras_tensorflow.functions_in(fit.model.train_function):
                ops |= keras_tensorflow.random_ops(function)
            if ops:
                found.append(
                    f"the model draws random numbers with TensorFlow's own operations ({', '.join(sorted(ops))}), "
                    f"whose state cannot be saved; use keras.random with a keras.random.SeedGenerator instead"
                )
        return found


def _is_loop(function: Any) -> bool:
    """Whether a ``tf.function`` takes an iterator, and not the batch of one step."""
    return str(function.python_function.__name__).startswith("multi_step")


class Hooks(FitHooks):
    """The wrappers."""

    def __init__(self, keras: Any, tables: Tables, training: Training) -> None:
        super().__init__(Keras3(keras), tables, training)
        self.reports_loops = self.framework.backend != "torch"

    def unsupported(self) -> str | None:
        backend = self.framework.backend
        if backend in _BACKENDS:
            return None
        return f"holdfast does not protect fit of Keras on {backend}: set KERAS_BACKEND to {' or '.join(_BACKENDS)}"

    def configure(self) -> None:
        """Nothing."""

    def place(self, model: Any, settings: Settings) -> Place:
        return Place(0, 1, LocalBoard())

    def on_data(self, fit: Fit, iterator: Any) -> None:
        creates_seeds = self.framework.backend == "tensorflow"
        if fit.data is None:
            fit.data = EpochData(fit, iterator, self.tables.framework, creates_seeds=creates_seeds)
        else:
            Evaluation(fit, iterator, self.tables.framework, creates_seeds=creates_seeds)

    @contextlib.contextmanager
    def begun_later(self, fit: Fit) -> Iterator[None]:
        model = fit.model
        wanted = fit.epoch if fit.mode is Mode.GO_ON else fit.epochs
        before = getattr(model, "_initial_epoch", None)

        def set_epoch() -> None:
            model._initial_epoch = wanted

        fit.before_first_epoch = set_epoch
        try:
            with self.tables.framework.applied(RESUME, Resumed(fit), to=model):
                yield
        finally:
            model._initial_epoch = before

    def repeat_end(self, original: Callable[..., Any], fit: Fit, arguments: dict[str, Any]) -> Any:
        return original(**{**arguments, "callbacks": None, "verbose": 0, "initial_epoch": fit.epochs})


class Resumed:
    """The logs of an epoch of which no batch was left: those of a last step are in another process."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit

    def metrics_result(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda logs: original(logs or self._fit.logs or {})
