"""What ``holdfast doctor`` looks at: settings, the location, its file system, this machine, the run's history.

Each check yields findings: what was found, what it means, what to do about it.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.base.process import Owner
from holdfast.cli.inspect import all_rows
from holdfast.cli.output import human_bytes, human_seconds
from holdfast.config import Settings
from holdfast.errors import HoldfastError, LocationBusyError, StoreError
from holdfast.launch.runs import RunPlace
from holdfast.store import Backend
from holdfast.store.checkpoints import DAMAGED, UNFINISHED, Checkpoint, whole
from holdfast.store.local import LocalBackend, LocalSink, fsync_dir

ERROR, WARNING, OK = "error", "warning", "ok"

_MARGIN_S = 1.5
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_TORCHRUN_S = 30.0
_IMPLAUSIBLE_FSYNC_S = 30e-6
"""A megabyte takes longer than that to reach any device."""
_MEMORY = {"tmpfs", "ramfs"}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "fuse.s3fs", "fuse.gcsfuse", "fuse.mountpoint-s3", "9p", "ceph", "lustre"}
_LEAST_SHM = 16 << 20
_TRIAL = 256 << 20
_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    severity: str
    check: str
    found: str
    means: str = ""
    do: str = ""


def check_settings(environ: dict[str, str]) -> tuple[Settings, list[Finding]]:
    try:
        return Settings.load(environ), []
    except HoldfastError as error:
        return Settings(), [Finding(ERROR, "settings", str(error), "a run would not start", "correct the variable")]


# ---------------------------------------------------------------------- the location


def check_backend(backend: Backend, *, fallback: bool, live: bool) -> Iterator[Finding]:
    """Whether it can be reached and written."""
    what = "fallback" if fallback else "location"
    try:
        began = time.monotonic()
        count = len(backend.names())
        took = time.monotonic() - began
        if isinstance(backend, LocalBackend):
            yield from _check_folder(backend, what)
        elif not live:
            backend.acquire(Owner(f"doctor-{secrets.token_hex(4)}"), wait_s=0.0)
            backend.release()
            yield Finding(OK, what, f"{backend.uri} answers in {took:.2f} s and can be written, {count} checkpoints")
    except LocationBusyError:
        yield Finding(OK, what, f"{backend.uri} is in use by a live run")
    except (HoldfastError, OSError) as error:
        yield Finding(
            ERROR,
            what,
            str(error),
            "nothing can be saved there",
            "check the address, the credentials and the rights, or choose another location",
        )


def _check_folder(backend: LocalBackend, what: str) -> Iterator[Finding]:
    folder = nearest_folder(backend.root)
    trial = os.path.join(folder, f".holdfast-doctor-{secrets.token_hex(4)}")
    try:
        os.mkdir(trial)
    except OSError as error:
        yield Finding(
            ERROR,
            what,
            f"{folder} cannot be written: {error.strerror or error}",
            "nothing can be saved there",
            "change the folder's owner or mode, or choose another location with --dir or HOLDFAST_DIR",
        )
        return
    try:
        yield Finding(OK, what, f"{backend.root} can be written")
        yield from _check_file_system(trial, folder, what)
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def nearest_folder(path: str) -> str:
    """The folder itself, or the one above it that there is and in which it would be made."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def mount_of(path: str) -> tuple[str, str, set[str]]:
    """Mount point, type and options of the file system that a path lies on."""
    path = os.path.realpath(path)
    best = ("", "unknown", set[str]())
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            for line in file:
                _, point, kind, options, *_ = line.split(" ")
                point = point.encode().decode("unicode_escape")
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best[0]):
                    best = (point, kind, set(options.split(",")))
    except OSError:
        pass
    return best


def _check_file_system(trial: str, folder: str, what: str) -> Iterator[Finding]:
    point, kind, options = mount_of(folder)
    seconds, error = _time_fsync(trial)
    where = f"{folder} is on {kind}, mounted at {point}"
    if kind in _MEMORY:
        yield Finding(
            WARNING,
            "fsync",
            f"{where}: memory",
            "checkpoints are gone after a reboot or a crash of the machine",
            "save to a disk, and use memory for a fast first tier at most",
        )
    elif error is not None:
        yield Finding(
            ERROR,
            "fsync",
            f"{where}; fsync fails: {error}",
            "a checkpoint may be lost or torn by a power cut after its commit",
            "choose a file system that can make files and folders durable",
        )
    elif "volatile" in options or "eatmydata" in os.environ.get("LD_PRELOAD", "") or seconds < _IMPLAUSIBLE_FSYNC_S:
        yield Finding(
            WARNING,
            "fsync",
            f"{where}; fsync of 1 MB returns after {seconds * 1e6:.0f} µs",
            "it does not wait for a disk: a power cut can take a checkpoint that was committed",
            "look for mount options such as volatile or sync=disabled, and for libeatmydata",
        )
    else:
        yield Finding(OK, "fsync", f"{where}; fsync of 1 MB takes {seconds * 1e3:.1f} ms")
    if kind in _NETWORK:
        yield Finding(
            OK,
            "network",
            f"{kind} is a network file system: lines of two hosts may overwrite each other in the journal",
        )
    if not _takes_direct(trial) and kind not in _MEMORY:
        yield Finding(
            WARNING,
            "direct_io",
            f"{kind} at {point} takes no direct I/O",
            "saves go through the page cache, whose write-back competes with the deadline: they are slower",
            "nothing, if the measured save fits into the grace period",
        )


def _time_fsync(folder: str) -> tuple[float, str | None]:
    data = os.urandom(1 << 20)
    times = []
    try:
        for number in range(5):
            path = os.path.join(folder, f"fsync-{number}")
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, data)
                began = time.perf_counter()
                os.fsync(fd)
                times.append(time.perf_counter() - began)
            finally:
                os.close(fd)
        fsync_dir(folder)
    except OSError as error:
        return 0.0, error.strerror or str(error)
    return statistics.median(times), None


def _takes_direct(folder: str) -> bool:
    try:
        os.close(os.open(os.path.join(folder, "direct"), os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600))
        return True
    except OSError as error:
        return error.errno not in (errno.EINVAL, errno.ENOTSUP)


# ---------------------------------------------------------------------- time and room


def check_time(backend: Backend, settings: Settings, grace_s: float, size: int | None) -> Iterator[Finding]:
    """Whether a save fits into the grace period, by what was measured."""
    newest = _newest(backend)
    measured, how = None, ""
    if size is not None and isinstance(backend, LocalBackend):
        try:
            speed = _measure_speed(backend, min(size, _TRIAL))
        except (StoreError, OSError) as error:
            yield Finding(ERROR, "grace", f"a trial write failed: {error}", "saves would fail too", "see above")
            return
        measured, how = size / speed, f"{human_bytes(size)} at the measured {human_bytes(speed)}/s"
    elif newest:
        slowest = max(newest, key=_seconds_of)
        measured = _seconds_of(slowest)
        how = f"{slowest.name}, {human_bytes(slowest.manifest.size)}"
        if size is not None:
            measured *= max(1.0, size / max(1, slowest.manifest.size))
    if measured is None:
        yield Finding(OK, "grace", "no checkpoint yet; --size 2GB measures how long a save of that size takes here")
        return
    needed = measured + _MARGIN_S
    told = f"a save takes {human_seconds(measured)} ({how}), the grace period is {human_seconds(grace_s)}"
    do = "raise HOLDFAST_GRACE_PERIOD together with the scheduler's own, save to a faster location, or set a fallback"
    if needed > grace_s:
        yield Finding(ERROR, "grace", told, "a preemption would come before the save is committed", do)
    elif needed > grace_s / 2:
        yield Finding(WARNING, "grace", told, "a disk that is half as fast for once would not finish in time", do)
    else:
        yield Finding(OK, "grace", told)


def _seconds_of(checkpoint: Checkpoint) -> float:
    timings = checkpoint.manifest.timings
    return sum(timings.get(name, 0.0) for name in ("write_s", "gather_s"))


def _newest(backend: Backend, most: int = 10) -> list[Checkpoint]:
    try:
        return [checkpoint for checkpoint, _ in zip(whole([backend]), range(most), strict=False)]
    except StoreError:
        return []


def _measure_speed(backend: LocalBackend, size: int) -> float:
    """Bytes a second, written as a checkpoint is written."""
    import mmap

    folder = nearest_folder(backend.root)
    path = os.path.join(folder, f".holdfast-doctor-{secrets.token_hex(4)}")
    chunk = memoryview(mmap.mmap(-1, _CHUNK))
    chunk[:] = os.urandom(1 << 20) * (_CHUNK >> 20)
    try:
        sink = LocalSink(path, size)
        began = time.monotonic()
        try:
            for offset in range(0, size, _CHUNK):
                sink.write(chunk[: min(_CHUNK, size - offset)])
            sink.finish()
        except BaseException:
            sink.abort()
            raise
        return size / max(1e-6, time.monotonic() - began)
    finally:
        if os.path.exists(path):
            os.unlink(path)


def check_room(backend: Backend, settings: Settings, size: int | None) -> Iterator[Finding]:
    free = backend.free_bytes()
    newest = _newest(backend)
    one = size or (newest[0].manifest.size if newest else None)
    if free is None or one is None:
        return
    missing = max(0, settings.keep + 1 - len(newest)) * one
    told = f"{human_bytes(free)} free at {backend.uri}, a checkpoint takes {human_bytes(one)}, keep={settings.keep}"
    if free < one:
        means, severity = "the next save fails", ERROR
    elif free < missing:
        means, severity = f"there is no room for keep + 1 = {settings.keep + 1} checkpoints", WARNING
    else:
        yield Finding(OK, "room", told)
        return
    yield Finding(severity, "room", told, means, "free room, lower HOLDFAST_KEEP, or use another location")


# ---------------------------------------------------------------------- this machine


def check_torchrun(environ: dict[str, str], grace_s: float, *, supervised: bool) -> Iterator[Finding]:
    text = environ.get(_SHUTDOWN, "")
    try:
        limit_s = float(text) if text else _TORCHRUN_S
    except ValueError:
        yield Finding(ERROR, "torchrun", f"{_SHUTDOWN}={text!r}", "torchrun does not start", "give whole seconds")
        return
    if grace_s <= limit_s or supervised:
        how = "holdfast run raises its limit" if supervised else f"torchrun gives workers {limit_s:g} s"
        yield Finding(OK, "torchrun", f"{how}, the grace period is {grace_s:g} s")
        return
    yield Finding(
        WARNING,
        "torchrun",
        f"torchrun kills workers {limit_s:g} s after SIGTERM, the grace period is {grace_s:g} s",
        "a save that takes longer is cut off; after a peer has died the limit is 30 s whatever is set",
        f"start with holdfast run, or set {_SHUTDOWN}={grace_s + 5:.0f}",
    )


def check_shared_memory(path: str = "/dev/shm") -> Iterator[Finding]:
    do = "mount a tmpfs there; in Kubernetes an emptyDir with medium: Memory, in Docker --shm-size"
    if not os.path.isdir(path) or not os.access(path, os.W_OK):
        yield Finding(
            WARNING,
            "shared_memory",
            f"{path} is missing or cannot be written",
            "a rank that is killed leaves its random state in the temporary folder, which is slower",
            do,
        )
        return
    stat = os.statvfs(path)
    free = stat.f_bavail * stat.f_frsize
    if free < _LEAST_SHM:
        means = "ranks and loader workers may fail to start"
        yield Finding(WARNING, "shared_memory", f"{path} has {human_bytes(free)} left", means, do)
    else:
        yield Finding(OK, "shared_memory", f"{path} has {human_bytes(free)} left")


# ---------------------------------------------------------------------- the run's history


def check_history(run: RunPlace, *, live: bool) -> Iterator[Finding]:
    events = run.journal()
    last = max((event.get("attempt") or 0 for event in events if event["event"] == "attempt"), default=0)
    recent = [event for event in events if event.get("attempt") == last]
    for event in recent:
        if event["event"] == "handler_replaced":
            yield Finding(
                ERROR,
                "handler",
                f"attempt {last}: the signal handler was replaced ({event.get('by', 'unknown')})",
                "a preemption is not noticed, and nothing is saved for it",
                "create holdfast.Run after that library is set up",
            )
            break
    failed = [event for event in recent if event["event"] in ("save_failed", "unusable")]
    if failed:
        yield Finding(
            WARNING,
            "saves",
            f"attempt {last}: {len(failed)} saves or loads failed, the last: {failed[-1].get('error', '')}",
            "an older checkpoint would be used",
            "see the error",
        )
    yield from _check_clock(events)
    rows, _ = all_rows(run)
    leftover = [row["name"] for row in rows if row["state"] == UNFINISHED]
    if leftover and not live:
        yield Finding(
            WARNING,
            "unfinished",
            f"{len(leftover)} checkpoints were never committed: {', '.join(leftover[:3])}",
            "they take room and are never loaded; the next start removes them",
            f"holdfast prune {run.location} --unfinished",
        )
    damaged = [row for row in rows if row["state"] == DAMAGED]
    if damaged:
        yield Finding(
            ERROR,
            "damaged",
            f"{damaged[0]['problem']}",
            "it is skipped on resume, and steps are lost",
            f"holdfast verify {run.location}",
        )


def _check_clock(events: list[dict[str, Any]]) -> Iterator[Finding]:
    back = max((a["t"] - b["t"] for a, b in itertools.pairwise(events)), default=0.0)
    ahead = max((event["t"] for event in events), default=0.0) - time.time()
    if back > 2.0 or ahead > 5.0:
        told = f"times in the journal go back by {back:.1f} s" if back > 2.0 else f"its times lie {ahead:.0f} s ahead"
        yield Finding(
            WARNING,
            "clock",
            told,
            "clocks of the hosts differ, or one was set: shown times and goodput are less exact; no decision depends "
            "on them",
            "synchronise the clocks",
        )
