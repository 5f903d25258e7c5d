"""What a start takes from the ``attempt.json`` of the attempt before it, which may lie on storage that others write to.

The token of an attempt names folders that later starts remove, so it has one form, and nothing of another form is a
token: sixteen hexadecimal digits, which no path can be made of.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from typing import Any

from holdfast.base.run_directory import ATTEMPT
from holdfast.base.small_files import read_json
from holdfast.base.words import is_name

_TOKEN = re.compile(r"[0-9a-f]{16}")
_MOST_ATTEMPTS = 1 << 53


def new_token() -> str:
    """Names an attempt, and the folders in shared memory that it leaves."""
    return secrets.token_hex(8)


def is_token(value: object) -> bool:
    return isinstance(value, str) and _TOKEN.fullmatch(value) is not None


@dataclass(frozen=True, slots=True)
class LastAttempt:
    """The attempt before this one, as far as what is said of it can be one."""

    run: str | None = None
    number: int = 0
    token: str | None = None

    @classmethod
    def decode(cls, record: dict[str, Any]) -> LastAttempt:
        run, number, token = record.get("run"), record.get("attempt"), record.get("token")
        counts = isinstance(number, int) and not isinstance(number, bool) and 0 <= number < _MOST_ATTEMPTS
        return cls(
            str(run) if is_name(run) else None,
            int(number) if counts and number is not None else 0,
            str(token) if is_token(token) else None,
        )


def read_last_attempt(home: str) -> LastAttempt:
    """Of what lies in a run's home folder; the empty one if nothing does that can be read."""
    return LastAttempt.decode(read_json(os.path.join(home, ATTEMPT)))
