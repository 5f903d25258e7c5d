"""A loop whose modules compute nothing: what a replay runs on.

While it is entered, a module that the script calls answers with what it answered the first time to arguments of
that shape. A backward pass ends at that answer: parameters get gradients of zero, which cost nothing, and optimizer
steps are taken with no gradient at all, which every optimizer skips. So nothing changes, no collective of DDP takes
part, and what a step costs is the script's own Python.

Files of weights are not written: those of the first time are there, and these weights are not the trained ones.
"""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast.adapters.replay.patches import SAFETENSORS, TORCH
from holdfast.base.patching import Applied
from holdfast.torch.state import unwrap

_MOST_ANSWERS = 512
_SMALL = 1 << 20
_PLAIN = (int, bool, str, type(None))


class Outputs:
    """Stands between the script and its modules. Wrappers of the patch tables are among its methods."""

    def __init__(self) -> None:
        self._answers: dict[Any, _Answer] = {}
        self._zeros: dict[tuple[Any, Any], torch.Tensor] = {}
        self._applied: list[Applied] = []
        self._calls: Applied | None = None
        self._answering = False
        self._stripped: list[tuple[Any, Any]] = []

    # ------------------------------------------------------------------ in and out

    def begin(self) -> None:
        self._applied = [table.begin("replay", self) for table in (TORCH, SAFETENSORS)]
        self._stand_between()

    def end(self) -> None:
        self._step_aside()
        for applied in self._applied:
            applied.undo()
        self._applied.clear()
        self._answers.clear()
        self._zeros.clear()

    def _stand_between(self) -> None:
        self._calls = TORCH.begin("answer", self)
        self._answering = True

    def _step_aside(self) -> None:
        self._answering = False
        if self._calls is not None:
            self._calls.undo()
            self._calls = None

    # ------------------------------------------------------------------ wrappers

    def call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        answer = self._answer

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return answer(module, args, kwargs) if self._answering else original(module, *args, **kwargs)

        return call

    @staticmethod
    def grad(original: Callable[..., Any]) -> Callable[..., Any]:
        def grad(outputs: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            return _grad(original, outputs, inputs, *args, **options)

        return grad

    @staticmethod
    def save(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(*args: Any, **options: Any) -> None:
            """Write nothing, but for what stays in memory: pickling a tensor is that too."""
            if any(isinstance(one, io.BytesIO) for one in (*args, *options.values())):
                original(*args, **options)

        return save

    @staticmethod
    def forward_alone(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            return torch.nn.BatchNorm2d.forward(module, *args, **kwargs)

        return forward

    @staticmethod
    def check_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
        def check(*_: Any) -> None:
            """Accept it."""

        return check

    # ------------------------------------------------------------------ modules

    def _answer(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = (id(module), module.training, torch.is_grad_enabled(), _shape(args), _shape(kwargs))
        answer = self._answers.get(key)
        if answer is None:
            if len(self._answers) >= _MOST_ANSWERS:
                self._answers.clear()
            answer = self._answers[key] = _Answer(module, self._really(module, args, kwargs), self._gradients)
        return answer.again()

    def _really(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it, inside all wrappers: ranks need not take part in each other's answers."""
        self._step_aside()
        try:
            with TORCH.applied("alone", self):
                return unwrap(module)(*args, **kwargs)
        finally:
            self._stand_between()

    def _gradients(self, module: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The parameters of a module, each with a gradient of zeros."""
        return [(parameter, self._zero(parameter)) for parameter in module.parameters() if parameter.requires_grad]

    def _zero(self, parameter: torch.Tensor) -> torch.Tensor:
        """Zeros of this shape; all share one piece of memory."""
        if type(parameter) not in (torch.Tensor, torch.nn.Parameter):
            return torch.zeros_like(parameter)
        key = (parameter.device, parameter.dtype)
        flat = self._zeros.get(key)
        if flat is None or flat.numel() < parameter.numel():
            flat = self._zeros[key] = torch.zeros(parameter.numel(), device=parameter.device, dtype=parameter.dtype)
        return flat[: parameter.numel()].view(parameter.shape)

    # ------------------------------------------------------------------ optimizers

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Without gradients a step changes nothing."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._stripped.append((parameter, parameter.grad))
                    parameter.grad = None

    def after_step(self) -> None:
        for parameter, grad in self._stripped:
            parameter.grad = grad
        self._stripped.clear()


def _grad(real: Any, outputs: Any, inputs: Any, *args: Any, allow_unused: Any = None, **options: Any) -> Any:
    """``torch.autograd.grad``: what leads through a module that computes nothing is zero."""
    wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    try:
        found = real(outputs, wanted, *args, allow_unused=True, **options)
    except RuntimeError:  # nothing leads there at all
        found = [None] * len(wanted)
    needs = bool(options.get("create_graph"))
    return tuple(
        torch.zeros_like(one, requires_grad=needs) if grad is None else grad
        for one, grad in zip(wanted, found, strict=True)
    )


class _Answer:
    """What a module answers, again and again."""

    def __init__(self, module: torch.nn.Module, output: Any, gradients: Callable[[torch.nn.Module], Any]) -> None:
        self._module = module  # kept alive: its identity is what the answer is found by
        self._make_gradients = gradients
        self._gradients: Any = None
        self._output = _mapped(output, self._base)

    def _base(self, tensor: torch.Tensor) -> torch.Tensor:
        base = tensor.detach()
        if tensor.requires_grad:
            base.requires_grad_()
            base.register_post_accumulate_grad_hook(self._reached)
        return base

    def _reached(self, base: torch.Tensor) -> None:
        """A backward pass: gradients are there."""
        base.grad = None
        if self._gradients is None:
            self._gradients = self._make_gradients(self._module)
        for parameter, zeros in self._gradients:
            if parameter.grad is None:
                parameter.grad = zeros

    def again(self) -> Any:
        return _mapped(self._output, _fresh)


def _fresh(base: torch.Tensor) -> torch.Tensor:
    """A tensor that the script may change in place, if that costs little; it leads backward to ``base``."""
    return base.clone() if base.nbytes <= _SMALL else base.view(base.shape)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with its tensors changed: nested tuples, lists, dicts, dataclasses and objects with attributes."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    if isinstance(value, tuple):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # transformers' ModelOutput is a dict as well, which its constructor fills.
        names = [field.name for field in dataclasses.fields(value) if field.init]
        try:
            return type(value)(**{name: _mapped(getattr(value, name), change) for name in names})
        except TypeError:
            pass
    if isinstance(value, Mapping):
        changed = copy.copy(value)
        for key, item in value.items():
            changed[key] = _mapped(item, change)  # type: ignore[index]
        return changed
    if hasattr(value, "__dict__"):
        changed = copy.copy(value)
        for key, item in vars(value).items():
            if isinstance(item, torch.Tensor | list | tuple | dict):
                object.__setattr__(changed, key, _mapped(item, change))
        return changed
    return value


def _shape(value: Any) -> Any:
    """What of an argument decides the shape of the answer."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return tuple((key, _shape(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_shape, value))
    return type(value)


def clone_batch(batch: Any) -> Any:
    """A batch of its own, for a script that keeps it."""
    return _mapped(batch, lambda tensor: tensor.clone())
