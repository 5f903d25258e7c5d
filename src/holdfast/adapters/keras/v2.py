"""tf-keras, the Keras 2 that TensorFlow keeps alive: what it calls things, and the wrappers that follow its ``fit``, in
one process and in several.

The wrappers act only inside a ``fit`` that is protected; where there are several workers, also in what adds up their
gradients.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from holdfast.adapters.keras import exchange as keras_exchange
from holdfast.adapters.keras import random as keras_random
from holdfast.adapters.keras import repeats
from holdfast.adapters.keras import seeds as keras_seeds
from holdfast.adapters.keras import tensorflow as keras_tensorflow
from holdfast.adapters.keras.data import EpochHooks
from holdfast.adapters.keras.fit import Fit, Mode
from holdfast.adapters.keras.held import generators_of, names_of_optimizers, optimizers_of
from holdfast.adapters.keras.hooks import FitHooks, Tables, Training
from holdfast.adapters.keras.kept import EXCHANGED
from holdfast.adapters.keras.ranks import local_reads, place_of
from holdfast.adapters.keras.scopes import DATA, EVALUATION, RESUME, SKIP_CALLBACKS, SKIP_MODEL
from holdfast.base.patching import PatchSet
from holdfast.config import Settings
from holdfast.runtime.session import Place

log = logging.getLogger("holdfast")


_SET_FROM_OUTSIDE = ("optimizer/", "hyper/")
"""Extras that no step changes, such as a learning rate: only callbacks do."""
_COUNTED = ("seed/", "generator/", "counter/0")
"""Extras to which each step adds."""


class TfKeras:
    """What tf-keras calls things."""

    def __init__(self, keras: Any, tensorflow: PatchSet) -> None:
        self.keras = keras
        self._tensorflow = tensorflow

    # ------------------------------------------------------------------ variables

    def extras(self, model: Any) -> dict[str, Any]:
        held = self._held_by_weights(model)
        found: dict[int, tuple[str, Any]] = {}

        def add(kind: str, variables: list[Any]) -> None:
            for index, variable in enumerate(variables):
                if id(variable) not in held and id(variable) not in found:
                    found[id(variable)] = (f"{kind}/{index}", variable)

        add("model", model.variables)
        own = self._optimizers(model.optimizer)
        for number, part in enumerate(self._all_optimizers(model)):
            # One that is not the model's own has a number in its name.
            more = "" if any(part is one for one in own) else f"/{number}"
            variables = _variables(part) if callable(part.variables) else [*_variables(part), *part.variables]
            add(f"optimizer{more}", variables)
            add(f"hyper{more}", [value for value in getattr(part, "_hyper", {}).values() if _is_variable(value)])
            add(f"weights{more}", list(getattr(part, "weights", [])))
        add("metrics", [variable for metric in model.metrics for variable in metric.variables])
        generators = [getattr(layer, "_random_generator", None) for layer in model._flatten_layers()]
        streams = [getattr(generator, "_generator", None) for generator in generators]
        add("seed", [stream.state for stream in streams if stream is not None])
        add("generator", [generator.state for generator in generators_of(model)])
        # How far these rank's replicas differ is part of the state: what is averaged when it is read is kept apart.
        per_replica = [variable for variable in model.variables if keras_tensorflow.differs_by_replica(variable)]
        held -= {id(variable) for variable in per_replica}
        add("replica", per_replica)
        add("counter", [model._train_counter, model._test_counter])
        return dict(found.values())

    def _optimizers(self, optimizer: Any) -> list[Any]:
        parts = [optimizer, getattr(optimizer, "inner_optimizer", None)]
        return [part for part in parts if part is not None]

    def _all_optimizers(self, model: Any) -> list[Any]:
        return [part for optimizer in optimizers_of(model) for part in self._optimizers(optimizer)]

    def _held_by_weights(self, model: Any) -> set[int]:
        from tf_keras.src.engine.base_layer import Layer
        from tf_keras.src.optimizers.optimizer import _BaseOptimizer

        held: set[int] = set()
        for layer in model._flatten_layers():
            if type(layer).save_own_variables is Layer.save_own_variables:
                held |= {id(variable) for variable in [*layer._trainable_weights, *layer._non_trainable_weights]}
        for part in self._all_optimizers(model):
            if getattr(type(part), "save_own_variables", None) is _BaseOptimizer.save_own_variables:
                held |= {id(variable) for variable in part.variables}
        return held

    def read(self, variable: Any) -> Any:
        return keras_tensorflow.read(variable)

    def in_weights(self, model: Any) -> list[Any]:
        parts = [part for part in self._all_optimizers(model) if not callable(part.variables)]
        return [*model.variables, *(variable for part in parts for variable in part.variables)]

    def hold(self, variable: Any) -> Any:
        return keras_tensorflow.hold(variable)

    def write(self, variable: Any, value: Any) -> None:
        keras_tensorflow.write(variable, value)

    def weights(self, model: Any) -> memoryview:
        from tf_keras.src.saving import saving_lib

        file = io.BytesIO()
        with local_reads(self._tensorflow):
            store = saving_lib.H5IOStore(file, mode="w")
            saving_lib._save_state(model, store, None, inner_path="", visited_trackables=set())
            store.close()
        return file.getbuffer()

    def load_weights(self, model: Any, data: memoryview) -> None:
        from tf_keras.src.saving import saving_lib

        class Arrays(saving_lib.H5IOStore):  # type: ignore[misc]
            """Arrays instead of datasets in a file: variables with copies compute with what they are given."""

            def get(self, path: str) -> dict[str, Any]:
                return {key: np.asarray(value) for key, value in super().get(path).items()}

        store = Arrays(io.BytesIO(data), mode="r")
        for name in ["optimizer", *(name for name in names_of_optimizers(model) if name != "optimizer")]:
            held = len(store.get(name))
            wanted = len(getattr(model, name).variables) if held else 0
            if held != wanted:  # tf-keras would skip it with a log line
                raise ValueError(f"the {name} has {wanted} variables instead of {held}")
        saving_lib._load_state(model, store, None, inner_path="", visited_trackables=set())
        store.close()

    def build(self, fit: Fit) -> None:
        """Trace the first step, which makes all variables, on data of the same kind of which there is none."""
        import tensorflow as tf

        model = fit.model
        assert isinstance(fit.data, HandlerData)
        function, strategy = model.train_function, model.distribute_strategy
        if not hasattr(function, "get_concrete_function"):  # it runs eagerly
            function = tf.function(lambda batches: strategy.run(model.train_step, args=(next(batches),)))
        empty = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=fit.data.specification())
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        dataset = strategy.experimental_distribute_dataset(empty.with_options(options))
        function.get_concrete_function(iter(dataset))

    def trained(self, model: Any) -> list[list[int]]:
        return []

    # ------------------------------------------------------------------ facts

    def learning_rate(self, model: Any) -> float | None:
        optimizer: Any = getattr(model, "optimizer", None)
        rate = getattr(optimizer, "learning_rate", None)
        if rate is None:
            return None
        if callable(rate) and not hasattr(rate, "numpy"):
            rate = rate(optimizer.iterations)
        # A variable of a strategy is no number, but has one.
        return float(rate.numpy() if hasattr(rate, "numpy") else rate)

    def is_data_error(self, error: BaseException) -> bool:
        return keras_tensorflow.is_data_error(error)

    def is_peer_lost(self, error: BaseException) -> bool:
        return keras_tensorflow.is_peer_lost(error)

    def counters(self, model: Any) -> dict[str, Any]:
        extras = self.extras(model)
        counted = {name: variable for name, variable in extras.items() if name.startswith(_COUNTED)}
        return {**counted, **_iterations(model)}

    def moving(self, model: Any) -> dict[str, Any]:
        moved = {
            name: variable for name, variable in self.extras(model).items() if not name.startswith(_SET_FROM_OUTSIDE)
        }
        exchanged = keras_exchange.counter()
        if exchanged is not None:
            moved[EXCHANGED] = exchanged
        return {**moved, **_iterations(model)}

    def doubts(self, fit: Fit) -> list[str]:
        assert isinstance(fit.data, HandlerData)
        found = keras_seeds.doubts_of(fit.data.users_dataset())
        ops: set[str] = set()
        for function in keras_tensorflow.functions_in(fit.model.train_function):
            ops |= keras_tensorflow.random_ops(function)
        if not ops:
            return found
        return [
            *found,
            f"the model draws random numbers with operations whose state cannot be saved ({', '.join(sorted(ops))}); "
            f"call tf_keras.backend.experimental.enable_tf_random_generator() before the model is made, and use "
            f"tf.random.Generator in layers of your own",
        ]


def _iterations(model: Any) -> dict[str, Any]:
    """How often each optimizer was applied."""
    return {
        f"iterations/{number}" if number else "iterations": optimizer.iterations
        for number, optimizer in enumerate(optimizers_of(model))
    }


def _is_variable(value: Any) -> bool:
    return hasattr(value, "assign") and hasattr(value, "read_value")


def _variables(target: Any) -> list[Any]:
    return [value for _, value in sorted(vars(target).items()) if _is_variable(value)]


class HandlerData:
    """The batches of one call of ``fit``, which tf-keras takes from a ``DataHandler``."""

    _enumerate: Callable[[], Iterator[Any]]
    """The handler's own ``enumerate_epochs``."""
    _steps: Callable[[], Iterator[int]]

    def __init__(self, fit: Fit, handler: Any, table: PatchSet) -> None:
        self.handler = handler
        self._fit = fit
        self._table = table
        self._hooks = EpochHooks(handler._adapter, table)
        self._anew = bool(handler._adapter.should_recreate_iterator())
        """Each epoch has an iterator of its own."""
        self._iterator: Any = None
        self._consumed = 0
        """Batches taken from it."""
        self._random = keras_random.capture()
        self._hooks_at_epoch = 0
        self._taken: list[int] = []
        """Batches taken from each iterator that was made; the first is used only if not each epoch has its own."""
        self._begun = False
        """The epoch at hand has its iterator, and the data has heard of the end of the one before."""
        repeats.settle(self.users_dataset())
        table.begin(DATA, self, to=handler)

    def follow_epochs(self, original: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
        self._enumerate = original
        return self._epochs

    def follow_steps(self, original: Callable[[], Iterator[int]]) -> Callable[[], Iterator[int]]:
        self._steps = original
        return self._followed

    def total(self) -> int | None:
        steps: int | None = self.handler._inferred_steps
        return steps

    def specification(self) -> Any:
        return self.handler._adapter.get_dataset().element_spec

    def users_dataset(self) -> Any:
        """A dataset that the script has made; None if it was tf-keras."""
        adapter = self.handler._adapter
        return adapter.get_dataset() if type(adapter).__name__ == "DatasetAdapter" else None

    def position(self) -> dict[str, Any]:
        return {
            "consumed": self._consumed,
            "created": len(self._taken),
            "taken": list(self._taken),
            "begun": self._begun,
            "pass_random": self._random,
            "batches": self.handler._inferred_steps,
            "hooks": self._hooks_at_epoch,
            "hook_calls": self._hooks.calls,
        }

    def end_epoch(self) -> None:
        """The hooks of the data come later than those of the callbacks, and so does the next iterator."""
        self._begun = False

    def repeat_all(self, saved: dict[str, Any]) -> None:
        self._hooks.repeat(saved["hook_calls"], len(saved["hook_calls"]))
        if repeats.draws_while_read(self.users_dataset()):
            repeats.owe(self.users_dataset(), saved.get("taken", []))
        else:
            self._make(saved["created"], [])

    def _make(self, until: int, taken: list[int]) -> None:
        """Iterators that nobody uses: each one made changes what the next one yields. ``taken``: how far they got."""
        draws = repeats.draws_while_read(self.users_dataset())
        for number in range(len(self._taken), until):
            iterator = iter(self.handler._dataset)
            self._taken.append(taken[number] if draws and number < len(taken) else 0)
            for _ in itertools.islice(iterator, self._taken[-1]):
                pass

    # ------------------------------------------------------------------ epochs

    def _epochs(self) -> Iterator[Any]:
        fit, position = self._fit, self._fit.position
        if fit.mode in (Mode.DONE, Mode.END):
            return  # there are none, and an iterator that is made for them changes what the next one yields
        if position is not None and fit.mode is Mode.GO_ON:
            self._go_back(position)
        self._taken.insert(0, 0)
        self._random = keras_random.capture()
        for epoch, iterator in self._enumerate():
            self._taken += [0] * int(self._anew)
            self._begun = True
            self._hooks_at_epoch = len(self._hooks.calls)
            if iterator is not self._iterator:
                self._iterator, self._consumed = iterator, 0
                if self._anew:
                    self._random = keras_random.capture()
            yield epoch, iterator

    def _go_back(self, position: dict[str, Any]) -> None:
        """To the beginning of the epoch that was interrupted, or is next."""
        saved, now = position["data"], keras_random.capture()
        self.handler._inferred_steps = saved["batches"]
        self._hooks.repeat(saved["hook_calls"], saved["hooks"])
        taken = saved.get("taken", [])[int(self._anew) :]
        self._make(saved["created"] - 1 - int(self._anew), taken)
        keras_random.restore(now)
        if position["batch"] or saved["begun"]:
            return
        # Stopped after the callbacks' end of an epoch: that of the data was still to come.
        self.handler._adapter.on_epoch_end()
        self._make(saved["created"] - 1, taken)

    # ------------------------------------------------------------------ steps

    def _followed(self) -> Iterator[int]:
        fit, run, handler = self._fit, self._fit.run, self.handler
        if fit.position is not None:
            position, fit.position = fit.position, None
            yield from self._gone_on(position)
        engine, report_every = run.engine, run.settings.progress_every
        count, first = 0, run.host.session.world > 1
        for step in self._steps():
            if report_every and run.step % report_every < count:
                run.host.poke()
            count = handler.step_increment + 1
            fit.in_flight = count
            run.pending = False
            if run.step >= engine.next_stop:
                run.at_boundary()
            fit.told = fit.fetched = False
            run.in_step = True
            if run.frozen:
                run.wait_while_frozen()
            yield step
            run.in_step = False
            self._consumed += count
            self._taken[-1] += count
            fit.complete(count)
            if first:
                first = False
                run.note_pass()
        if run.step >= engine.next_stop:
            run.at_boundary()
        fit.end_pass()

    def _gone_on(self, position: dict[str, Any]) -> Iterator[int]:
        """Drop the batches that are done, and put the state back."""
        fit, saved, done = self._fit, position["data"], position["batch"]
        self._consumed = done if self._anew else saved["consumed"]
        drawn: frozenset[str] = frozenset()
        now = keras_random.capture()
        if self._consumed:
            self._random = saved["pass_random"]
            keras_random.restore(self._random)
            for _ in range(self._consumed):
                next(self._iterator)
            self._taken[-1] += self._consumed
            drawn = keras_random.drawn_since(self._random, _shuffled(self.handler._adapter))
        if not done:
            keras_random.restore({name: value for name, value in now.items() if name not in drawn})
            return
        fit.apply(random_streams=drawn)
        logs = dict(fit.logs)
        # tf-keras takes the absence of logs for the absence of data: hand it those of the step in the other process.
        done_step = DoneStep(logs)
        with (
            self._table.applied(SKIP_CALLBACKS, done_step, to=fit.callbacks),
            self._table.applied(SKIP_MODEL, done_step, to=fit.model),
        ):
            yield max(0, done - 1)


def _shuffled(adapter: Any) -> int:
    """How many things tf-keras itself shuffles with Python's random numbers when a pass begins."""
    alone = getattr(adapter, "_shuffle_sequence", False) and adapter._enqueuer is None
    return adapter.get_size() if alone else 0


class DoneStep:
    """Stands in for a step that another process has done."""

    def __init__(self, logs: dict[str, Any]) -> None:
        self._logs = logs

    def nothing(self, original: Any) -> Callable[..., None]:
        return lambda *_, **__: None

    def train_function(self, original: Any) -> Callable[[Any], dict[str, Any]]:
        return lambda iterator: self._logs


class Position:
    """The epoch, and the step in it, at which a fit begins."""

    def __init__(self, epoch: int, step: int) -> None:
        self._at = (epoch, step)

    def initial_counters(self, original: Any) -> Callable[..., tuple[int, int]]:
        return lambda *_: self._at


class Hooks(FitHooks):
    """The wrappers."""

    def __init__(self, keras: Any, tables: Tables, training: Training) -> None:
        super().__init__(TfKeras(keras, tables.tensorflow), tables, training)

    def configure(self) -> None:
        # Dropout and the like then keep their random state in a variable, which can be saved.
        self.framework.keras.backend.experimental.enable_tf_random_generator()

    def count_exchanges(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return keras_exchange.gated(original)

    def count_after_logs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return keras_exchange.after_logs(original)

    def place(self, model: Any, settings: Settings) -> Place:
        place = place_of(model.distribute_strategy)
        if place.world > 1 and settings.rescue:
            keras_exchange.count()
        return place

    def on_data(self, fit: Fit, handler: Any) -> None:
        if fit.data is None:
            fit.data = HandlerData(fit, handler, self.tables.framework)
        else:
            Evaluation(fit, handler, self.tables.framework)

    @contextlib.contextmanager
    def begun_later(self, fit: Fit) -> Iterator[None]:
        at = Position(fit.epoch, fit.batch) if fit.mode is Mode.GO_ON else Position(fit.epochs, 0)
        with self.tables.framework.applied(RESUME, at, to=fit.model):
            yield

    def repeat_end(self, original: Callable[..., Any], fit: Fit, arguments: dict[str, Any]) -> Any:
        with self.begun_later(fit):
            return original(**{**arguments, "callbacks": None, "verbose": 0})


class Evaluation:
    """Validation: a notice need not wait for its end, and its data is read in the same order on resume."""

    def __init__(self, fit: Fit, handler: Any, table: PatchSet) -> None:
        self._fit = fit
        self._handler = handler
        self._caught_up = False
        table.begin(EVALUATION, self, to=handler)

    def follow_epochs(self, original: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
        fit, handler = self._fit, self._handler

        def epochs() -> Iterator[Any]:
            cached: Any = getattr(fit.model, "_eval_data_handler", None)
            if cached is handler:
                made = 1 + int(handler._adapter.should_recreate_iterator())
                for _ in range(0 if self._caught_up else fit.evaluations * made):
                    iter(handler._dataset)
                self._caught_up = True
                fit.evaluations += 1
            yield from original()

        return epochs

    def follow_steps(self, original: Callable[[], Iterator[int]]) -> Callable[[], Iterator[int]]:
        def steps() -> Iterator[int]:
            for step in original():
                self._fit.check_in_between()
                yield step

        return steps
