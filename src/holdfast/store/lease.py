"""Who writes into a location on object storage: one object that its writer renews.

The object is created, replaced and given up only by conditional requests, so that of two writers one
wins, whatever the order of their messages. A writer that stops renewing is out after ``lease_s``.

Whether that time is over is judged by the store's clock alone: the age of the lease is the difference
between two times that the store itself wrote down, when the lease was last renewed and when a small
object was put just now. Wall clocks of the writers, right or wrong, play no part.

A writer that was paused for longer than its lease and wakes up again notices before its next commit:
:meth:`Lease.assure` renews the lease first, which fails if another has taken it, and gives the commit
the whole of ``lease_s`` to finish.

Giving up writes a mark into the object instead of removing it: there is no conditional delete, and an
unconditional one could remove what the next writer has just put there.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from holdfast.base.process import Owner
from holdfast.errors import LocationBusyError, StoreError, StoreUnavailableError
from holdfast.store.object_client import AlreadyThereError, ChangedError, Client, NotThereError, version_of

log = logging.getLogger(__name__)

ROUNDING_S = 2.0
"""Object stores count in whole seconds: two such times tell an age with this error at most."""

_TRIES = 8

POLL_S = 0.5
"""How often the holder's lease is looked at while waiting for it."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A lease as it was read."""

    version: dict[str, str]
    modified: datetime
    token: str
    renewals: int
    lease_s: float
    released: bool
    owner: Owner | None

    def __str__(self) -> str:
        return str(self.owner) if self.owner is not None else "unknown process"


class Lease:
    """The right to write into one location."""

    def __init__(self, client: Client, key: str, lease_s: float) -> None:
        self._client = client
        self._key = key
        self._lease_s = lease_s
        self._owner: Owner | None = None
        self._pid = 0
        self._token = ""
        self._renewals = 0
        self._version: dict[str, str] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._taken_by = ""
        self._followed = ""
        self.lost = False
        """Another writer has taken the lease from this one."""

    @property
    def held(self) -> bool:
        """Whether this process has taken the lease and not given it up. A forked child has not."""
        return self._owner is not None and self._pid == os.getpid()

    @property
    def token(self) -> str:
        """By which the other ranks of the run that holds it know it; empty where it is not held."""
        return self._token if self.held else ""

    def follow(self, token: str) -> None:
        """Another rank of this run holds it, by this token."""
        self._followed = token

    def acquire(self, owner: Owner, *, wait_s: float, takeover: bool) -> None:
        if self.held and not self.lost:
            return
        self._stop.set()
        self._owner, self._pid, self._token, self.lost = owner, os.getpid(), secrets.token_hex(8), False
        try:
            self._take(owner, time.monotonic() + wait_s, takeover)
        except BaseException:
            self._owner = None
            raise
        self._stop = threading.Event()
        threading.Thread(target=self._renew, args=(self._stop,), name="holdfast-lease", daemon=True).start()

    def _take(self, owner: Owner, until: float, takeover: bool) -> None:
        measured: tuple[dict[str, str], float] | None = None  # a version, and when by our clock it was renewed
        refused = 0
        while True:
            if refused > _TRIES and time.monotonic() >= until:
                raise StoreUnavailableError(f"the lease of {self._client.uri} changes each time it is to be taken")
            seen = self._look()
            if seen is None:
                if self._write("create"):
                    return
                refused += 1
                continue
            may = takeover or seen.released
            if seen.owner is not None:
                may = may or seen.owner.run == owner.run or seen.owner.is_dead()
            if not may:
                if measured is None or measured[0] != seen.version:
                    measured = (seen.version, time.monotonic() - self._age_s(seen))
                left_s = measured[1] + seen.lease_s + ROUNDING_S - time.monotonic()
                may = left_s <= 0
            if may:
                if self._write(seen.version):
                    return
                refused += 1
                continue
            if time.monotonic() >= until:
                busy = LocationBusyError(
                    f"{self._client.uri} is being written by another run ({seen}); if it has died, the location is "
                    f"free in {left_s:.0f} s. Two runs in one place would destroy each other's checkpoints: give this "
                    f"one another location, or stop the other one first"
                )
                busy.beside = seen.owner is not None and seen.owner.is_beside()
                raise busy
            time.sleep(min(POLL_S, max(0.01, left_s), max(0.01, until - time.monotonic())))

    def _look(self) -> _Seen | None:
        try:
            data, meta = self._client.get(f"read the lease of {self._client.uri}", self._key)
        except NotThereError:
            return None
        token, renewals, lease_s, released, owner = "", 0, self._lease_s, False, None
        try:
            body = json.loads(data)
            token, renewals = str(body["token"]), int(body["renewals"])
            lease_s, released = float(body["lease_s"]), bool(body["released"])
            owner = Owner.from_dict(body["owner"])
        except (ValueError, KeyError, TypeError):
            log.warning("the lease of %s cannot be read; it counts until it expires", self._client.uri)
        return _Seen(version_of(meta), meta["last_modified"], token, renewals, lease_s, released, owner)

    def _age_s(self, seen: _Seen) -> float:
        """How long ago the lease was renewed, by the store's own clock."""
        probe = f"{self._key}.{secrets.token_hex(8)}.now"
        what = f"ask {self._client.uri} for its time"
        self._client.put(what, probe, b"")
        try:
            now = self._client.head(what, probe)["last_modified"]
        finally:
            self._client.delete(what, [probe])
        return max(0.0, float((now - seen.modified).total_seconds()))

    def _body(self, released: bool) -> bytes:
        assert self._owner is not None
        self._renewals += 1  # also makes each version's bytes, and with them its e_tag, differ
        body = {
            "owner": self._owner.as_dict(),
            "token": self._token,
            "lease_s": self._lease_s,
            "renewals": self._renewals,
            "renewed": datetime.now(UTC).isoformat(timespec="seconds"),
            "released": released,
        }
        return json.dumps(body, indent=1).encode()

    def _write(self, mode: Any, *, released: bool = False) -> bool:
        """Put the lease if it is as ``mode`` says; False if it is another's now."""
        for _ in range(3):
            try:
                self._version = self._client.put(
                    f"renew the lease of {self._client.uri}", self._key, self._body(released), mode
                )
                return True
            except (AlreadyThereError, ChangedError):
                # The answer to a put may have been lost, this one's or an earlier one's: then the lease is our own.
                seen = self._look()
                if seen is None:
                    mode = "create"
                elif seen.token == self._token and seen.renewals == self._renewals:
                    self._version = seen.version
                    return True
                elif seen.token == self._token:
                    mode = seen.version
                else:
                    self._taken_by = str(seen)
                    return False
        return False

    def _renew(self, stop: threading.Event) -> None:
        reported = False
        wait_s = self._lease_s / 4
        while not stop.wait(wait_s):
            with self._lock:
                if stop.is_set() or not self.held:
                    return
                try:
                    if not self._write(self._version):
                        self._lose()
                        return
                    reported, wait_s = False, self._lease_s / 4
                except StoreError as error:
                    if not threading.main_thread().is_alive():
                        return  # the interpreter is exiting
                    wait_s = self._lease_s / 16
                    if not reported:
                        log.warning("%s; trying on", error)
                        reported = True

    def _lose(self) -> None:
        log.error("%s has been taken over by another run (%s)", self._client.uri, self._taken_by)
        self.lost = True

    def assure(self) -> None:
        """Renew the lease, and raise if another has it now. Does nothing where none was taken.

        A rank that follows the one that holds it only looks: the lease may have run out, as long as nobody took it.
        """
        if not self.held:
            if self._followed and (seen := self._look()) is not None and seen.token != self._followed:
                raise self._displaced(str(seen))
            return
        with self._lock:
            if not self.lost and not self._write(self._version):
                self._lose()
            if self.lost:
                raise self._displaced(self._taken_by)

    def _displaced(self, by: str) -> LocationBusyError:
        return LocationBusyError(
            f"{self._client.uri} has been taken over by another run ({by}); nothing is committed there"
        )

    def release(self) -> None:
        """Let another take it at once. A store that is out of reach is no error: the lease then expires."""
        if not self.held:
            self._owner = None
            return
        self._stop.set()
        with self._lock:
            try:
                if not self.lost:
                    self._write(self._version, released=True)
            except StoreError as error:
                log.warning("%s; it expires by itself", error)
            self._owner = None
