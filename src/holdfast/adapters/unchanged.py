"""Which files of a save the last committed checkpoint holds already: they are neither copied nor written again.

That is known by their checksums alone: what torch counts as a tensor's version does not see changes by
``.data``. To read the bytes takes time, so it is done while the other files are on their way to the disk.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from holdfast.saving import Adopted, Part, Pending
from holdfast.staging.threads import Shared
from holdfast.store.manifest import FileEntry, Manifest
from holdfast.store.pipeline import Image, digest_of


class Comparison:
    """Compares files with those of ``committed``, on other threads, from now on.

    ``stage`` copies files out of the way of training; without it they stay as they are.
    """

    def __init__(
        self,
        images: Sequence[Any],
        committed: Manifest | None,
        stage: Callable[[list[Any]], Sequence[Image]] | None = None,
    ) -> None:
        self._images = images
        self._committed = committed.name if committed is not None else ""
        self._stage = stage or list
        self._waits_for_settle = stage is not None
        self._entries = {(file.path, file.size): file for file in (committed.files if committed is not None else ())}
        self._found: dict[str, Image | Adopted] = {}
        self._settled = threading.Event()
        self._error: BaseException | None = None
        self._candidates = [
            image for image in images if not image.volatile and (image.path, image.size) in self._entries
        ]
        self._work = Shared(self._compare, self._candidates)

    def parts(self) -> list[Part]:
        """What to write: those that are being compared are pending, all others are staged."""
        known = [image for image in self._images if image not in self._candidates]
        pending = [Pending(image.path, image.size, partial(self._outcome, image.path)) for image in self._candidates]
        return [*self._stage(known), *pending]

    def settle(self) -> None:
        """Take part until it is known of every file; what has changed is then copied. Until then nothing may change."""
        if self._settled.is_set():
            return
        try:
            self._work.finish()
            for image in self._stage([image for image in self._candidates if image.path not in self._found]):
                self._found[image.path] = image
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._settled.set()

    def _outcome(self, path: str) -> Image | Adopted:
        if not self._waits_for_settle:
            self.settle()
        self._settled.wait()
        if self._error is not None:
            raise self._error
        return self._found[path]

    def _compare(self, image: Any) -> None:
        entry: FileEntry = self._entries[image.path, image.size]
        if digest_of(image.pieces()) == entry.checksum:
            source, path = (self._committed, entry.path) if entry.ref is None else entry.ref.split("/", 1)
            self._found[image.path] = Adopted(image.path, image.size, dataclasses.replace(entry, path=path), source)
