"""Rich output whose texts cannot act on the terminal, wherever they come from: a manifest, a journal, a file name."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.segment import Segment

from holdfast.base.words import shown


class Escaped:
    """Something to print, each text of which is escaped as it is printed."""

    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._inner, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)


class Escaping(RenderHook):
    """Escapes all that a console is told to print."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return _escaped(renderables)


def _escaped(renderables: Iterable[ConsoleRenderable]) -> list[ConsoleRenderable]:
    return [Escaped(one) for one in renderables]
