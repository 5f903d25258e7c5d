"""A store backend: all checkpoint folders in one SQLite file.

Every operation is one transaction on a connection of its own, so threads, forked workers and other processes need no
further locks. The commit of a checkpoint sets the manifest of its folder: SQLite makes that atomic and durable. A file
that did not change shares its bytes with the folder it was adopted from. For one machine: SQLite does not lock reliably
on NFS. The file does not shrink when checkpoints are removed, their pages are used again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.errors import CheckpointExistsError, LocationBusyError, StoreError
from holdfast.store import MANIFEST, SENTINEL, Backend, Owner, Sink
from holdfast.store.local import make_folders
from holdfast.store.manifest import step_of

SCHEMA = (
    # No manifest: the folder is incomplete.
    "CREATE TABLE IF NOT EXISTS folders (name TEXT PRIMARY KEY, manifest BLOB)",
    "CREATE TABLE IF NOT EXISTS files (folder TEXT, path TEXT, content TEXT, PRIMARY KEY (folder, path))",
    "CREATE TABLE IF NOT EXISTS chunks (content TEXT, start INTEGER, data BLOB, PRIMARY KEY (content, start))",
    "CREATE TABLE IF NOT EXISTS parts (folder TEXT, part TEXT, data BLOB, PRIMARY KEY (folder, part))",
    "CREATE TABLE IF NOT EXISTS writer (one INTEGER PRIMARY KEY CHECK (one = 1), token TEXT, owner TEXT)",
)
REMOVE_UNUSED = "DELETE FROM chunks WHERE content NOT IN (SELECT content FROM files)"
BUSY_S = 60.0
"""How long an operation waits for the transaction of another process."""


class SqliteBackend(Backend):
    """``sqlite:///absolute/path.db``."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.path = uri.removeprefix("sqlite://")
        self._token: str | None = None
        """Identifies this object as the writer, between ``acquire`` and ``release``."""

    @contextlib.contextmanager
    def _transaction(self, *, write: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction: durable when the block is over, and undone if it raises."""
        try:
            if write:
                make_folders(os.path.dirname(self.path))
            path = self.path if write or os.path.exists(self.path) else ":memory:"  # reading creates nothing
            with contextlib.closing(sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)) as db:
                db.execute("PRAGMA synchronous = EXTRA")
                db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                for statement in SCHEMA:
                    db.execute(statement)
                yield db
                db.execute("COMMIT")
        except StoreError:
            raise
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self.uri}: {error}") from error

    def _run(self, statement: str, *values: Any) -> int:
        """Change rows in a transaction of its own; returns how many."""
        with self._transaction() as db:
            return db.execute(statement, values).rowcount

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._transaction(write=False) as db:
            return db.execute(query, values).fetchall()

    def _refuse_complete(self, db: sqlite3.Connection, name: str) -> bool:
        """Raise if the folder is complete; returns whether there is an incomplete one."""
        row = db.execute("SELECT manifest FROM folders WHERE name = ?", (name,)).fetchone()
        if row is not None and row[0] is not None:
            raise CheckpointExistsError(f"{self.uri}/{name} is a complete checkpoint already; it is not written again")
        return row is not None

    # ------------------------------------------------------------------ reading

    def names(self) -> list[str]:
        return [name for (name,) in self._rows("SELECT name FROM folders") if step_of(name) is not None]

    def read_manifest(self, name: str) -> bytes | None:
        rows = self._rows("SELECT manifest FROM folders WHERE name = ?", name)
        return rows[0][0] if rows else None

    def sizes(self, name: str) -> dict[str, int]:
        with self._transaction(write=False) as db:
            query = """SELECT path, coalesce(sum(length(data)), 0) FROM files LEFT JOIN chunks USING (content)
                       WHERE folder = ? GROUP BY path"""
            found: dict[str, int] = dict(db.execute(query, (name,)))
            for (length,) in db.execute("SELECT length(manifest) FROM folders WHERE name = ?", (name,)):
                found.update({SENTINEL: 0} if length is None else {MANIFEST: length})
        return found

    def read_into(self, name: str, path: str, offset: int, buffer: memoryview) -> int:
        done = 0
        with self._transaction(write=False) as db:
            row = db.execute("SELECT content FROM files WHERE folder = ? AND path = ?", (name, path)).fetchone()
            if row is None:
                missing = StoreError(f"cannot read {self.uri}/{name}/{path}: there is no such file")
                missing.errno = errno.ENOENT  # callers tell "not there" from "out of reach" by it
                raise missing
            query = """SELECT start, data FROM chunks
                       WHERE content = ? AND start < ? AND start + length(data) > ? ORDER BY start"""
            for start, data in db.execute(query, (row[0], offset + len(buffer), offset)):
                piece = data[offset + done - start :][: len(buffer) - done]
                buffer[done : done + len(piece)] = piece
                done += len(piece)
        return done

    # ------------------------------------------------------------------ writing

    def begin(self, name: str) -> None:
        with self._transaction() as db:
            self._refuse_complete(db, name)
            db.execute("INSERT OR IGNORE INTO folders VALUES (?, NULL)", (name,))

    def create(self, name: str, path: str, size: int) -> Sink:
        content = secrets.token_hex(8)
        self._run("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", name, path, content)
        return SqliteSink(self, content)

    def adopt(self, name: str, path: str, source: str, source_path: str) -> dict[str, Any] | None:
        adopt = "INSERT OR REPLACE INTO files SELECT ?, ?, content FROM files WHERE folder = ? AND path = ?"
        return {} if self._run(adopt, name, path, source, source_path) else None

    def put_part(self, name: str, part: str, data: bytes) -> None:
        self._run("INSERT OR REPLACE INTO parts VALUES (?, ?, ?)", name, part, data)

    def claim_part(self, name: str, part: str, data: bytes) -> bool:
        return self._run("INSERT OR IGNORE INTO parts VALUES (?, ?, ?)", name, part, data) == 1

    def read_parts(self, name: str) -> dict[str, bytes]:
        return dict(self._rows("SELECT part, data FROM parts WHERE folder = ?", name))

    def commit(self, name: str, manifest: bytes) -> None:
        with self._transaction() as db:
            if self._token is not None and self._writer(db)[0] != self._token:
                raise LocationBusyError(f"{self.uri} has been taken over by another run; nothing is committed there")
            if not self._refuse_complete(db, name):
                raise StoreError(f"cannot commit {self.uri}/{name}: it was not begun, or has been removed since")
            db.execute("UPDATE folders SET manifest = ? WHERE name = ?", (manifest, name))
            db.execute("DELETE FROM parts WHERE folder = ?", (name,))
            db.execute(REMOVE_UNUSED)

    def amend(self, name: str, manifest: bytes) -> None:
        if not self._run("UPDATE folders SET manifest = ? WHERE name = ? AND manifest NOTNULL", manifest, name):
            raise StoreError(f"cannot amend {self.uri}/{name}: it is not a complete checkpoint")

    def set_aside(self, name: str) -> None:
        self._run("UPDATE folders SET manifest = NULL WHERE name = ?", name)

    def discard(self, name: str, keep: Callable[[str], bool] | None = None) -> None:
        # Nothing to keep: shared bytes stay until the last folder that has them is gone.
        with self._transaction() as db:
            db.execute("DELETE FROM folders WHERE name = ?", (name,))
            db.execute("DELETE FROM files WHERE folder = ?", (name,))
            db.execute("DELETE FROM parts WHERE folder = ?", (name,))
            db.execute(REMOVE_UNUSED)

    # ------------------------------------------------------------------ one run at a time

    @staticmethod
    def _writer(db: sqlite3.Connection) -> tuple[str | None, Owner | None]:
        row = db.execute("SELECT token, owner FROM writer").fetchone()
        return (row[0], Owner.from_dict(json.loads(row[1]))) if row else (None, None)

    def acquire(self, owner: Owner, *, wait_s: float = 0.0, takeover: bool = False) -> None:
        until = time.monotonic() + wait_s
        while True:
            with self._transaction() as db:
                _, other = self._writer(db)
                if other is None or other.run == owner.run or other.is_dead() or takeover:
                    self._token = secrets.token_hex(8)
                    row = (self._token, json.dumps(owner.as_dict()))
                    db.execute("INSERT OR REPLACE INTO writer VALUES (1, ?, ?)", row)
                    return
            if time.monotonic() >= until:
                raise LocationBusyError(f"{self.uri} is being written by another run ({other}); stop that one first")
            time.sleep(0.05)

    def release(self) -> None:
        token, self._token = self._token, None
        if token is not None:
            self._run("DELETE FROM writer WHERE token = ?", token)


class SqliteSink(Sink):
    """One file: a row for each chunk."""

    def __init__(self, backend: SqliteBackend, content: str) -> None:
        self._backend, self._content, self._end = backend, content, 0

    def write(self, chunk: memoryview) -> None:
        self._backend._run("INSERT INTO chunks VALUES (?, ?, ?)", self._content, self._end, chunk)
        self._end += len(chunk)

    def finish(self) -> None:
        """Every chunk is durable already."""

    def abort(self) -> None:
        """Nothing is held. The folder is incomplete, and its next writer replaces the file."""
