"""One call of ``fit``: where it is, what belongs to its state, and how it goes on.

The training thread asks for the next batch when all that belongs to the one before is done, callbacks included: that
is the step boundary. In steady state it costs a comparison. A position is an epoch and the batches done in it; when
an epoch's batches are done, what validation and the callbacks at its end would change is kept aside, so that a stop in
there neither waits for their end nor forgets them: the resumed run does them again.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import re
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from holdfast.adapters.keras import callbacks as keras_callbacks
from holdfast.adapters.keras import random as keras_random
from holdfast.adapters.keras.held_weights import HeldWeights, Variables
from holdfast.adapters.keras.kept import KeptState
from holdfast.adapters.keras.seeds import Seeds
from holdfast.config import Settings
from holdfast.engine.engine import Engine
from holdfast.errors import StateError
from holdfast.runtime.host import Host

log = logging.getLogger("holdfast")

_NOT_IN_0_1_0 = re.compile(r"generator/|\w+/\d+/")
"""Variables of the generators and of the further optimizers that a model holds."""


class Framework(Variables, Protocol):
    """What Keras 3 and tf-keras do differently."""

    def extras(self, model: Any) -> dict[str, Any]:
        """Variables that the weights file does not hold, by name."""

    def weights(self, model: Any) -> memoryview:
        """The weights file, as the framework itself writes it."""

    def load_weights(self, model: Any, data: memoryview) -> None: ...

    def build(self, fit: Fit) -> None:
        """Make all variables of a model that has seen no data yet."""

    def trained(self, model: Any) -> list[list[int]]:
        """Of each optimizer of the model, the numbers of the variables that it trains; empty where nobody needs it."""

    def learning_rate(self, model: Any) -> float | None: ...

    def is_data_error(self, error: BaseException) -> bool:
        """Whether an error inside a step says that nothing was computed in it, since its batch could not be had."""

    def is_peer_lost(self, error: BaseException) -> bool:
        """Whether an error inside a step says that another worker is gone."""

    def counters(self, model: Any) -> dict[str, Any]:
        """Variables, by name, to which each step adds the same whole numbers."""

    def moving(self, model: Any) -> dict[str, Any]:
        """Variables, by name, that a step may change before it hears from the other workers."""

    def doubts(self, fit: Fit) -> list[str]:
        """What cannot be exact in this training, in words."""


class Run(Protocol):
    """The run that a call of ``fit`` belongs to."""

    settings: Settings
    host: Host
    engine: Engine
    step: int
    """Steps completed, through all calls of ``fit``."""
    epochs_before: int
    pending: bool
    in_step: bool
    frozen: bool
    kept: KeptState | None
    doubts_told: set[str]
    """Reasons, already logged, why a call of ``fit`` cannot be exact."""

    def listen_again(self) -> None: ...

    def at_boundary(self, epochs_done: int | None = None) -> None: ...

    def before_step(self) -> None: ...

    def note_boundary(self) -> None: ...

    def note_pass(self) -> None: ...

    def put_back(self) -> bool: ...

    def wait_while_frozen(self) -> None: ...


class Data(Protocol):
    """The batches that one call of ``fit`` trains on."""

    def position(self) -> dict[str, Any]:
        """Where the data is at the last boundary."""

    def end_epoch(self) -> None:
        """The callbacks have heard of an epoch's end: the position is the beginning of the next one."""

    def total(self) -> int | None:
        """Batches of an epoch, where that is known."""

    def repeat_all(self, saved: dict[str, Any]) -> None:
        """Bring the data to where a finished call has left it."""


class Counters:
    """Variables to which each step adds the same: how often the optimizer was applied, what was drawn from a seed.

    A step that fails may have added already. What it adds is seen once, in the first two steps.
    """

    def __init__(self, framework: Framework) -> None:
        self.wanted = True
        self._framework = framework
        self._seen: list[tuple[int, dict[str, np.ndarray[Any, Any]]]] = []
        self._variables: dict[str, Any] = {}

    def watch(self, step: int, variables: dict[str, Any]) -> None:
        values = {name: self._framework.read(variable) for name, variable in variables.items()}
        plain = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        self._variables = variables
        self._seen.append((step, plain))
        self.wanted = len(self._seen) < 2

    def put_back(self, step: int, in_flight: int) -> bool:
        """Make them those of the end of ``step`` again; False if they are neither that nor one execution further."""
        if self.wanted or self._seen[0][1].keys() != self._seen[1][1].keys():
            return False
        (before, first), (after, second) = self._seen
        expected = {}
        for name, value in second.items():
            each = (value - first[name]) // (after - before)
            expected[name] = value + (step - after) * each
            now = self._framework.read(self._variables[name])
            if not (np.array_equal(now, expected[name]) or np.array_equal(now, expected[name] + in_flight * each)):
                return False
        for name, value in expected.items():
            self._framework.write(self._variables[name], value)
        return True


class Mode(enum.Enum):
    """How a call of ``fit`` begins."""

    ANEW = "anew"
    GO_ON = "go on"
    """In the middle: there are batches left to train."""
    END = "end"
    """All batches are trained; what comes after the last epoch is still to be done."""
    DONE = "done"
    """It was finished in an earlier attempt."""


class Fit:
    """The state of one call of ``fit``."""

    def __init__(
        self,
        run: Run,
        framework: Framework,
        model: Any,
        number: int,
        first: int,
        epochs: int,
        seeds: Seeds,
        identity: dict[str, Any],
    ) -> None:
        """``identity``: what tells it from other calls."""
        self.identity = identity
        self.run = run
        self.framework = framework
        self.model = model
        self.number = number
        self.first = first
        """The epoch at which the script lets it begin."""
        self.epochs = epochs
        self.thread = threading.get_ident()
        self.mode = Mode.ANEW
        self.epoch = first
        self.batch = 0
        """Batches done in this epoch."""
        self.finished = False
        self.callbacks: Any = None
        self.data: Data | None = None
        self.logs: Any = None
        """What the last step returned; its values may still be on a device."""
        self.epoch_logs: dict[str, Any] = {}
        self.steps_before = self.began_at = run.step
        self.began = False
        """The callbacks have heard of the beginning: the batches that are asked for now are trained on."""
        self.before_first_epoch: Callable[[], None] | None = None
        self.told = False
        """The callbacks have been called for the step in flight: it is computed."""
        self.fetched = False
        """The batch of the step in flight is there, or TensorFlow fetches it inside the step."""
        self.in_flight = 1
        self.evaluations = 0
        """Iterators over validation data that were made so far."""
        self._seeds = seeds
        self._began_random = keras_random.capture()
        self.position: dict[str, Any] | None = None
        """Where the data is to go on, until it is there."""
        self._counters = Counters(framework)
        self._flaws: list[str] = []
        self._kept: dict[str, Any] | None = None
        """The state when the batches of this epoch were done."""
        self._held: HeldWeights | None = None
        """The weights of that moment, where callbacks may change them."""
        self.ending = False
        """The callbacks hear of the end of an epoch, and some have written to their files."""
        self._earlier: dict[str, Any] | None = None
        """That of the epoch before, until the first step of this one: another worker may still be there."""
        self._between: dict[str, Any] | None = None
        """Where there are other workers, the state between two epochs, until the first step of the second one."""
        self._stepped = False
        """A step was completed in this process."""
        self._loaded: dict[str, Any] | None = None
        self._weights: memoryview | None = None
        self._extras: dict[str, Any] | None = None

    # ------------------------------------------------------------------ what Keras tells

    def on_train_begin(self) -> None:
        """All callbacks have heard of the beginning, and nothing is trained yet."""
        self.began = True
        self.run.listen_again()
        if self._loaded is not None:
            self.framework.build(self)
        if self.mode is Mode.END and self.data is not None and self.position is not None:
            self.data.repeat_all(self.position["data"])
        if self.mode is Mode.END or (self.mode is Mode.GO_ON and not self.batch):
            # Between two epochs: what comes with the beginning of the next one is still to be done.
            self.apply()
        if self.before_first_epoch is not None:
            self.before_first_epoch()
        self.run.at_boundary()

    def on_epoch_begin(self, epoch: int) -> None:
        if self.position is None:
            self.epoch, self.batch = epoch, 0
        self._kept = self._held = None
        self.run.before_step()

    def end_pass(self) -> None:
        """The batches of this epoch are done; what follows must not change what is saved of them."""
        run = self.run
        if run.in_step:
            run.in_step = False
            if self.told:  # stopped by a callback: the loop did not come back for another batch
                self.complete(self.in_flight)
        if self._kept is None:
            self._keep_pass()

    def _keep_pass(self) -> None:
        self._kept = self._small(over=True)
        if keras_callbacks.change_weights(keras_callbacks.flatten(self.callbacks)):
            self._held = HeldWeights(self.framework, self.model)
        self.run.pending = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """All callbacks have heard of the end: the next epoch may begin."""
        self.epoch_logs = dict(logs or {})
        self.epoch, self.batch = epoch + 1, 0
        if self.run.host.session.world > 1:
            self._earlier = self._kept
        self._kept = self._held = None
        if self.data is not None:
            self.data.end_epoch()
        if self.run.host.session.world > 1:
            # What comes next waits for the others, and they may stay here: the metrics are reset together.
            self._between = self._small(over=False)
        self.run.pending = True
        self.run.at_boundary(epochs_done=self.epochs_done())

    # ------------------------------------------------------------------ steps

    def complete(self, count: int) -> None:
        """A step is done, with all that belongs to it."""
        run = self.run
        self._earlier = self._between = None
        self._stepped = True
        self.batch += count
        run.step += count
        run.pending = True
        run.note_boundary()
        if self._counters.wanted:
            self._counters.watch(run.step, self.framework.counters(self.model))

    def check_in_between(self) -> None:
        """In validation: a notice need not wait for its end."""
        run = self.run
        if self._kept is not None and not self.ending and run.step >= run.engine.next_stop and self.is_mine():
            run.at_boundary()

    def settle(self, error: BaseException) -> None:
        """The training thread was thrown out: find out whether the state is still that of a boundary."""
        if not self.run.in_step:
            return
        if self.told:  # by a callback, after the step was computed
            self.run.in_step = False
            self.complete(self.in_flight)
        elif not self.fetched:
            self.run.in_step = False
        elif self.framework.is_data_error(error):
            # Nothing was computed from the batch that never came; but what needs no batch may have been counted on.
            self.run.in_step = False
            if not self._counters.put_back(self.run.step, self.in_flight):
                self._flaws.append("the error came inside a step, whose random numbers may have been drawn already")
        elif self.framework.is_peer_lost(error) and self.run.put_back():
            # The others' gradients never came: the weights are those of the boundary, and the rest is again.
            self.run.in_step = False

    def epochs_done(self) -> int:
        """Epochs completed, counted on through all calls of ``fit``."""
        return self.run.epochs_before + self.epoch - self.first

    # ------------------------------------------------------------------ the state, as it is saved

    def small(self) -> dict[str, Any]:
        """All but the weights, at the last boundary."""
        if self._kept is not None:
            return self._kept
        return {**(self._between or self._small(over=False)), "earlier": self._earlier}

    def weights(self) -> memoryview:
        """The weights file, at the last boundary."""
        with contextlib.nullcontext() if self._held is None else self._held.in_place():
            return self.framework.weights(self.model)

    def _small(self, *, over: bool) -> dict[str, Any]:
        callbacks = keras_callbacks.flatten(self.callbacks)
        return {
            "fit": self.number,
            "identity": self.identity,
            "finished": self.finished,
            "stopped": bool(getattr(self.model, "stop_training", False)),
            "first": self.first,
            "epochs": self.epochs,
            "steps_before": self.steps_before,
            "epochs_before": self.run.epochs_before,
            "epoch": self.epoch,
            "batch": self.batch,
            "over": over,
            "random": keras_random.capture(),
            "began_random": self._began_random,
            "data": self.data.position() if self.data is not None else {},
            "evaluations": self.evaluations,
            "shuffle_seeds": list(self._seeds.used),
            "callbacks": keras_callbacks.capture(callbacks),
            "logs": numbers(self.logs),
            "epoch_logs": numbers(self.epoch_logs),
            "variables": self.variables(),
            "trained": self.framework.trained(self.model),
        }

    def rests(self) -> bool:
        """Whether the training thread is between two steps for longer, in what may wait for other workers, and the
        state of the last step is at hand: the first step is still to come, or the batches of an epoch are done.

        Callbacks at the end of an epoch are waited for while there is time: what they write, they would write twice.
        """
        return (self._kept is not None and not self.ending) or self._between is not None or not self._stepped

    def at_pass(self) -> dict[str, Any]:
        """What of a rank's own state changes only with a pass over the data."""
        position = self.data.position() if self.data is not None else {}
        random = {name: position[name] for name in ("pass_random", "hook_calls") if name in position}
        return {"began_random": self._began_random, "data": random}

    def variables(self) -> dict[str, Any]:
        if self._extras is None:
            self._extras = self.framework.extras(self.model)
        return {name: self.framework.read(variable) for name, variable in self._extras.items()}

    def trained(self) -> list[list[int]]:
        """What the optimizers trained in the attempt that is resumed."""
        return [] if self._loaded is None else self._loaded.get("trained", [])

    def doubts(self) -> list[str]:
        """What cannot be exact; said aloud the first time."""
        found = [*self._flaws, *keras_random.doubts(), *self.framework.doubts(self)]
        found += [
            f"{name} is not saved: only numbers, text, arrays and lists or dicts of them are"
            for name in keras_callbacks.unsaved(keras_callbacks.flatten(self.callbacks))
        ]
        for doubt in found if self.run.host.rank == 0 else ():
            if doubt not in self.run.doubts_told:
                self.run.doubts_told.add(doubt)
                log.warning("a resumed run may differ in its last digits: %s", doubt)
        return found

    # ------------------------------------------------------------------ going on

    def load(self, state: dict[str, Any], weights: memoryview) -> None:
        """Begin from what was saved; nothing is changed yet but how random numbers are drawn."""
        self._loaded, self._weights = state, weights
        if state["finished"] and not self._is_longer(state):
            self.mode = Mode.DONE
        elif (state["stopped"] and not state["batch"]) or state["epoch"] >= self.epochs:
            self.mode = Mode.END
        else:
            self.mode = Mode.GO_ON
        self.epoch, self.batch = state["epoch"], state["batch"]
        self.position = {name: state[name] for name in ("data", "batch", "over")}
        self.steps_before = state["steps_before"]
        self.run.epochs_before = state["epochs_before"]
        self._began_random = state["began_random"]
        keras_random.restore(self._began_random)

    def _is_longer(self, state: dict[str, Any]) -> bool:
        """The script asks for more epochs than were trained."""
        return not state["stopped"] and state["epoch"] < self.epochs

    def apply(self, *, random_streams: frozenset[str] = frozenset()) -> None:
        """Put everything back: weights, optimizer, seeds, metrics, callbacks, random numbers.

        ``random_streams``: those that the data draws from in a thread of its own, which goes on by itself.
        """
        state, weights = self._loaded, self._weights
        assert state is not None
        assert weights is not None
        self._loaded = self._weights = None
        try:
            self.framework.load_weights(self.model, weights)
        except Exception as error:
            raise StateError(
                f"the model of this fit does not fit into {self.run.host.resumed_from}, fit {self.number} of the run "
                f"that it was saved by: {error}. If the script was changed, give another HOLDFAST_DIR, or start anew "
                f"with HOLDFAST_RESUME=never"
            ) from error
        self._write_variables(state["variables"], of_0_1_0="trained" not in state)
        for problem in keras_callbacks.restore(keras_callbacks.flatten(self.callbacks), state["callbacks"]):
            log.warning("%s", problem)
        self.model.stop_training = state["stopped"]
        self.logs, self.epoch_logs = state["logs"], state["epoch_logs"]
        self.evaluations = state["evaluations"]
        keras_random.restore({name: value for name, value in state["random"].items() if name not in random_streams})
        if state["over"]:
            self._keep_pass()

    def restore_end(self, callbacks: Any, history: Any) -> None:
        """Of a call that was finished in an earlier attempt: what it had changed and what it returned."""
        state = self._loaded
        if state is None:
            return
        if self.data is not None:
            self.data.repeat_all(state["data"])
        self.callbacks = [*keras_callbacks.flatten(callbacks), history]
        self.apply()

    def is_mine(self) -> bool:
        """Whether the calling thread is the one that trains."""
        return threading.get_ident() == self.thread

    def _write_variables(self, saved: dict[str, Any], *, of_0_1_0: bool) -> None:
        extras = self.framework.extras(self.model)
        if of_0_1_0:
            unsaved = [name for name in extras if name not in saved and _NOT_IN_0_1_0.match(name)]
            if unsaved:
                log.warning("holdfast 0.1.0 did not save the model's %s: they begin anew", ", ".join(unsaved))
            extras = {name: variable for name, variable in extras.items() if name not in unsaved}
        if extras.keys() != saved.keys():
            missing = sorted(extras.keys() ^ saved.keys())
            raise StateError(
                f"fit {self.number} has other variables than the one that was saved: {', '.join(missing[:3])} … is on "
                f"one side only"
            )
        for name, variable in extras.items():
            self.framework.write(variable, saved[name])
        self._extras = None if of_0_1_0 else extras


def numbers(logs: Any) -> dict[str, Any]:
    """Logs as plain numbers; what is none is left out."""
    if not isinstance(logs, dict):
        return {}
    plain = {}
    for name, value in logs.items():
        with contextlib.suppress(Exception):
            array = np.asarray(value)
            plain[str(name)] = array.item() if array.ndim == 0 and array.dtype.kind in "biuf" else array
    return {
        name: value for name, value in plain.items() if not isinstance(value, np.ndarray) or value.dtype.kind in "biuf"
    }
