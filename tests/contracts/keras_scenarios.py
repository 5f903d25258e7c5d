"""Keras and tf-keras with names that are missing, one process for each scenario, all forked from one that has imported
the frameworks. Run as a script, it prints the results as JSON."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import _holdfast_startup as startup
from holdfast.adapters import registry
from holdfast.adapters.keras.patches import KERAS, TABLES, TENSORFLOW, TF_KERAS
from holdfast.base import patching

TABLE_OF = {"keras": KERAS, "tf_keras": TF_KERAS}
GONE = {
    "keras": "keras.src.saving.saving_lib:_save_state",
    "tf_keras": "tf_keras.src.saving.saving_lib:_save_state",
    "tensorflow": "tensorflow.python.distribute.multi_worker_util:id_in_cluster",
}
"""Names that a training without holdfast does not need."""


@contextlib.contextmanager
def without(target: str) -> Iterator[None]:
    """Inside, the framework lacks the name. Every class has a constructor: where that is the target, the class goes."""
    module, _, path = target.removesuffix(".__init__").partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    holders = [one for one in (owner.__mro__ if isinstance(owner, type) else [owner]) if name in vars(one)]
    taken = [(holder, vars(holder)[name]) for holder in holders]
    for holder in holders:
        delattr(holder, name)
    used_in = patching._names_used_in
    # Attributes of instances are known by the methods that use them.
    patching._names_used_in = lambda kind: used_in(kind) - {name}  # type: ignore[assignment]
    try:
        assert not patching.exists(target), f"{target} cannot be taken away"
        yield
    finally:
        patching._names_used_in = used_in
        for holder, value in taken:
            setattr(holder, name, value)


def snapshot() -> dict[str, Any]:
    """Everything in the classes and modules that the tables patch."""
    found: dict[str, Any] = {}
    for target in dict.fromkeys(patch.target for table in TABLES for patch in table.patches):
        module, _, path = target.partition(":")
        owner: Any = sys.modules[module]
        for part in path.split(".")[:-1]:
            owner = getattr(owner, part, None)
        if owner is not None:
            label = target.rpartition("." if "." in path else ":")[0]
            found.update({f"{label}.{name}": value for name, value in vars(owner).items()})
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names that are not the very same object."""
    return sorted(name for name in before | after if before.get(name) is not after.get(name))


@contextlib.contextmanager
def warnings_of_holdfast() -> Iterator[list[str]]:
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("holdfast")
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)


def forked(scenario: Callable[[], Any]) -> Any:
    """The result of a scenario in a process of its own, where imports are done already; what it raised, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            try:
                result = scenario()
            except BaseException:
                result = traceback.format_exc()
            with os.fdopen(writer, "w") as pipe:
                json.dump(result, pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else "the process ended without a result"


def needed_by(module: str) -> list[str]:
    loaded = [
        one.target
        for one in (*TABLE_OF[module].patches, *TABLE_OF[module].reads)
        if one.required and one.loaded and one.target.partition(":")[0] in sys.modules
    ]
    return list(dict.fromkeys([*TABLE_OF[module].required, *loaded, *TENSORFLOW.required]))


def each_name_missing(module: str) -> Any:
    os.environ["HOLDFAST_ENABLED"] = "1"
    found = {}
    for target in needed_by(module):
        with without(target), warnings_of_holdfast() as heard:
            before = snapshot()
            registry.install("keras", sys.modules[module])
            found[target] = {"touched": differences(before, snapshot()), "heard": heard}
    return found


def applied_and_undone(module: str) -> Any:
    os.environ["HOLDFAST_ENABLED"] = "1"
    before = snapshot()
    registry.install("keras", sys.modules[module])
    once = snapshot()
    registry.install("keras", sys.modules[module])
    twice = snapshot()
    marked = sorted(getattr(value, patching.MARK) for name, value in once.items() if before[name] is not value)
    TABLE_OF[module].undo()
    TENSORFLOW.undo()
    return {
        "marked": marked,
        "twice": differences(once, twice),
        "left": differences(before, snapshot()),
    }


def failed_half_way(module: str) -> Any:
    """TensorFlow's own wrapper fails after the framework's are in place; the second attempt succeeds."""
    from holdfast.adapters.keras import seeds

    os.environ["HOLDFAST_ENABLED"] = "1"
    before, wrap = snapshot(), seeds.DatasetSeeds.seed_datasets
    del seeds.DatasetSeeds.seed_datasets
    try:
        registry.install("keras", sys.modules[module])
    except AttributeError as error:
        raised = str(error)
    left = differences(before, snapshot())
    seeds.DatasetSeeds.seed_datasets = wrap  # type: ignore[method-assign]
    registry.install("keras", sys.modules[module])
    return {"raised": raised, "left": left, "after": len(differences(before, snapshot()))}


def trained(module: str, folder: str, *, enabled: str | None, gone: str | None, callback: bool = False) -> Any:
    """A tiny training as a script would run it, right after the import of the framework."""
    if enabled is not None:
        os.environ["HOLDFAST_ENABLED"] = enabled
    os.environ["HOLDFAST_DIR"] = folder
    with without(gone) if gone else contextlib.nullcontext(), warnings_of_holdfast() as heard:
        if enabled is not None and enabled != "0":
            startup._imported(module, sys.modules[module])
        return {**_fit(module, folder, callback), "heard": heard, "files": sorted(os.listdir(folder))}


def _fit(module: str, folder: str, callback: bool) -> dict[str, Any]:
    import numpy as np

    keras = importlib.import_module(module)
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(5).normal(size=(32, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    steps = []

    class Count(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps.append(batch)

    callbacks: list[Any] = [Count()]
    if callback:
        from holdfast.keras import JITCheckpoint

        callbacks += [JITCheckpoint(folder), JITCheckpoint(folder)]
    refused = None
    try:
        model.fit(x, x.sum(1), batch_size=8, epochs=2, validation_data=(x, x.sum(1)), verbose=0, callbacks=callbacks)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    weights = b"".join(np.asarray(array).tobytes() for array in model.get_weights())
    return {"steps": len(steps), "weights": hashlib.sha256(weights).hexdigest(), "refused": refused}


def scenarios(folder: Path) -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {}

    def train(label: str, module: str, **how: Any) -> None:
        path = folder / label.replace(" ", "-")
        path.mkdir()
        made[label] = partial(trained, module, str(path), **how)

    for module in TABLE_OF:
        made[f"{module}: each name"] = partial(each_name_missing, module)
        made[f"{module}: failed half way"] = partial(failed_half_way, module)
        made[f"{module}: undo"] = partial(applied_and_undone, module)
        train(f"{module}: without holdfast", module, enabled="0", gone=None)
        train(f"{module}: protected", module, enabled="1", gone=None)
        train(f"{module}: missing", module, enabled="1", gone=GONE[module])
        train(f"{module}: missing in tensorflow", module, enabled="1", gone=GONE["tensorflow"])
        train(f"{module}: required", module, enabled="require", gone=GONE[module])
        train(f"{module}: required of tensorflow", module, enabled="require", gone=GONE["tensorflow"])
        train(f"{module}: required and protected", module, enabled="require", gone=None)
        train(f"{module}: callback", module, enabled=None, gone=GONE[module], callback=True)
        train(f"{module}: callback and variable", module, enabled="1", gone=GONE[module], callback=True)
        train(f"{module}: callback required", module, enabled="require", gone=GONE[module], callback=True)
    return made


if __name__ == "__main__":
    for name in ("tensorflow", *TABLE_OF):
        importlib.import_module(name)
    results = {label: forked(scenario) for label, scenario in scenarios(Path(sys.argv[1])).items()}
    print(json.dumps(results))
