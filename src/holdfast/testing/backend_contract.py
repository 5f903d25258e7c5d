"""What every backend must do: run these tests on yours.

::

    class TestMyBackend(BackendContract):
        @pytest.fixture
        def backend(self, tmp_path):
            return MyBackend(tmp_path)

        def reopen(self, backend):
            return MyBackend(backend.path)
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest
import xxhash

from holdfast.base.process import Owner
from holdfast.errors import CheckpointExistsError, LocationBusyError, StoreError
from holdfast.store.base import MANIFEST, SENTINEL, Backend
from holdfast.store.checkpoints import open_checkpoint, retain, verify, whole
from holdfast.store.manifest import FileEntry, Manifest, checkpoint_name

MIB = 1 << 20


def write_file(backend: Backend, name: str, path: str, data: bytes, chunk: int = 8 * MIB) -> FileEntry:
    """Write one file in chunks through one buffer that is reused, as the pipeline does."""
    sink = backend.create(name, path, len(data))
    buffer = bytearray(min(chunk, len(data)) or 1)
    try:
        for start in range(0, len(data), chunk):
            piece = data[start : start + chunk]
            buffer[: len(piece)] = piece
            sink.write(memoryview(buffer)[: len(piece)])
            buffer[:] = b"\xee" * len(buffer)
        sink.finish()
    except BaseException:
        sink.abort()
        raise
    return FileEntry(path, len(data), str(xxhash.xxh3_128_hexdigest(data)))


def adopt_file(backend: Backend, name: str, source: str, entry: FileEntry) -> FileEntry | None:
    """Take over an unchanged file of the checkpoint ``source``, whose manifest has ``entry``."""
    folder, _, path = (entry.ref or f"{source}/{entry.path}").partition("/")
    extra = backend.adopt(name, entry.path, folder, path)
    return None if extra is None else FileEntry(entry.path, entry.size, entry.checksum, extra.get("ref"))


def manifest_for(step: int, entries: Iterable[FileEntry], reason: str = "periodic") -> Manifest:
    return Manifest(
        step=step,
        reason=reason,
        world_size=1,
        files=tuple(entries),
        created="2000-01-01T00:00:00Z",
        run="contract",
        attempt=1,
    )


def save_checkpoint(
    backend: Backend, step: int, files: Mapping[str, bytes], *, unchanged_since: Manifest | None = None
) -> Manifest:
    """A whole save by one rank. Files equal to those of ``unchanged_since`` are adopted where that is possible."""
    name = checkpoint_name(step)
    known = {entry.path: entry for entry in unchanged_since.files} if unchanged_since is not None else {}
    backend.begin(name)
    entries = []
    for path, data in files.items():
        entry = None
        same = path in known and known[path].checksum == xxhash.xxh3_128_hexdigest(data)
        if unchanged_since is not None and same:
            entry = adopt_file(backend, name, unchanged_since.name, known[path])
        entries.append(entry or write_file(backend, name, path, data))
    manifest = manifest_for(step, entries)
    backend.commit(name, manifest.encode())
    return manifest


def read_file(backend: Backend, name: str, path: str, size: int) -> bytes:
    """A file as it is stored; one byte more is asked for than should be there."""
    buffer = bytearray(size + 1)
    count = backend.read_into(name, path, 0, memoryview(buffer))
    return bytes(buffer[:count])


def read_back(backend: Backend, manifest: Manifest) -> dict[str, bytes]:
    """All files of a checkpoint."""
    found = {}
    for entry in manifest.files:
        folder, _, path = (entry.ref or f"{manifest.name}/{entry.path}").partition("/")
        found[entry.path] = read_file(backend, folder, path, entry.size)
    return found


def sample(seed: object, size: int) -> bytes:
    """Bytes that are the same for the same seed."""
    return random.Random(repr(seed)).randbytes(size)


class BackendContract:
    """Everything that the docstrings of :class:`holdfast.store.Backend` promise."""

    restart_displaces = True
    """Whether another process of the same run takes over from one that seems alive (a lease), or waits for its death
    (a lock of the kernel)."""

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        """An empty place, for one test."""
        raise NotImplementedError

    def reopen(self, backend: Backend) -> Backend:
        """The same place once more, as another process would open it."""
        raise NotImplementedError

    # Visibility

    def test_an_empty_place_holds_nothing(self, backend: Backend) -> None:
        assert backend.names() == []
        assert backend.read_manifest("checkpoint-1") is None
        assert backend.sizes("checkpoint-1") == {}
        assert backend.read_parts("checkpoint-1") == {}
        assert list(whole([backend])) == []
        backend.discard("checkpoint-1")
        backend.set_aside("checkpoint-1")
        backend.release()
        assert backend.names() == []

    def test_a_checkpoint_is_whole_from_its_commit_on_and_not_before(self, backend: Backend) -> None:
        reader = self.reopen(backend)
        backend.begin("checkpoint-5")
        assert reader.names() == ["checkpoint-5"]
        assert SENTINEL in reader.sizes("checkpoint-5")
        entry = write_file(backend, "checkpoint-5", "model.bin", b"weights")
        manifest = manifest_for(5, [entry])
        assert reader.read_manifest("checkpoint-5") is None
        assert list(whole([reader])) == []
        backend.commit("checkpoint-5", manifest.encode())
        assert reader.read_manifest("checkpoint-5") == manifest.encode()
        assert reader.sizes("checkpoint-5") == {"model.bin": 7, MANIFEST: len(manifest.encode())}
        assert [checkpoint.step for checkpoint in whole([reader])] == [5]

    def test_the_newest_whole_one_comes_first(self, backend: Backend) -> None:
        for step in (5, 100, 20):
            save_checkpoint(backend, step, {"a": sample(step, 10)})
        backend.begin("checkpoint-200")
        write_file(backend, "checkpoint-200", "a", b"half")
        found = list(whole([self.reopen(backend)]))
        assert [checkpoint.step for checkpoint in found] == [100, 20, 5]
        assert sorted(backend.names()) == ["checkpoint-100", "checkpoint-20", "checkpoint-200", "checkpoint-5"]
        assert [verify(checkpoint) for checkpoint in found] == [[], [], []]

    def test_what_is_no_checkpoint_is_not_named(self, backend: Backend) -> None:
        backend.acquire(Owner("contract"))
        others = ("checkpoint-x", "checkpoint-", "checkpoint-05", "checkpoint-٣", "xcheckpoint-1", "logs")
        for name in others:
            backend.begin(name)
            write_file(backend, name, "file", b"1")
        save_checkpoint(backend, 7, {"a": b"1"})
        assert backend.names() == ["checkpoint-7"]
        backend.release()

    def test_names_do_not_mix_with_those_they_begin(self, backend: Backend) -> None:
        save_checkpoint(backend, 1, {"a": b"one"})
        save_checkpoint(backend, 10, {"a": b"ten", "b": b"ten"})
        assert set(backend.sizes("checkpoint-1")) == {"a", MANIFEST}
        backend.discard("checkpoint-1")
        assert [checkpoint.step for checkpoint in whole([backend])] == [10]
        assert verify(next(whole([backend]))) == []

    def test_ranks_may_begin_the_same_folder_each(self, backend: Backend) -> None:
        backend.begin("checkpoint-1")
        entry = write_file(backend, "checkpoint-1", "rank0", b"0")
        other = self.reopen(backend)
        other.begin("checkpoint-1")
        entries = [entry, write_file(other, "checkpoint-1", "rank1", b"1")]
        backend.commit("checkpoint-1", manifest_for(1, entries).encode())
        assert verify(next(whole([backend]))) == []

    def test_a_whole_checkpoint_is_not_begun_again(self, backend: Backend) -> None:
        manifest = save_checkpoint(backend, 3, {"a": b"first"})
        with pytest.raises(CheckpointExistsError):
            self.reopen(backend).begin("checkpoint-3")
        assert backend.read_manifest("checkpoint-3") == manifest.encode()
        assert read_back(backend, manifest) == {"a": b"first"}

    def test_a_whole_checkpoint_is_not_committed_again(self, backend: Backend) -> None:
        manifest = save_checkpoint(backend, 3, {"a": b"first"})
        with pytest.raises(CheckpointExistsError):
            self.reopen(backend).commit("checkpoint-3", manifest_for(3, [], reason="final").encode())
        assert backend.read_manifest("checkpoint-3") == manifest.encode()

    def test_a_manifest_is_amended_while_the_checkpoint_stays_whole(self, backend: Backend) -> None:
        manifest = save_checkpoint(backend, 3, {"a": b"first"})
        amended = manifest_for(3, manifest.files, reason="final")
        backend.amend("checkpoint-3", amended.encode())
        assert self.reopen(backend).read_manifest("checkpoint-3") == amended.encode()
        assert verify(next(whole([backend]))) == []

    # Content

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 * 4096, MIB - 1])
    def test_a_file_comes_back_byte_for_byte(self, backend: Backend, size: int) -> None:
        data = sample(size, size)
        manifest = save_checkpoint(backend, 1, {"file": data})
        assert backend.sizes("checkpoint-1")["file"] == size
        assert read_back(self.reopen(backend), manifest) == {"file": data}
        assert verify(next(whole([backend]))) == []

    def test_a_file_of_several_chunks_comes_back(self, backend: Backend) -> None:
        data = sample("large", 17 * MIB + 3)
        manifest = save_checkpoint(backend, 1, {"large": data})
        assert read_back(backend, manifest)["large"] == data
        assert verify(next(whole([backend]))) == []

    def test_chunks_of_any_length_make_up_a_file(self, backend: Backend) -> None:
        data = sample("odd", 300_000)
        backend.begin("checkpoint-1")
        sink = backend.create("checkpoint-1", "odd", len(data))
        chooser, start = random.Random(1), 0
        while start < len(data):
            length = chooser.choice((1, 7, 4096, 5000, 8192, 65536))
            sink.write(memoryview(data)[start : start + length])
            start += length
        sink.finish()
        assert read_file(backend, "checkpoint-1", "odd", len(data)) == data

    def test_paths_may_be_nested_and_hold_any_letters(self, backend: Backend) -> None:
        files = {
            path: sample(path, 100)
            for path in (
                "model.safetensors",
                "optimizer/rank-0/state.bin",
                "optimizer/rank-1/state.bin",
                "a b/c+d=e&f,g.txt",
                "percent%20and#hash?",
                "größe/日本語.bin",
                ".hidden",
                "it's [1] {2} (3)~!@^;",
            )
        }
        manifest = save_checkpoint(backend, 1, files)
        assert set(backend.sizes("checkpoint-1")) == {*files, MANIFEST}
        assert read_back(self.reopen(backend), manifest) == files

    def test_any_range_of_a_file_can_be_read(self, backend: Backend) -> None:
        data = sample("ranges", 100_000)
        save_checkpoint(backend, 1, {"file": data})
        chooser = random.Random(2)
        ranges = [(0, 100_000), (99_999, 1), (50, 0), *((chooser.randrange(100_000), 5000) for _ in range(10))]
        for offset, length in ranges:
            buffer = bytearray(length)
            expected = data[offset : offset + length]
            assert backend.read_into("checkpoint-1", "file", offset, memoryview(buffer)) == len(expected)
            assert bytes(buffer[: len(expected)]) == expected

    def test_a_read_is_short_only_at_the_end(self, backend: Backend) -> None:
        save_checkpoint(backend, 1, {"file": b"0123456789", "empty": b""})
        buffer = bytearray(100)
        assert backend.read_into("checkpoint-1", "file", 6, memoryview(buffer)) == 4
        assert buffer[:4] == b"6789"
        assert backend.read_into("checkpoint-1", "file", 10, memoryview(buffer)) == 0
        assert backend.read_into("checkpoint-1", "file", 1000, memoryview(buffer)) == 0
        assert backend.read_into("checkpoint-1", "empty", 0, memoryview(buffer)) == 0

    def test_reading_what_is_not_there_says_so(self, backend: Backend) -> None:
        save_checkpoint(backend, 1, {"file": b"1"})
        for name, path in (("checkpoint-1", "other"), ("checkpoint-2", "file")):
            with pytest.raises(StoreError) as raised:
                backend.read_into(name, path, 0, memoryview(bytearray(10)))
            assert raised.value.errno == errno.ENOENT
            assert f"{name}/{path}" in str(raised.value)

    def test_a_file_that_is_given_up_does_not_count(self, backend: Backend) -> None:
        backend.begin("checkpoint-1")
        sink = backend.create("checkpoint-1", "file", 3 * MIB)
        sink.write(memoryview(bytes(MIB)))
        sink.abort()
        sink.abort()
        assert backend.read_manifest("checkpoint-1") is None
        entry = write_file(backend, "checkpoint-1", "file", b"second try")
        backend.commit("checkpoint-1", manifest_for(1, [entry]).encode())
        assert verify(next(whole([backend]))) == []

    def test_giving_up_a_finished_file_does_nothing(self, backend: Backend) -> None:
        backend.begin("checkpoint-1")
        sink = backend.create("checkpoint-1", "file", 4)
        sink.write(memoryview(b"done"))
        sink.finish()
        sink.abort()
        assert read_file(backend, "checkpoint-1", "file", 4) == b"done"

    def test_a_save_goes_over_what_a_dead_one_left(self, backend: Backend) -> None:
        backend.begin("checkpoint-1")
        write_file(backend, "checkpoint-1", "file", b"a longer file of a writer that died")
        write_file(backend, "checkpoint-1", "other", b"and one more")
        again = self.reopen(backend)
        manifest = save_checkpoint(again, 1, {"file": b"short"})
        assert read_back(again, manifest) == {"file": b"short"}
        assert verify(next(whole([again]))) == []

    # Files that did not change

    def test_an_adopted_file_is_there_without_being_written(self, backend: Backend) -> None:
        first = save_checkpoint(backend, 1, {"frozen": b"same", "moving": b"1"})
        second = save_checkpoint(backend, 2, {"frozen": b"same", "moving": b"2"}, unchanged_since=first)
        third = save_checkpoint(backend, 3, {"frozen": b"same", "moving": b"3"}, unchanged_since=second)
        for manifest, moving in ((first, b"1"), (second, b"2"), (third, b"3")):
            assert read_back(self.reopen(backend), manifest) == {"frozen": b"same", "moving": moving}
        assert [verify(checkpoint) for checkpoint in whole([backend])] == [[], [], []]
        refs = {entry.ref for entry in (*second.files, *third.files)} - {None}
        assert all(ref == "checkpoint-1/frozen" for ref in refs), "a ref leads to a ref"

    def test_retention_keeps_what_a_kept_checkpoint_adopted(self, backend: Backend) -> None:
        manifest: Manifest | None = None
        for step in range(1, 6):
            files = {"frozen": b"same", "moving": sample(step, 50)}
            manifest = save_checkpoint(backend, step, files, unchanged_since=manifest)
            retain(backend, keep=1)
            found = list(whole([self.reopen(backend)]))
            assert [checkpoint.step for checkpoint in found] == [step]
            assert verify(found[0]) == []
        save_checkpoint(backend, 6, {"frozen": b"changed"})
        retain(backend, keep=1)
        assert backend.names() == ["checkpoint-6"], "what nobody refers to any more is still there"

    def test_what_is_not_there_cannot_be_adopted(self, backend: Backend) -> None:
        save_checkpoint(backend, 1, {"a": b"1"})
        backend.begin("checkpoint-2")
        assert backend.adopt("checkpoint-2", "b", "checkpoint-1", "b") is None
        assert backend.adopt("checkpoint-2", "a", "checkpoint-9", "a") is None

    def test_writing_over_an_adopted_file_leaves_the_original_alone(self, backend: Backend) -> None:
        first = save_checkpoint(backend, 1, {"frozen": b"the original"})
        backend.begin("checkpoint-2")
        assert adopt_file(backend, "checkpoint-2", "checkpoint-1", first.files[0]) is not None
        # The writer dies here; the next one saves the same step, and now the file has changed.
        again = self.reopen(backend)
        second = save_checkpoint(again, 2, {"frozen": b"changed"})
        assert read_back(again, first) == {"frozen": b"the original"}
        assert read_back(again, second) == {"frozen": b"changed"}
        assert [verify(checkpoint) for checkpoint in whole([again])] == [[], []]

    def test_adopting_over_what_a_dead_writer_left(self, backend: Backend) -> None:
        first = save_checkpoint(backend, 1, {"frozen": b"the original"})
        backend.begin("checkpoint-2")
        write_file(backend, "checkpoint-2", "frozen", b"half of something else")
        again = self.reopen(backend)
        second = save_checkpoint(again, 2, {"frozen": b"the original"}, unchanged_since=first)
        assert read_back(again, second) == {"frozen": b"the original"}
        assert verify(next(whole([again]))) == []

    # Parts

    def test_parts_tell_the_ranks_about_each_other(self, backend: Backend) -> None:
        other = self.reopen(backend)
        backend.begin("checkpoint-1")
        backend.put_part("checkpoint-1", "rank-0", b"zero")
        other.put_part("checkpoint-1", "rank-1", b"")
        backend.put_part("checkpoint-1", "rank-0", b"zero, once more")
        assert other.read_parts("checkpoint-1") == {"rank-0": b"zero, once more", "rank-1": b""}
        assert set(backend.sizes("checkpoint-1")) == {SENTINEL}
        backend.commit("checkpoint-1", manifest_for(1, []).encode())
        assert backend.read_parts("checkpoint-1") == {}
        assert set(backend.sizes("checkpoint-1")) == {MANIFEST}

    def test_one_rank_of_many_gets_the_claim(self, backend: Backend) -> None:
        backend.begin("checkpoint-1")
        backends = [self.reopen(backend) for _ in range(8)]
        answers: dict[int, bool] = {}
        start = threading.Barrier(len(backends))

        def claim(rank: int) -> None:
            start.wait()
            # The same bytes from all: who they are must not be judged by what they say.
            answers[rank] = backends[rank].claim_part("checkpoint-1", "leader", b"me")

        _in_threads(claim, range(len(backends)))
        assert sorted(answers.values()) == [False] * 7 + [True]
        assert backend.claim_part("checkpoint-1", "leader", b"late") is False
        assert backend.read_parts("checkpoint-1") == {"leader": b"me"}

    def test_ranks_write_one_checkpoint_together(self, backend: Backend) -> None:
        ranks = [self.reopen(backend) for _ in range(4)]
        parts: dict[int, FileEntry] = {}
        start = threading.Barrier(len(ranks))

        def write(rank: int) -> None:
            start.wait()
            mine = ranks[rank]
            mine.begin("checkpoint-9")
            parts[rank] = write_file(mine, "checkpoint-9", f"shards/rank-{rank}.bin", sample(rank, 200_000))
            mine.put_part("checkpoint-9", f"rank-{rank}", str(rank).encode())

        _in_threads(write, range(len(ranks)))
        assert len(ranks[0].read_parts("checkpoint-9")) == len(ranks)
        ranks[0].commit("checkpoint-9", manifest_for(9, [parts[rank] for rank in range(4)]).encode())
        checkpoint = open_checkpoint(ranks[3], "checkpoint-9")
        assert checkpoint is not None
        assert verify(checkpoint) == []
        for rank in range(4):
            assert read_back(ranks[1], checkpoint.manifest)[f"shards/rank-{rank}.bin"] == sample(rank, 200_000)

    # Removing

    def test_a_removed_checkpoint_is_gone(self, backend: Backend) -> None:
        save_checkpoint(backend, 1, {"a/b/c": b"1", "d": b"2"})
        save_checkpoint(backend, 2, {"d": b"3"})
        backend.begin("checkpoint-3")
        backend.put_part("checkpoint-3", "rank-0", b"0")
        write_file(backend, "checkpoint-3", "a/b", b"half")
        backend.discard("checkpoint-1")
        backend.discard("checkpoint-3")
        again = self.reopen(backend)
        assert again.names() == ["checkpoint-2"]
        assert again.sizes("checkpoint-1") == {}
        assert again.read_parts("checkpoint-3") == {}
        save_checkpoint(again, 1, {"a": b"anew"})

    def test_a_checkpoint_is_not_whole_before_its_first_byte_goes(self, backend: Backend) -> None:
        save_checkpoint(backend, 1, {"a": b"1", "b": b"2"})
        reader = self.reopen(backend)
        seen = []

        def keep(path: str) -> bool:
            seen.append(reader.read_manifest("checkpoint-1"))
            return False

        backend.discard("checkpoint-1", keep)
        assert all(manifest is None for manifest in seen)
        assert backend.names() == []

    def test_what_is_set_aside_is_never_whole_again(self, backend: Backend) -> None:
        save_checkpoint(backend, 1, {"a": b"1"})
        save_checkpoint(backend, 2, {"a": b"2"})
        backend.set_aside("checkpoint-2")
        backend.set_aside("checkpoint-2")
        again = self.reopen(backend)
        assert again.read_manifest("checkpoint-2") is None
        assert [checkpoint.step for checkpoint in whole([again])] == [1]
        manifest = save_checkpoint(again, 2, {"a": b"anew"})
        assert read_back(again, manifest) == {"a": b"anew"}
        assert verify(next(whole([again]))) == []

    # One run at a time

    def test_another_run_is_kept_out_and_told_by_whom(self, backend: Backend) -> None:
        backend.acquire(Owner("first"))
        backend.acquire(Owner("first"))
        with pytest.raises(LocationBusyError) as raised:
            self.reopen(backend).acquire(Owner("second"))
        assert "another run" in str(raised.value)
        backend.release()
        other = self.reopen(backend)
        other.acquire(Owner("second"))
        with pytest.raises(LocationBusyError):
            backend.acquire(Owner("first"))
        other.release()
        other.release()
        backend.acquire(Owner("first"))
        backend.close()

    def test_another_run_may_wait(self, backend: Backend) -> None:
        backend.acquire(Owner("first"))
        with pytest.raises(LocationBusyError):
            self.reopen(backend).acquire(Owner("second"), wait_s=0.2)
        if not self.restart_displaces:
            return  # a lock of the kernel tells processes apart, and this is one process
        threading.Timer(0.3, backend.release).start()
        other = self.reopen(backend)
        began = time.monotonic()
        other.acquire(Owner("second"), wait_s=20.0)
        assert time.monotonic() - began < 10.0
        other.release()

    def test_a_run_that_is_pushed_aside_commits_nothing_more(self, backend: Backend) -> None:
        save_checkpoint(backend, 1, {"a": b"1"})
        backend.acquire(Owner("first"))
        backend.begin("checkpoint-2")
        entry = write_file(backend, "checkpoint-2", "a", b"2")
        other = self.reopen(backend)
        other.acquire(Owner("second"), takeover=True)
        with pytest.raises(LocationBusyError):
            backend.commit("checkpoint-2", manifest_for(2, [entry]).encode())
        assert [checkpoint.step for checkpoint in whole([other])] == [1]
        backend.release()
        with pytest.raises(LocationBusyError):
            self.reopen(backend).acquire(Owner("third"))
        save_checkpoint(other, 3, {"a": b"3"})
        other.release()

    def test_another_rank_of_a_run_that_is_pushed_aside_commits_and_removes_nothing(self, backend: Backend) -> None:
        backend.acquire(Owner("first"))
        grant = backend.grant()
        if not grant:
            pytest.skip("this backend tells the ranks that did not acquire the location nothing (Backend.grant)")
        rank = self.reopen(backend)
        rank.join(grant)
        save_checkpoint(rank, 1, {"a": b"1"})
        rank.begin("checkpoint-2")
        other = self.reopen(backend)
        other.acquire(Owner("second"), takeover=True)
        for one in (backend, rank):
            with pytest.raises(LocationBusyError):
                one.assure()
            with pytest.raises(LocationBusyError):
                one.commit("checkpoint-2", manifest_for(2, []).encode())
            with pytest.raises(LocationBusyError):
                one.discard("checkpoint-1")
            with pytest.raises(LocationBusyError):
                one.set_aside("checkpoint-1")
        other.assure()
        assert [checkpoint.step for checkpoint in whole([other])] == [1]
        backend.release()
        other.release()

    def test_a_restart_of_the_same_run_gets_the_place(self, backend: Backend) -> None:
        backend.acquire(Owner("same"))
        if not self.restart_displaces:
            backend.release()
        other = self.reopen(backend)
        other.acquire(Owner("same"))
        save_checkpoint(other, 1, {"a": b"1"})
        if self.restart_displaces:
            backend.begin("checkpoint-2")
            with pytest.raises(LocationBusyError):
                backend.commit("checkpoint-2", manifest_for(2, []).encode())
        other.release()

    # Words

    def test_room_is_a_number_or_unknown(self, backend: Backend) -> None:
        room = backend.free_bytes()
        assert room is None or room > 0

    def test_the_location_is_named_in_errors(self, backend: Backend) -> None:
        save_checkpoint(backend, 1, {"a": b"1"})
        with pytest.raises(CheckpointExistsError) as raised:
            backend.begin("checkpoint-1")
        assert f"{backend.uri.rstrip('/')}/checkpoint-1" in str(raised.value)
        assert os.linesep not in str(raised.value)


def _in_threads(work: Callable[[int], None], numbers: Iterable[int]) -> None:
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not errors, errors
