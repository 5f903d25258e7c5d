"""What a backend needs to know of a trainer that is submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from holdfast.kubeflow.storage import Output


class Submission(Protocol):
    """A :class:`~holdfast.kubeflow.TransformersTrainer`, as the backends see it."""

    func: Callable[..., Any]
    num_nodes: int | None
    packages_to_install: Sequence[str] | None
    pip_index_urls: Sequence[str]
    env: dict[str, str] | None
    output: Output | None
    secret_name: str | None
    grace_period_seconds: int

    def checkpointing(self) -> dict[str, Any]:
        """The block ``spec.checkpointing`` that says the same, for a TrainJob."""
