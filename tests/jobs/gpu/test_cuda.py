"""The same promises with the model on a GPU."""

from __future__ import annotations

import time

import pytest

from tests.jobs.torch import drill
from tests.jobs.torch.checks import uninterrupted
from tests.kit.checks import assert_whole

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU and a CUDA build of torch", allow_module_level=True)


@pytest.mark.parametrize("world", [1, 2])
def test_sigterm_loses_nothing_and_resume_is_exact(server, tmp_path, world):
    faults = [{"rank": world - 1, "step": 9, "phase": "backward"}]
    spec = drill.Spec(str(tmp_path / "run"), world, device="cuda", save_every="4 steps", faults=faults)
    outcome = server.run(spec, 120)
    assert set(outcome.codes) == {143}, outcome.log
    assert assert_whole(spec.dir).step >= 9
    resumed = server.run(drill.Spec(**{**vars(spec), "faults": []}), 120)
    assert resumed.digest == uninterrupted(server, spec).digest


@pytest.mark.parametrize("phase", ["forward", "optimizer"])
def test_survivors_of_a_killed_rank_save_its_cuda_random_state_too(server, tmp_path, phase):
    faults = [{"rank": 1, "step": 9, "phase": phase, "action": "KILL"}]
    spec = drill.Spec(str(tmp_path / "run"), 2, device="cuda", faults=faults)
    outcome = server.run(spec, 120)
    assert outcome.codes[1] == -9
    newest = assert_whole(spec.dir)
    assert newest.step >= 8
    assert not newest.manifest.inexact
    resumed = server.run(drill.Spec(**{**vars(spec), "faults": []}), 120)
    assert resumed.digest == uninterrupted(server, spec).digest


def test_a_periodic_save_holds_the_state_of_its_boundary_although_training_went_on(server, tmp_path):
    faults = [{"rank": 0, "step": 15, "phase": "optimizer", "action": "KILL"}]
    spec = drill.Spec(str(tmp_path / "run"), 1, device="cuda", width=4096, save_every="4 steps", faults=faults)
    server.run(spec, 120)
    newest = assert_whole(spec.dir)
    assert newest.manifest.reason == "periodic"
    resumed = server.run(drill.Spec(**{**vars(spec), "faults": []}), 120)
    assert resumed.results[0]["first"] == newest.step
    assert resumed.digest == uninterrupted(server, spec).digest


def test_the_program_does_not_wait_for_the_copy_to_the_host():
    from holdfast.staging.arena import Arena
    from holdfast.staging.images import TensorImage

    tensors = {f"t{index}": torch.randn(64 << 20, device="cuda") for index in range(4)}
    image = TensorImage("model.safetensors", tensors)
    arena = Arena()
    pinned = torch.empty(image.size, dtype=torch.uint8, pin_memory=True)
    flat = torch.empty(image.size, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        staged = arena.stage([image])[0]
        returned = time.perf_counter() - began
        torch.cuda.synchronize()
        done = time.perf_counter() - began
        began = time.perf_counter()
        pinned.copy_(flat, non_blocking=True)
        torch.cuda.synchronize()
        raw = time.perf_counter() - began
        print(
            f"{image.size >> 20} MiB: stage() returned after {returned * 1e3:.1f} ms, copied after {done * 1e3:.1f} "
            f"ms, a raw pinned copy takes {raw * 1e3:.1f} ms ({done / raw:.2f}x)"
        )
    assert returned < done
    before = tensors["t0"].clone()
    arena.stage([image])
    tensors["t0"].zero_()  # queued behind the copy
    chunk = next(iter(staged.chunks(None)))
    torch.cuda.synchronize()
    first = torch.frombuffer(chunk, dtype=torch.uint8)[len(image.header) :][:4096].view(torch.float32)
    assert torch.equal(first, before.flatten()[:1024].cpu())
