"""TensorFlow under Keras: variables that have a copy on each replica, and errors that tell where they come from."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def tensorflow() -> Any:
    """The module, where somebody has imported it."""
    return sys.modules.get("tensorflow")


def _inner(variable: Any) -> Any:
    """The variable of TensorFlow in one of Keras 3, or in one that casts.

    Not by ``getattr``: a distributed variable answers for names that it does not have by reading itself, which can mean
    to ask all workers.
    """
    for name in ("_value", "_variable"):
        inner = vars(variable).get(name)
        if inner is not None and hasattr(type(inner), "assign"):
            return _inner(inner)
    return variable


def replicas(variable: Any) -> list[Any] | None:
    """The copies of a distributed variable in this process; None if it is a plain one."""
    values = vars(_inner(variable)).get("_values")
    return list(values) if isinstance(values, list | tuple) and values and hasattr(values[0], "assign") else None


def differs_by_replica(variable: Any) -> bool:
    """Whether the copies of a variable go different ways, and are put together only where it is read."""
    return replicas(variable) is not None and type(_inner(variable)).__name__ == "SyncOnReadVariable"


def read(variable: Any) -> Any:
    """The value of a variable; those of its copies where it has several. Asks no other process."""
    copies = replicas(variable)
    if copies is None:
        return np.array(variable.numpy())
    values = [np.array(copy.numpy()) for copy in copies]
    return values[0] if len(values) == 1 else values


def hold(variable: Any) -> Any:
    """The value of a variable, or those of its copies, as tensors: one is copied only where the variable changes."""
    copies = replicas(variable)
    if copies is None:
        return _inner(variable).read_value()
    values = [copy.read_value() for copy in copies]
    return values[0] if len(values) == 1 else values


def write(variable: Any, value: Any) -> None:
    copies = replicas(variable)
    if copies is None:
        variable.assign(value)
        return
    for copy, one in zip(copies, value if isinstance(value, list) else [value] * len(copies), strict=True):
        copy.assign(one)


def is_data_error(error: BaseException) -> bool:
    """Whether the pipeline of the data raised: the step then has computed nothing."""
    module = tensorflow()
    if module is None or not isinstance(error, module.errors.OpError):
        return False
    return "IteratorGetNext" in str(error)


def is_peer_lost(error: BaseException) -> bool:
    """Whether an operation that all workers do together failed: the gradients were then never added up."""
    module = tensorflow()
    return module is not None and isinstance(error, module.errors.OpError) and "ollective" in str(error)


RANDOM_OPS = frozenset(
    {"RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle", "Multinomial"}
    | {"RandomGamma", "RandomPoisson", "RandomPoissonV2", "ParameterizedTruncatedNormal"}
)
"""Operations whose random state lies inside the operation, where nobody can read or set it."""


def random_ops(function: Any) -> set[str]:
    """Such operations in what a ``tf.function`` was traced to."""
    found: set[str] = set()
    for concrete in function._list_all_concrete_functions():
        definition = concrete.graph.as_graph_def()
        nodes = list(definition.node)
        for inner in definition.library.function:
            nodes += inner.node_def
        found |= {node.op for node in nodes} & RANDOM_OPS
    return found


def functions_in(value: Any, depth: int = 4) -> list[Any]:
    """The ``tf.function`` objects that a Python function, such as Keras' train function, holds in its closure."""
    if hasattr(value, "_list_all_concrete_functions"):
        return [value]
    if depth == 0:
        return []
    cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if _filled(cell)]
    return [function for inner in cells if callable(inner) for function in functions_in(inner, depth - 1)]


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
