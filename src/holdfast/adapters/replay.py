"""Plain PyTorch loops that know nothing of holdfast: recorded as they run, and replayed, not retrained, on resume.

(Signatures first: the Ray adapter builds on this class.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NoReturn

from holdfast.adapters.host import Host
from holdfast.adapters.place import torch_place
from holdfast.adapters.session import Place
from holdfast.config import Settings
from holdfast.errors import Preempted
from holdfast.notice import NoticeSource


class Follower:
    """Follows one training loop of this process, in one thread."""

    replaying: bool = False
    """While the loop is replayed up to the step that it was saved at: what it does now was done already."""
    host: Host | None = None
    """None until the first training act, when the other ranks are met and the checkpoint is found."""

    def __init__(
        self,
        settings: Settings,
        *,
        place: Callable[[], Place] = torch_place,
        sources: Sequence[NoticeSource] = (),
        on_preempted: Callable[[Preempted], NoReturn] | None = None,
        name: str = "torch",
    ) -> None:
        """``place`` is called at the first training act. ``on_preempted``: instead of raising out of the boundary."""

    @property
    def step(self) -> int:
        """Optimizer steps completed, over all attempts."""
        return 0

    def start(self) -> None:
        """From here on what is constructed is noted, and training acts are followed."""

    def finish(self) -> None:
        """The script or function ended well: commit the end."""

    def crashed(self, error: BaseException) -> None:
        """The script or function ended with an error: save the last boundary if the state is still that."""

    def close(self) -> None:
        """Take the hooks away and let go of the location."""


def install(module: ModuleType) -> None:
    """Follow this process's script if the environment says so and nobody else claims the training."""
