"""Checkpoints on object storage: S3, Google Cloud Storage, Azure.

There is no rename here and none is needed: an object is there whole or not at all, and a checkpoint is
whole if and only if its manifest is there. The order of a save::

    put checkpoint-N/checkpoint-is-incomplete.txt
    put the files, large ones in parallel parts
    put checkpoint-N/holdfast.json, create-only     <- the commit
    delete the sentinel

Removing deletes the manifest first. A sentinel beside a manifest, left by a writer that died in
between, means nothing.

Files that did not change are not stored again: the manifest of the later checkpoint refers to the
folder that has them. When that folder's own checkpoint is retired, such files stay in it, without a
manifest and without a sentinel, until no checkpoint refers to them.

A link that moves less than ``PARALLEL * PART / timeout_s`` (about 2 MB/s by default) counts as out of
reach: raise ``timeout_s`` there. Uploads that were cut off leave nothing visible, but some stores keep
their parts and bill for them: give the bucket a rule that ends unfinished multipart uploads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.base.process import Owner
from holdfast.errors import CheckpointCorruptError, CheckpointExistsError, StoreError
from holdfast.store.base import MANIFEST, PARTS, SENTINEL, Backend, Sink
from holdfast.store.lease import Lease
from holdfast.store.manifest import Manifest, step_of
from holdfast.store.object_client import (
    AlreadyThereError,
    ChangedError,
    Client,
    NotThereError,
    PastEndError,
    parse_uri,
    version_of,
)

log = logging.getLogger(__name__)

PART = 8 << 20
"""Bytes of one request of an upload or a download."""

PARALLEL = 8
"""Requests of one upload or download at a time: with PART, what bounds the memory."""

MAX_PARTS = 9000
"""S3 takes 10,000 parts per upload; the parts of larger files are larger."""

LEASE = ".holdfast/writer.json"

_NONCE = 16
"""Random bytes before the data of a part, by which its writer knows it again."""

# The two texts differ in length, so that a listing tells them apart.
_BEGUN = b"This checkpoint is not whole unless holdfast.json lies beside this file. Do not load it.\n"
_SET_ASIDE = b"This checkpoint was found damaged. Do not load it.\n"


class ObjectSink(Sink):
    """One object, sent in parts while it is being written. It is there when :meth:`finish` has returned."""

    def __init__(self, client: Client, location: str, key: str, size: int) -> None:
        self._client = client
        self._what = f"write {location}"
        part = max(PART, -(-size // MAX_PARTS))
        part += -part % (1 << 20)
        self._writer: Any = client.obstore.open_writer_async(
            client.store, key, buffer_size=part, max_concurrency=PARALLEL
        )

    def write(self, chunk: memoryview) -> None:
        # A copy: the writer sends from the memory it is given, later, and the caller reuses the chunk.
        data = bytes(chunk)
        self._client.call(self._what, lambda _: self._writer.write(data), retry=False)

    def finish(self) -> None:
        self._client.call(self._what, lambda _: self._writer.close(), retry=False)
        self._writer = None

    def abort(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):
                self._client.call(
                    f"abort: {self._what}",
                    lambda _: writer.__aexit__(StoreError, None, None),
                    limit_s=min(5.0, self._client.timeout_s),
                    retry=False,
                )


class ObjectBackend(Backend):
    """A prefix in a bucket that holds ``checkpoint-<step>/`` prefixes."""

    read_size = PARALLEL * PART

    def __init__(self, uri: str, *, store: Any = None, timeout_s: float = 30.0, lease_s: float = 120.0) -> None:
        """Set up the client; nothing is contacted yet.

        Credentials and endpoints come from the standard environment variables: ``AWS_ACCESS_KEY_ID``,
        ``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``, a web identity or the
        machine's role; ``GOOGLE_APPLICATION_CREDENTIALS``; ``AZURE_STORAGE_ACCOUNT_NAME`` and its keys.

        Args:
            uri: ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.
            store: An obstore store to use instead of one made from the environment; holds the bucket's root.
            timeout_s: After so many seconds without an answer a call raises ``StoreUnavailableError``.
            lease_s: How long a writer that has died, and cannot be seen to have, keeps other runs out.
        """
        scheme, bucket, self._prefix = parse_uri(uri)
        self.uri = f"{scheme}://{bucket}" + (f"/{self._prefix}" if self._prefix else "")
        self._client = Client(self.uri, timeout_s, store)
        self._lease = Lease(self._client, self._key(LEASE), lease_s)
        self._adoptable: tuple[str, str, dict[str, int]] = ("", "", {})

    def __repr__(self) -> str:
        return f"ObjectBackend({self.uri!r})"

    @property
    def lost(self) -> bool:
        """Whether another run has taken over the location that was acquired here."""
        return self._lease.lost

    def _key(self, *parts: str) -> str:
        return "/".join(part for part in (self._prefix, *parts) if part)

    def _location(self, *parts: str) -> str:
        return "/".join((self.uri, *parts))

    def names(self) -> list[str]:
        prefix = self._prefix or None
        try:
            listed = self._client.call(
                f"list {self.uri}", lambda store: self._client.obstore.list_with_delimiter_async(store, prefix)
            )
        except NotThereError:
            return []
        found = (path.rstrip("/").rpartition("/")[2] for path in listed["common_prefixes"])
        return [name for name in found if step_of(name) is not None]

    def read_manifest(self, name: str) -> bytes | None:
        try:
            return self._client.get(f"read {self._location(name, MANIFEST)}", self._key(name, MANIFEST))[0]
        except NotThereError:
            return None

    def _files(self, name: str) -> dict[str, int]:
        """Path and size of every object of a folder."""
        prefix = self._key(name)
        try:
            objects = self._client.list_all(f"list {self._location(name)}", prefix)
        except NotThereError:
            return {}
        return {entry["path"].removeprefix(prefix + "/"): int(entry["size"]) for entry in objects}

    def sizes(self, name: str) -> dict[str, int]:
        return {path: size for path, size in self._files(name).items() if not path.startswith(PARTS + "/")}

    def read_into(self, name: str, path: str, offset: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            wanted = min(len(buffer) - done, PARALLEL * PART)
            count = self._read_batch(name, path, offset + done, buffer[done : done + wanted])
            done += count
            if count < wanted:
                break
        return done

    def _read_batch(self, name: str, path: str, offset: int, buffer: memoryview) -> int:
        """Fill the buffer with parallel requests, one per part."""
        obstore, key = self._client.obstore, self._key(name, path)
        what = f"read {self._location(name, path)}"
        starts = range(0, len(buffer), PART)

        def ranges(store: Any) -> Awaitable[list[Any]]:
            return asyncio.gather(
                *(
                    obstore.get_range_async(store, key, start=offset + at, length=min(PART, len(buffer) - at))
                    for at in starts
                )
            )

        try:
            pieces = self._client.call(what, ranges)
        except PastEndError:
            # An error here, an end for the caller: ask again for what there is.
            size = int(self._client.head(what, key)["size"])
            if size >= offset + len(buffer):
                raise
            return self._read_batch(name, path, offset, buffer[: size - offset]) if size > offset else 0
        done = 0
        for at, piece in zip(starts, pieces, strict=True):
            view = memoryview(piece)
            buffer[at : at + len(view)] = view
            done += len(view)
            if len(view) < min(PART, len(buffer) - at):
                break
        return done

    def begin(self, name: str) -> None:
        files = self._files(name)
        if MANIFEST in files:
            raise CheckpointExistsError(
                f"{self._location(name)} is a whole checkpoint already; it is not written again"
            )
        # With the sentinel of `begin`, what lies there is of this save or of one that died. Without it, it is what
        # is left of a checkpoint that was removed or set aside, and others may refer to it.
        if files and files.get(SENTINEL) != len(_BEGUN):
            self._check_unreferenced(name)
        self._adoptable = ("", "", {})
        self._client.put(f"write {self._location(name, SENTINEL)}", self._key(name, SENTINEL), _BEGUN)

    def _check_unreferenced(self, name: str) -> None:
        for other in self.names():
            data = self.read_manifest(other)
            if data is None:
                continue
            try:
                entries = Manifest.decode(data).files
            except CheckpointCorruptError:
                continue
            for entry in entries:
                if entry.ref is not None and entry.ref.startswith(f"{name}/"):
                    raise StoreError(
                        f"cannot create {self._location(name)}: it holds files of an earlier checkpoint of that name, "
                        f"and {other} refers to {entry.ref}; remove {other} first"
                    )

    def create(self, name: str, path: str, size: int) -> Sink:
        return ObjectSink(self._client, self._location(name, path), self._key(name, path), size)

    def adopt(self, name: str, path: str, source: str, source_path: str) -> dict[str, Any] | None:
        # One listing serves all files that a checkpoint adopts from one other.
        if self._adoptable[:2] != (name, source):
            self._adoptable = (name, source, self.sizes(source))
        if source_path not in self._adoptable[2]:
            return None
        return {"ref": f"{source}/{source_path}"}

    def put_part(self, name: str, part: str, data: bytes) -> None:
        what = f"write {self._location(name, PARTS, part)}"
        self._client.put(what, self._key(name, PARTS, part), bytes(_NONCE) + data)

    def claim_part(self, name: str, part: str, data: bytes) -> bool:
        nonce = secrets.token_bytes(_NONCE)
        what = f"write {self._location(name, PARTS, part)}"
        key = self._key(name, PARTS, part)
        try:
            self._client.put(what, key, nonce + data, "create")
            return True
        except AlreadyThereError:
            # Perhaps our own: the answer to the first try was lost, and the second found it there.
            with contextlib.suppress(NotThereError):
                return self._client.get(what, key)[0][:_NONCE] == nonce
            return False

    def read_parts(self, name: str) -> dict[str, bytes]:
        parts: dict[str, bytes] = {}
        prefix = self._key(name, PARTS)
        with contextlib.suppress(NotThereError):
            for entry in self._client.list_all(f"list {self._location(name, PARTS)}", prefix):
                part = entry["path"].removeprefix(prefix + "/")
                with contextlib.suppress(NotThereError):
                    data, _ = self._client.get(f"read {self._location(name, PARTS, part)}", entry["path"])
                    parts[part] = data[_NONCE:]
        return parts

    def commit(self, name: str, manifest: bytes) -> None:
        self._lease.assure()
        what, key = f"commit {self._location(name)}", self._key(name, MANIFEST)
        try:
            self._client.put(what, key, manifest, "create")
        except AlreadyThereError:
            if self.read_manifest(name) != manifest:
                raise CheckpointExistsError(
                    f"{self._location(name)} is a whole checkpoint already; it is not committed again"
                ) from None
        try:
            parts = [path for path in self._files(name) if path.startswith(PARTS + "/")]
            self._delete(name, [SENTINEL, *parts])
        except StoreError as error:
            log.warning("%s is committed, but its sentinel is still there: %s", self._location(name), error)

    def amend(self, name: str, manifest: bytes) -> None:
        # Conditional: a put alone would make a folder whole again that was removed or set aside meanwhile.
        self._lease.assure()
        what, key = f"write {self._location(name, MANIFEST)}", self._key(name, MANIFEST)
        try:
            self._client.put(what, key, manifest, version_of(self._client.head(what, key)))
        except ChangedError:
            if self.read_manifest(name) != manifest:
                raise

    def _delete(self, name: str, paths: list[str]) -> None:
        self._client.delete(f"remove {self._location(name)}", [self._key(name, path) for path in paths])

    def discard(self, name: str, keep: Callable[[str], bool] | None = None) -> None:
        self._lease.assure()
        files = self._files(name)
        if MANIFEST in files:
            self._delete(name, [MANIFEST])
        # The sentinel goes last: as long as a file that nobody needs is there, so is what says so.
        doomed = [path for path in files if path not in (MANIFEST, SENTINEL) and not (keep and keep(path))]
        self._delete(name, doomed)
        if SENTINEL in files:
            self._delete(name, [SENTINEL])

    def set_aside(self, name: str) -> None:
        if MANIFEST in self._files(name):
            self._lease.assure()
            self._delete(name, [MANIFEST])
            self._client.put(f"write {self._location(name, SENTINEL)}", self._key(name, SENTINEL), _SET_ASIDE)

    def acquire(self, owner: Owner, *, wait_s: float = 0.0, takeover: bool = False) -> None:
        self._lease.acquire(owner, wait_s=wait_s, takeover=takeover)

    def grant(self) -> str:
        return self._lease.token

    def join(self, grant: str) -> None:
        self._lease.follow(grant)

    def assure(self) -> None:
        self._lease.assure()

    def release(self) -> None:
        self._lease.release()
