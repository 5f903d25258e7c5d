"""A loop whose modules compute nothing: what a replay runs on.

While it is entered, a module that the script calls answers with what it answered the first time to arguments of
that shape. A backward pass over answers gives parameters gradients of zero, which cost nothing, and optimizer steps
are taken with no gradient at all, which every optimizer skips. So nothing changes, no collective of DDP takes
part, and what a step costs is the script's own Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdfast.adapters.replay.answers import Answer, Gradients, alone
from holdfast.adapters.replay.nested import shape_of
from holdfast.adapters.replay.patches import TORCH
from holdfast.base.patching import Applied
from holdfast.torch.state import unwrap

_MOST_ANSWERS = 512


class Outputs:
    """Stands between the script and its modules. Wrappers of the patch tables are among its methods."""

    def __init__(self) -> None:
        self._answers: dict[Any, Answer] = {}
        self._parameters: dict[int, list[torch.Tensor]] = {}
        """By module, of those that have answered."""
        self._gradients = Gradients()
        self._applied: list[Applied] = []
        self._calls: Applied | None = None
        self._answering = False
        self._stripped: list[tuple[Any, Any]] = []

    # ------------------------------------------------------------------ in and out

    def begin(self) -> None:
        self._applied = [TORCH.begin("replay", self)]
        self._stand_between()

    def end(self) -> None:
        self._step_aside()
        for applied in self._applied:
            applied.undo()
        self._applied.clear()
        self._answers.clear()
        self._parameters.clear()
        self._gradients = Gradients()

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

    def functional_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def functional_call(module: Any, tensors: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            def real() -> Any:
                return original(module, tensors, args, kwargs, **options)

            if not self._answering or _is_transformed():
                return self._really(real) if self._answering else real()
            return self._find(module, ("functional", dict(tensors), args, kwargs), real)

        return functional_call

    @staticmethod
    def grad(original: Callable[..., Any]) -> Callable[..., Any]:
        def grad(outputs: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            return _grad(original, outputs, inputs, *args, **options)

        return grad

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
        if _is_transformed():
            return self._really(lambda: unwrap(module)(*args, **kwargs))
        return self._find(module, (args, kwargs), lambda: unwrap(module)(*args, **kwargs))

    def _find(self, module: torch.nn.Module, given: Any, real: Callable[[], Any]) -> Any:
        """The answer of ``module`` to what it is ``given``; computed if there is none yet."""
        leading: list[torch.Tensor] = []
        frozen = [parameter.requires_grad for parameter in self._parameters_of(module)]
        key = (id(module), module.training, torch.is_grad_enabled(), shape_of(given, leading), *frozen)
        answer = self._answers.get(key)
        if answer is None:
            if len(self._answers) >= _MOST_ANSWERS:
                self._answers.clear()
                self._parameters.clear()
            with alone():
                output = self._really(real)
                answer = self._answers[key] = Answer(output, leading, module, self._gradients)
        return answer.again(leading)

    def _parameters_of(self, module: torch.nn.Module) -> list[torch.Tensor]:
        known = self._parameters.get(id(module))
        if known is None:
            known = self._parameters[id(module)] = list(module.parameters())
        return known

    def _really(self, real: Callable[[], Any]) -> Any:
        """Compute it, inside all wrappers: ranks need not take part in each other's answers."""
        self._step_aside()
        try:
            with TORCH.applied("alone", self):
                return real()
        finally:
            self._stand_between()

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


def _is_transformed() -> bool:
    """Whether modules are traced or transformed (``torch.func.grad``, ``torch.jit.trace``): they must compute."""
    return bool(torch._C._are_functorch_transforms_active() or torch.jit.is_tracing())
