"""From live tensors to a committed checkpoint, checksums included, against a raw write and against others.

All write the same state to the same disk, and all end with an fsync.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import flash
from bench import Bench, Row, Saves, Times, compare, fsync_file, in_turn, ratio, raw_write, seconds, settle, transformer

State = Callable[[], dict[str, Any]]


def measure(bench: Bench) -> list[Row]:
    model, optimizer = transformer(bench.size)
    saves = Saves(bench.path("holdfast"), model, optimizer)
    size = saves.write().size
    settle(saves.backend.root)
    target = bench.path("other")

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    # Each removes at once what it wrote: whoever comes next finds the disk as all others do.
    def raw(direct: bool) -> Callable[[], float]:
        def write() -> float:
            took = raw_write(target, size, direct=direct)
            settle(target)
            return took

        return write

    def holdfast() -> float:
        began = time.perf_counter()
        saves.write()
        took = time.perf_counter() - began
        settle(os.path.join(saves.backend.root, f"checkpoint-{saves.loop.step}"))
        return took

    def library(save: Callable[[str, State], None]) -> Callable[[], float]:
        def write() -> float:
            os.mkdir(target)
            began = time.perf_counter()
            save(target, state)
            took = time.perf_counter() - began
            settle(target)
            return took

        return write

    libraries = {"torch.save + fsync": _torch_save, "DCP": _dcp, "safetensors + fsync": _safetensors}
    contestants: dict[str, Callable[[], float]] = {"raw": raw(True), "holdfast": holdfast, "buffered": raw(False)}
    contestants |= {name: library(save) for name, save in libraries.items()}
    with flash.flash(bench.path("flash"), state) as save:
        if save is not None:
            contestants["DLRover flash checkpoint"] = save
        times = in_turn(bench.rounds(7, 3), contestants)
    rows = [
        compare("time to durable / raw direct write + fsync", times, "holdfast", "raw", 1.15),
        compare("time to durable / raw buffered write + fsync", times, "holdfast", "buffered", 1.15),
        *(_faster(times, name) for name in times if name not in ("raw", "holdfast", "buffered")),
    ]
    if save is None:
        rows.append(Row("time to durable / DLRover flash checkpoint", f"not installed: {flash.INSTALL}"))
    rows[0].values["bytes"] = size
    return rows


def _faster(times: Times, name: str) -> Row:
    found = ratio(times, "holdfast", name)
    return Row(
        f"time to durable / {name}",
        f"{found:.2f} × ({seconds(times['holdfast'])} / {seconds(times[name])})",
        "< 1 ×",
        found < 1,
        {"ratio": found, name: times[name]},
    )


def _torch_save(folder: str, state: State) -> None:
    import torch

    path = os.path.join(folder, "state.pt")
    torch.save(state(), path)
    fsync_file(path)


def _dcp(folder: str, state: State) -> None:
    import torch.distributed.checkpoint as dcp

    # Its writer fsyncs each file.
    writer = dcp.FileSystemWriter(folder, thread_count=2, sync_files=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a single process
        dcp.save(state(), storage_writer=writer, no_dist=True)


def _safetensors(folder: str, state: State) -> None:
    from safetensors.torch import save_file

    for name, part in state().items():
        path = os.path.join(folder, f"{name}.safetensors")
        save_file(_tensors(part), path)
        fsync_file(path)


def _tensors(tree: Any, name: str = "state") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {key: item for inner, value in tree.items() for key, item in _tensors(value, f"{name}.{inner}").items()}
    return {name: tree} if hasattr(tree, "data_ptr") else {}
