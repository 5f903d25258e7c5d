"""A location as it is written down and shown: a scheme, a bucket and a prefix, without what lets somebody in.

Credentials never come from a location. One that holds some all the same, as ``s3://key:secret@bucket`` or with a signed
query string, loses them where settings are read, so that nothing behind that has them to tell: no manifest, journal,
record, name of a folder, log or traceback.
"""

from __future__ import annotations

import re

_QUERY = re.compile(r"\?.*|#.*=.*", re.DOTALL)


def without_secrets(location: str) -> str:
    """``location`` without userinfo and query; a path of a file system as it is."""
    scheme, separator, rest = location.partition("://")
    if not separator or scheme == "file":
        return location
    return f"{scheme}://{bare(rest)}"


def redacted(location: str) -> str:
    """``location`` as an error shows it: without secrets, and with ``***`` where they were."""
    bare_location = without_secrets(location)
    if bare_location == location:
        return location
    scheme, _, rest = bare_location.partition("://")
    return f"{scheme}://***@{rest}" if "@" in location else f"{bare_location}?***"


def bare(rest: str) -> str:
    """What follows ``://``, without userinfo and query."""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in authority:
        rest = rest[authority.rindex("@") + 1 :]
    elif "@" in rest and re.search(r":(?!\d{0,5}$)", authority) and not authority.startswith("["):
        # "key:se/cr?et@bucket": what stands after the colon is no port, so the secret itself holds a
        # slash or a question mark, as generated ones do, and ends at an @ further on.
        rest = rest[rest.rindex("@") + 1 :]
    return _QUERY.sub("", rest)
