"""Whether the step in flight of one of several workers has begun to change the weights.

The workers add up their gradients, each applies them, and they put the logs of the step together. If a peer dies before
all of that, the step fails, and nobody could tell how far it came. So gradients are applied behind a counter, and the
counter moves when all gradients and, where they do not need the new weights, all logs are there: from then on nothing
in the step waits for a peer. While the counter is as it was at the last boundary, so are the weights and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_counter: Any = None
_gates: list[Any] = []
"""Where the counter moves in the step that is being traced."""


def counter() -> Any:
    """How often the gradients of all workers were there; None where nobody counts."""
    return _counter


def count() -> None:
    """From now on; before a step is traced."""
    global _counter
    if _counter is None:
        from tensorflow.python.ops import resource_variable_ops

        # Not tf.Variable: inside the scope of a strategy that would be a variable of all workers.
        _counter = resource_variable_ops.ResourceVariable(0, trainable=False, dtype="int64", name="holdfast_exchanges")


def gated(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``aggregate_gradients`` of tf-keras' optimizers."""

    def aggregate_gradients(optimizer: Any, grads_and_vars: Any) -> Any:
        pairs = list(original(optimizer, grads_and_vars))
        return pairs if _counter is None else _behind_the_counter(pairs)

    return aggregate_gradients


def _behind_the_counter(pairs: list[Any]) -> list[Any]:
    import tensorflow as tf

    gradients = [gradient for gradient, _ in pairs]
    there = tf.nest.flatten([gradient for gradient in gradients if gradient is not None], expand_composites=True)
    with tf.control_dependencies(there):
        counted = _counter.assign_add(1, read_value=False)
    with tf.control_dependencies([counted] if counted is not None else []):
        waited = [None if gradient is None else tf.identity(gradient) for gradient in gradients]
    if counted is not None:
        _gates.append(counted)
    return [(gradient, variable) for gradient, (_, variable) in zip(waited, pairs, strict=True)]


def after_logs(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``reduce_per_replica`` of tf-keras, which is called last in what becomes the graph of a step."""

    def reduce_per_replica(*arguments: Any, **named: Any) -> Any:
        import tensorflow as tf

        logs = original(*arguments, **named)
        found = [log for log in tf.nest.flatten(logs, expand_composites=True) if tf.is_symbolic_tensor(log)]
        while _gates:
            gate = _gates.pop()
            ends = [log.op for log in found if log.graph == gate.graph]
            if ends and not _needs(ends, gate):
                gate._add_control_inputs(ends)
        return logs

    return reduce_per_replica


def _needs(ends: list[Any], gate: Any) -> bool:
    """Whether ``ends`` come from what is done behind the gate, or read what that writes. The second is not to be seen
    in the graph yet: TensorFlow puts reads behind the writes before them when all of it is there."""
    operations = gate.graph.get_operations()
    changed: set[str] = {gate.name}
    written: set[str] = set()
    for op in operations[[op.name for op in operations].index(gate.name) + 1 :]:
        variables = {tensor.name for tensor in op.inputs if tensor.dtype.name == "resource"}
        before = [*(tensor.op.name for tensor in op.inputs), *(one.name for one in op.control_inputs)]
        if not changed.isdisjoint(before) or not written.isdisjoint(variables):
            changed.add(op.name)
            if op.type != "ReadVariableOp":
                written |= variables
    return any(end.name in changed for end in ends)


def abort() -> None:
    """Let the operation that waits for another worker fail, in this process alone."""
    from tensorflow.python.eager import context
    from tensorflow.python.framework import errors

    context.context().abort_collective_ops(errors.UNAVAILABLE, "a worker is gone")
