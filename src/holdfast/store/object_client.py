"""Calls to an object store: each is bounded in time, and no error carries a secret.

obstore does the work, on its own threads. The calls are started from one event loop in a thread of
ours rather than made directly, for three reasons: a call that is given up is cancelled, whatever the
network does; a signal that arrives meanwhile is handled at once, since the waiting thread waits in
Python; and a forked child, in which obstore's threads do not exist, gets an error instead of a hang.

What obstore says about a failure holds URLs, headers and the server's answer, and with them signatures
and tokens. It is sorted into our own words here, and never shown.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import errno
import logging
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from holdfast.errors import ConfigError, MissingExtraError, StoreError, StoreUnavailableError

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRIES = 3
"""How often a request is tried again after a 5xx answer or a broken connection, within the call's time."""

CONNECT_TIMEOUT_S = 5.0

_SCHEMES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": (),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


class NotThereError(StoreError):
    """No object has this name."""


class AlreadyThereError(StoreError):
    """A create-only put found an object of this name."""


class PastEndError(StoreError):
    """A range was asked for that begins after the last byte."""


class ChangedError(StoreError):
    """A conditional put found another version than the one it was for, or none."""


def parse_uri(uri: str) -> tuple[str, str, str]:
    """Scheme, bucket and prefix of a location; credentials and queries in it are dropped."""
    parts = urlsplit(uri)
    bucket = parts.netloc.rpartition("@")[2]
    if parts.scheme not in _SCHEMES or not bucket or ":" in bucket:
        raise ConfigError(
            f"location {parts.scheme}://{bucket}{parts.path}: expected <scheme>://<bucket>/<prefix> "
            f"with one of the schemes {', '.join(_SCHEMES)}"
        )
    segments = [segment for segment in parts.path.split("/") if segment]
    if not {".", ".."}.isdisjoint(segments):
        raise ConfigError(f"location {parts.scheme}://{bucket}{parts.path}: '.' and '..' have no meaning there")
    return parts.scheme, bucket, "/".join(segments)


def _obstore() -> Any:
    try:
        import obstore
        import obstore.store
    except ImportError:
        raise MissingExtraError("obstore", "s3", "a checkpoint location on object storage") from None
    return obstore


def _endpoint(scheme: str) -> str | None:
    return next((value for name in _ENDPOINTS[scheme] if (value := os.environ.get(name))), None)


def build_store(scheme: str, bucket: str, timeout_s: float) -> Any:
    """obstore's client, from the standard environment variables as they are at this moment."""
    obstore = _obstore()
    endpoint = _endpoint(scheme)
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT_S, timeout_s)),
        "timeout": timedelta(seconds=timeout_s),
    }
    if endpoint and endpoint.startswith("http://"):
        client["allow_http"] = True
    config: dict[str, Any] = {}
    if scheme == "s3" and endpoint:
        config["endpoint"] = endpoint
        if "AWS_VIRTUAL_HOSTED_STYLE_REQUEST" not in os.environ:
            config["virtual_hosted_style_request"] = False
    retry = {
        "max_retries": RETRIES,
        "retry_timeout": timedelta(seconds=timeout_s),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
    }
    failure: Exception
    try:
        return getattr(obstore.store, _SCHEMES[scheme])(
            bucket, config=config, client_options=client, retry_config=retry
        )
    except Exception as error:
        failure = error
    raise ConfigError(f"{scheme}://{bucket}: the client cannot be set up: {explain(failure)}")


class Client:
    """An object store, reached through calls that end."""

    def __init__(self, uri: str, timeout_s: float, store: Any = None) -> None:
        self.obstore = _obstore()
        self.timeout_s = timeout_s
        self.uri = uri
        self._rebuild: Callable[[], Any] | None = None
        if store is None:
            scheme, bucket, _ = parse_uri(uri)
            self._rebuild = lambda: build_store(scheme, bucket, timeout_s)
            self._where = _where(_endpoint(scheme))
            store = self._rebuild()
        else:
            self._where = ""
        self.store = store

    def call(
        self, what: str, make: Callable[[Any], Awaitable[T]], *, limit_s: float | None = None, retry: bool = True
    ) -> T:
        """The result of ``make(store)``; ``what`` ("write", "list") and the error make up a message if it fails.

        An answer that the credentials are not valid is tried once more with a client made anew: they may have been
        replaced in the environment since. ``retry=False`` is for what cannot be tried again.
        """
        limit_s = self.timeout_s if limit_s is None else limit_s
        until = time.monotonic() + limit_s
        for last in (self._rebuild is None or not retry, True):
            result, failure = _run(lambda: make(self.store), max(0.05, until - time.monotonic()))
            if failure is None:
                return cast(T, result)
            if isinstance(failure, TimeoutError):
                raised = StoreUnavailableError(
                    f"cannot {what}{self._where}: no answer within {limit_s:g} s{self._missing_credentials()}"
                )
                raised.errno = errno.ETIMEDOUT
                raise raised
            if last or not _is_auth_error(failure):
                break
            assert self._rebuild is not None
            self.store = self._rebuild()
        # Not chained to the original, which may hold secrets.
        assert failure is not None
        raise self._translate(what, failure)

    def _missing_credentials(self) -> str:
        # Without any, the client asks the machine's metadata service, which elsewhere never answers.
        sources = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
        if self._rebuild is None or not self.uri.startswith("s3:") or any(name in os.environ for name in sources):
            return ""
        return "; AWS_ACCESS_KEY_ID is not set"

    def _translate(self, what: str, error: BaseException) -> StoreError:
        kind, number = _sort(error)
        where = self._where if kind is StoreUnavailableError else ""
        hint = self._missing_credentials() if _is_auth_error(error) else ""
        failure = kind(f"cannot {what}{where}: {explain(error)}{hint}")
        failure.errno = number
        return failure

    def put(self, what: str, key: str, data: bytes, mode: Any = "overwrite") -> dict[str, str]:
        """Store a small object; returns what identifies this version of it."""
        result = self.call(what, lambda store: self.obstore.put_async(store, key, data, mode=mode, use_multipart=False))
        return version_of(result)

    def get(self, what: str, key: str) -> tuple[bytes, dict[str, Any]]:
        """A small object and its metadata; raises :class:`NotThereError`."""

        async def get(store: Any) -> tuple[bytes, dict[str, Any]]:
            result = await self.obstore.get_async(store, key)
            return bytes(await result.bytes_async()), dict(result.meta)

        return self.call(what, get)

    def head(self, what: str, key: str) -> dict[str, Any]:
        return dict(self.call(what, lambda store: self.obstore.head_async(store, key)))

    def list_all(self, what: str, prefix: str) -> list[dict[str, Any]]:
        """All objects under a prefix, a page at a time so that each page has the whole time limit."""
        found: dict[str, dict[str, Any]] = {}
        stream: Any = None

        async def page(store: Any) -> bool:
            nonlocal stream
            stream = stream or self.obstore.list(store, prefix, chunk_size=1000)
            try:
                found.update((entry["path"], dict(entry)) for entry in await stream.__anext__())
                return True
            except StopAsyncIteration:
                return False
            except BaseException:
                stream = None
                raise

        while self.call(what, page):
            pass
        return list(found.values())

    def delete(self, what: str, keys: list[str]) -> None:
        """Delete objects; those that are not there are no error."""
        for start in range(0, len(keys), 1000):
            batch = keys[start : start + 1000]
            try:
                self.call(what, lambda store, batch=batch: self.obstore.delete_async(store, batch))  # type: ignore[misc]
            except NotThereError:
                # Stores without a bulk request stop at the first that is missing.
                for key in batch:
                    with contextlib.suppress(NotThereError):
                        self.call(what, lambda store, key=key: self.obstore.delete_async(store, key))  # type: ignore[misc]


def version_of(meta: Any) -> dict[str, str]:
    return {field: meta[field] for field in ("e_tag", "version") if meta.get(field) is not None}


def _where(endpoint: str | None) -> str:
    if not endpoint:
        return ""
    parts = urlsplit(endpoint)
    return f" at {parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class _Loop:
    """One event loop in a thread of its own, for all object stores of the process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="holdfast-object", daemon=True)
        self.thread.start()
        # obstore's threads must not call back into an interpreter that has gone: nothing is left under way.
        atexit.register(self.stop)

    def stop(self) -> None:
        if self.pid == os.getpid() and self.thread.is_alive():
            self.loop.call_soon_threadsafe(self._cancel_all)
            self.thread.join(1.0)

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_later(0.01, self.loop.stop)


_loop: _Loop | None = None
_loop_lock = threading.Lock()


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop
    if _loop is None:
        with _loop_lock:
            _loop = _loop or _Loop()
    if _loop.pid != os.getpid():
        raise StoreError(
            "this process was forked from one that had used an object store already; the store's threads do not exist "
            "here: start it with the method 'spawn' or 'forkserver'"
        )
    if not _loop.thread.is_alive():
        raise StoreUnavailableError("the interpreter is exiting")
    return _loop.loop


def _run(make: Callable[[], Awaitable[T]], limit_s: float) -> tuple[T | None, BaseException | None]:
    """The result, or what was raised over there: a signal handler may raise over here meanwhile."""

    async def bounded() -> tuple[T | None, BaseException | None]:
        try:
            async with asyncio.timeout(limit_s):
                return await make(), None
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return None, error

    until = time.monotonic() + limit_s + 1.0
    future = asyncio.run_coroutine_threadsafe(bounded(), _running_loop())
    try:
        return future.result(limit_s + 1.0)
    except TimeoutError as error:
        if time.monotonic() < until:
            raise  # a signal handler's
        return None, error
    except concurrent.futures.CancelledError:
        raise StoreUnavailableError("the interpreter is exiting") from None
    finally:
        future.cancel()


_STATUS = re.compile(r"status code: (\d{3})([A-Za-z ]*)")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_PAST_END = re.compile(r"Wanted range starting at|range started at|Requested range was invalid", re.IGNORECASE)
_EXPIRED = re.compile(r"<Code>(ExpiredToken|InvalidToken|TokenRefreshRequired|RequestExpired)</Code>")
_RETRIES = re.compile(r"after (\d+) retries")


def _status(text: str) -> int:
    match = _STATUS.search(text)
    return int(match[1]) if match else 0


def _is_auth_error(error: BaseException) -> bool:
    text = str(error)
    return _status(text) in (401, 403) or bool(_EXPIRED.search(text))


def _sort(error: BaseException) -> tuple[type[StoreError], int | None]:
    """Which of our errors this is, and its errno."""
    name, text = type(error).__name__, str(error)
    status = _status(text)
    if isinstance(error, FileNotFoundError) or (status == 404 and name != "PreconditionError"):
        return NotThereError, errno.ENOENT
    if name == "AlreadyExistsError":
        return AlreadyThereError, errno.EEXIST
    if name == "PreconditionError":
        return ChangedError, errno.ESTALE
    if _is_auth_error(error):
        return StoreError, errno.EACCES
    if status == 416 or _PAST_END.search(text):
        return PastEndError, errno.EINVAL
    if isinstance(error, ValueError) or name in ("InvalidPathError", "NotSupportedError", "NotImplementedError"):
        return StoreError, errno.EINVAL
    if 400 <= status < 500 and status not in (408, 425, 429):
        return StoreError, errno.EINVAL
    return StoreUnavailableError, errno.ECONNABORTED


_WORDS = (
    (
        "169.254.169.254",
        "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give it a role",
    ),
    ("metadata.google.internal", "no credentials were found: set GOOGLE_APPLICATION_CREDENTIALS"),
    ("dns error", "the name of the server cannot be resolved"),
    ("onnection refused", "the connection was refused"),
    ("ConnectionRefused", "the connection was refused"),
    ("invalid peer certificate", "the server's certificate is not trusted"),
    ("URL scheme is not allowed", "plain http is not allowed: set AWS_ALLOW_HTTP=true if it is meant"),
    ("TimedOut", "no answer in time"),
    ("timed out", "no answer in time"),
    ("onnection reset", "the connection broke"),
    ("ConnectionReset", "the connection broke"),
    ("IncompleteMessage", "the connection broke"),
    ("connection closed", "the connection broke"),
    ("error decoding response body", "the connection broke"),
    ("error sending request", "the connection broke"),
    ("HTTP error", "the connection broke"),
)

_HINTS = {
    "NoSuchBucket": "; create the bucket, or check its name",
    "SignatureDoesNotMatch": "; check the secret key",
    "InvalidAccessKeyId": "; check the access key",
    "ExpiredToken": "; the credentials have expired",
    "PermanentRedirect": "; check AWS_REGION",
    "AuthorizationHeaderMalformed": "; check AWS_REGION",
    "NotImplemented": "; the server lacks an operation that is needed here, probably conditional writes",
}


def explain(error: BaseException) -> str:
    """A failure in our own words: nothing of what the server or the client said is repeated but known codes."""
    text = str(error)
    code = _CODE.search(text)
    status = _STATUS.search(text)
    retries = _RETRIES.search(text)
    tried = f", also after {retries[1]} retries" if retries else ""
    if status:
        named = f" ({code[1]})" if code else ""
        hint = _HINTS.get(code[1], "") if code else ""
        if not hint and _is_auth_error(error):
            hint = "; check the credentials and what they permit"
        return f"the store answered {status[1]}{status[2].rstrip()}{named}{tried}{hint}"
    for sign, words in _WORDS:
        if sign in text:
            return words + tried
    if isinstance(error, FileNotFoundError):
        return "it is not there"
    return f"{type(error).__name__}{tried}"
