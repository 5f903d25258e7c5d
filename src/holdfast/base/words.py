"""Text of somebody else: whether it may be shown, and how it is shown where it may not.

A manifest, a journal or a record can come from storage that others write to. Control and format characters in it could
move a terminal's cursor, hide what follows or reverse it; lone surrogates cannot be encoded at all.
"""

from __future__ import annotations

import unicodedata

LONGEST_NAME = 512
LONGEST_TEXT = 4096

_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def is_plain(text: str) -> bool:
    """Whether a terminal shows the text and does nothing else."""
    return (text.isascii() and text.isprintable()) or not any(unicodedata.category(one) in _UNSAFE for one in text)


def is_name(value: object, longest: int = LONGEST_NAME) -> bool:
    """Whether this is a text that can be a name: not empty, of a bounded length, on one line."""
    return isinstance(value, str) and 0 < len(value) <= longest and is_plain(value)


def shown(text: str) -> str:
    """The text for a terminal: what a terminal would act on is written out, as in ``\\x1b[2J``. Line ends stay."""
    if is_plain(text):
        return text
    return "".join(one if one in "\n\t" or is_plain(one) else ascii(one)[1:-1] for one in text)
