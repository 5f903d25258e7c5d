"""What stands in for ``train`` of the SDK's backends; :mod:`.patches` says what each is for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from holdfast.kubeflow import local, submit


class Wrappers:
    """Each method takes ``train`` of a backend and returns its replacement."""

    def __init__(self, kind: type) -> None:
        """``kind``: the class of the trainers that are taken over."""
        self._kind = kind

    def on_cluster(self, original: Any) -> Any:
        return self._taking_over(original, submit.submit)

    def on_this_machine(self, original: Any) -> Any:
        return self._taking_over(original, local.submit)

    def in_container(self, original: Any) -> Any:
        return self._taking_over(original, submit.refuse)

    def _taking_over(self, original: Any, submit: Callable[..., str]) -> Any:
        """``submit`` gets the backend, its own ``train``, runtime, trainer and options."""

        def train(
            backend: Any,
            runtime: Any = None,
            initializer: Any = None,
            trainer: Any = None,
            options: list[Any] | None = None,
        ) -> str:
            if not isinstance(trainer, self._kind):
                return str(original(backend, runtime, initializer, trainer, options))
            given = functools.partial(original, initializer=initializer, options=options)
            return submit(backend, given, runtime, trainer, options)

        return train
