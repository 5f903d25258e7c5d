"""Images of what a framework wanted to save are, byte for byte or tensor for tensor, what it would have written."""

from __future__ import annotations

import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.staging.arena import Arena
from holdfast.store.pipeline import ChunkPool
from holdfast.torch.capture import FileImage, archive, capturing, images


def content(image) -> bytes:
    pool = ChunkPool()
    found = b""
    for chunk in image.chunks(pool):
        found += bytes(chunk)
        pool.give_back(chunk)
    assert len(found) == image.size
    return found


def example() -> dict:
    large = torch.randn(300_000)
    return {
        "state": {0: {"exp_avg": large, "view": large[1000:2000], "step": torch.tensor(3.0)}},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}],
        "strided": torch.randn(400, 300).t(),
        "bfloat": torch.randn(50_000).bfloat16(),
        "text": "x" * 100_000,
        "empty": torch.empty(0),
    }


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_an_archive_is_what_torch_writes_apart_from_its_sum(tmp_path):
    value = example()
    crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(value, tmp_path / "archive.pt")
    finally:
        torch.serialization.set_crc32_options(crc)
    assert len(content(archive("archive.pt", value))) == (tmp_path / "archive.pt").stat().st_size
    (tmp_path / "ours.pt").write_bytes(content(archive("ours.pt", value)))
    loaded = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert same(loaded, value)
    shared = loaded["state"][0]
    assert shared["view"].untyped_storage().data_ptr() == shared["exp_avg"].untyped_storage().data_ptr()


def test_an_archive_refers_to_live_tensors_until_it_is_staged():
    value = {"a": torch.zeros(100_000)}
    live = archive("a.pt", value)
    arena = Arena()
    staged = live.staged(arena)
    before = content(staged)
    value["a"].fill_(1.0)
    assert content(staged) == before
    assert content(live) != before


def test_small_archives_keep_their_sums_and_can_be_unpacked(tmp_path):
    import zipfile

    (tmp_path / "small.pt").write_bytes(content(archive("small.pt", {"a": torch.arange(10), "b": 1})))
    assert zipfile.ZipFile(tmp_path / "small.pt").testzip() is None


@pytest.mark.parametrize("staged", [False, True])
def test_what_is_saved_below_the_folder_is_captured_and_nothing_else(tmp_path, staged):
    folder, elsewhere = tmp_path / "scratch", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    value, weights = example(), {"w": torch.randn(70_000), "b": torch.randn(3)}
    with capturing(str(folder)) as captured:
        torch.save(value, folder / "optimizer.pt")
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
        torch.save(value, elsewhere / "other.pt")
        (folder / "config.json").write_text("{}")
        (folder / "nested").mkdir()
        (folder / "nested/tokens.txt").write_text("a b")
        with open(folder / "stream.pt", "wb") as file:
            torch.save({"c": 1}, file)
    assert not (folder / "optimizer.pt").exists()
    assert not (folder / "model.safetensors").exists()
    assert (elsewhere / "other.pt").exists()
    found = {image.path: image for image in images(captured, None, Arena() if staged else None)}
    assert sorted(found) == ["config.json", "model.safetensors", "nested/tokens.txt", "optimizer.pt", "stream.pt"]
    for path, image in found.items():
        target = tmp_path / "written" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content(image))
    assert same(torch.load(tmp_path / "written/optimizer.pt", weights_only=True), value)
    assert same(load_file(tmp_path / "written/model.safetensors"), weights)
    assert torch.load(tmp_path / "written/stream.pt", weights_only=True) == {"c": 1}


def test_other_threads_save_as_ever(tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    with capturing(str(folder)) as captured:
        thread = threading.Thread(target=torch.save, args=({"a": 1}, folder / "theirs.pt"))
        thread.start()
        thread.join()
        torch.save({"a": 2}, folder / "ours.pt")
    assert (folder / "theirs.pt").exists()
    assert list(captured.pickled) == ["ours.pt"]
    assert torch.save.__module__ == "torch.serialization"


def test_an_object_may_be_replaced_by_another(tmp_path):
    with capturing(str(tmp_path), lambda path, value: {"instead": path}) as captured:
        torch.save({"a": 1}, tmp_path / "x/y.pt")
    assert captured.pickled == {"x/y.pt": {"instead": "x/y.pt"}}


def test_what_safetensors_would_refuse_it_refuses_here_too(tmp_path):
    shared = torch.randn(4, 4).t()
    with capturing(str(tmp_path)), pytest.raises(ValueError):
        save_file({"w": shared}, str(tmp_path / "model.safetensors"))


def test_a_large_file_is_read_when_it_is_written(tmp_path):
    path = tmp_path / "large.bin"
    data = bytes(range(256)) * 50_000
    path.write_bytes(data)
    assert content(FileImage("large.bin", str(path), None)) == data
