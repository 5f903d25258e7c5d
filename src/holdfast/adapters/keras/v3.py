"""Keras 3: what it calls things, and the wrappers that follow its ``fit``, whichever backend computes.

The wrappers act only inside a ``fit`` that is protected. From its data iterator and its list of callbacks on, methods
of those very objects are followed.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from holdfast.adapters.keras import seeds as keras_seeds
from holdfast.adapters.keras import tensorflow as keras_tensorflow
from holdfast.adapters.keras.data import EpochData, Evaluation
from holdfast.adapters.keras.fit import Fit, Mode
from holdfast.adapters.keras.hooks import FitHooks, Tables, Train
from holdfast.adapters.keras.scopes import RESUME
from holdfast.agree import LocalBoard
from holdfast.config import Settings
from holdfast.runtime.session import Place


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
        add("optimizer", list(model.optimizer.variables) if model.optimizer is not None else [])
        add("metrics", model.metrics_variables)
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
        optimizer = model.optimizer
        if optimizer is not None and type(optimizer).save_own_variables is BaseOptimizer.save_own_variables:
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
        if self.backend == "tensorflow":
            # Elsewhere fit has done it: this backend makes variables while it traces the first step.
            model._symbolic_build(data_batch=fit.data.specification())
        elif model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    def settle(self, model: Any) -> None:
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()

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
        if model.optimizer is not None:
            counted.append(model.optimizer._iterations)
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


class Hooks(FitHooks):
    """The wrappers."""

    def __init__(self, keras: Any, tables: Tables, train: Train) -> None:
        super().__init__(Keras3(keras), tables, train)

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
