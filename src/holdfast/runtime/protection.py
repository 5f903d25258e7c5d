"""Training runs that cannot be protected: reported in one line, or refused."""

from __future__ import annotations

import logging

from _holdfast_startup import required
from holdfast.errors import UnprotectedError

log = logging.getLogger("holdfast")


def unprotected(what: str) -> None:
    """Warn that a training run is not protected; raise UnprotectedError with ``HOLDFAST_ENABLED=require``.

    ``what``: what is left alone and why, as a sentence.
    """
    if required():
        raise UnprotectedError(f"{what}. HOLDFAST_ENABLED=require refuses to train unprotected")
    log.warning("%s", what)
