"""What Lightning's own checkpoint leaves out of a fit, and what of it must be as it was at a step boundary.

Left out: the averages that ``self.log`` gathers over an epoch, the state of metrics, the values that callbacks and
plateau schedulers look at, whether training was told to stop. Without these a run that goes on in the middle of an
epoch would end it with other numbers, and stop, save or change its learning rate at another time.
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

Path = tuple[str, ...]


class Counters:
    """Lightning's counters of batches, steps and epochs, which change in the course of a step."""

    def __init__(self, fit_loop: Any) -> None:
        self._fit_loop = fit_loop
        leaves = list(_leaves(fit_loop, ""))
        # Those of epochs and validations stay as they are until one of them ends, or begins.
        self._others = [leaf for leaf in leaves if "epoch_progress" in leaf[0][0] or ".val_loop." in leaf[0][0]]
        self._leaves = [leaf for leaf in leaves if leaf not in self._others]
        self._values = [values for _, values in self._leaves]
        self._batch = fit_loop.epoch_loop.batch_progress

    def take(self) -> list[dict[str, Any]]:
        """Those that change with every batch, as they are now. On the way of every step: a microsecond or two."""
        taken = [values.copy() for values in self._values]
        taken.append({"is_last_batch": self._batch.is_last_batch})
        return taken

    def take_others(self) -> list[dict[str, Any]]:
        return [values.copy() for _, values in self._others]

    def state(
        self, taken: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]] | None, stepped: int
    ) -> dict[str, Any]:
        """The state of the loop as it was when they were taken. ``stepped``: batches that had stepped by then.

        ``others``: None if they are still as they were.
        """
        state: dict[str, Any] = self._fit_loop.state_dict()
        for (path, _), values in zip(self._leaves, taken, strict=False):
            _node(state, path).update(values)
        for (path, _), values in zip(self._others, others or (), strict=False):
            _node(state, path).update(values)
        state["epoch_loop.batch_progress"].update(taken[-1])
        state["epoch_loop.state_dict"]["_batches_that_stepped"] = stepped
        return state

    def put(self, state: dict[str, Any]) -> None:
        """Make them those of a state."""
        for path, values in (*self._leaves, *self._others):
            values.update(_node(state, path))
        self._batch.is_last_batch = state["epoch_loop.batch_progress"]["is_last_batch"]
        self._fit_loop.epoch_loop._batches_that_stepped = state["epoch_loop.state_dict"]["_batches_that_stepped"]


def _node(state: dict[str, Any], path: Path) -> dict[str, Any]:
    for name in path:
        state = state[name]
    return state


def _leaves(loop: Any, prefix: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Where in the state of ``loop`` there are counters, and the attributes of the objects that count."""
    for name, value in vars(loop).items():
        if dataclasses.is_dataclass(value) and hasattr(value, "state_dict"):
            yield from _within(value, (f"{prefix}{name}",))
        elif hasattr(value, "on_iteration_done"):  # a loop within the loop
            yield from _leaves(value, f"{prefix}{name}.")


def _within(progress: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    inner = {name: value for name, value in vars(progress).items() if dataclasses.is_dataclass(value)}
    if not inner:
        yield path, vars(progress)
    for name, value in inner.items():
        yield from _within(value, (*path, name))


def as_before_batch_end(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a fit loop as a checkpoint callback finds it at the end of a batch.

    Lightning alone knows how to go on from there; our boundary is a moment later.
    """
    state = copy.deepcopy(state)
    for part in state["epoch_loop.batch_progress"].values():
        if isinstance(part, dict):
            part["completed"] = max(0, part["completed"] - 1)
    return state


Averages = list[tuple[str, Any, Any, Any]]
_ARGUMENTS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_MORE = ("dataloader_idx", "metric_attribute")


def averages(results: Any) -> Averages:
    """What ``self.log`` has gathered for the end of the epoch. It replaces these tensors, and never changes them."""
    return [
        (key, metric.value, getattr(metric, "cumulated_batch_size", None), metric._forward_cache)
        for key, metric in results.items()
        if metric.meta.on_epoch and not metric.has_reset
    ]


def average_states(results: Any, taken: Averages) -> list[dict[str, Any]]:
    """``taken`` together with how each was logged. One that is gathered by a group of ranks of its own is left out.

    Where a torchmetrics object was logged, that keeps the state, and is found again by its name in the module.
    """
    found = []
    for key, value, count, last in taken:
        meta = results[key].meta
        is_tensor = isinstance(value, torch.Tensor)
        if meta.sync.group is None and (is_tensor or meta.metric_attribute is not None):
            how = {name: getattr(meta, name) for name in (*_ARGUMENTS, *_MORE)}
            how["reduce"] = [meta.reduce_fx.__module__ == "builtins", meta.reduce_fx.__name__]
            how["sync"] = [meta.sync.should, meta.sync.rank_zero_only]
            last = last if isinstance(last, torch.Tensor) else None
            found.append({"key": key, "how": how, "value": value if is_tensor else None, "count": count, "last": last})
    return found


def put_averages(results: Any, saved: list[dict[str, Any]], strategy: Any) -> None:
    """Let ``results`` go on from ``saved``."""
    kinds = sys.modules[type(results).__module__]
    modules = dict(strategy.lightning_module.named_modules())
    for one in saved:
        how = dict(one["how"])
        (builtin, reduce), (should, zero_only) = how.pop("reduce"), how.pop("sync")
        meta = kinds._Metadata(reduce_fx=getattr(builtins if builtin else torch, reduce), **how)
        meta.sync = kinds._Sync(_should=should, fn=strategy.reduce, _group=None, rank_zero_only=zero_only)
        device = strategy.root_device
        metric = kinds._ResultMetric(meta, one["value"] is not None)
        metric.value = _to(one["value"], device) if metric.is_tensor else modules[meta.metric_attribute]
        if one["count"] is not None:
            metric.cumulated_batch_size = _to(one["count"], device)
        metric._forward_cache = _to(one["last"], device)
        metric._update_count = 1
        results[one["key"]] = metric.to(device)


def metric_states(module: Any) -> dict[str, Any]:
    """The state of the torchmetrics objects inside a module, which they leave out of its ``state_dict``."""
    return {
        name: {
            "count": metric._update_count,
            "states": {key: _copied(getattr(metric, key)) for key in metric._defaults},
        }
        for name, metric in _metrics(module)
    }


def put_metric_states(module: Any, saved: dict[str, Any]) -> None:
    for name, metric in _metrics(module):
        if name in saved and saved[name]["states"].keys() == metric._defaults.keys():
            for key, value in saved[name]["states"].items():
                setattr(metric, key, _to(value, metric.device))
            metric._update_count = saved[name]["count"]
            metric._computed = None


def _metrics(module: Any) -> Iterator[tuple[str, Any]]:
    from torchmetrics import Metric

    for name, inner in module.named_modules():
        if isinstance(inner, Metric):
            yield name, inner


def _copied(value: Any) -> Any:
    if isinstance(value, list):  # it grows, and what is in it stays as it is
        return list(value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _to(value: Any, device: Any) -> Any:
    if isinstance(value, list):
        return [item.to(device) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def logged(connector: Any) -> dict[str, Any]:
    """What callbacks and schedulers see of metrics."""
    return {
        "callback": dict(connector._callback_metrics),
        "logged": dict(connector._logged_metrics),
        "bar": dict(connector._progress_bar_metrics),
        "first": connector._first_loop_iter,
        "hook": connector._current_fx,
    }


def put_logged(connector: Any, saved: dict[str, Any], device: Any) -> None:
    for mine, theirs in (("callback", "_callback_metrics"), ("logged", "_logged_metrics")):
        getattr(connector, theirs).update({name: _to(value, device) for name, value in saved[mine].items()})
    connector._progress_bar_metrics.update(saved["bar"])
    connector._first_loop_iter = saved["first"]
    connector._current_fx = saved["hook"]


def fingerprint(module: torch.nn.Module) -> torch.Tensor:
    """Changes if the weights are exchanged for others, as callbacks that average weights do for a validation."""
    ends: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in module.parameters():
        if parameter.numel() and parameter.dtype.is_floating_point:
            value = parameter.detach()
            found = ends.setdefault((value.dtype, value.device), [])
            found += [value[(0,) * value.dim()], value[(-1,) * value.dim()]]
    return torch.cat([torch.stack(values).double().cpu() for values in ends.values()]) if ends else torch.empty(0)
