"""The training of ``peer_ray.py``: one loop, bare for holdfast, or with what Ray's documentation asks a user to write.

``--recipe``: ``get_preemption_info()`` after every step, a checkpoint when it tells of a preemption, one at the end of
every epoch, and the code to load them and to skip what was trained already.
"""

import argparse
import hashlib
import itertools
import json
import os
import tempfile
import time

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset


def train_func(config):
    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank = context.get_world_rank()
    torch.manual_seed(5 + rank)
    width = config["width"]
    model = prepare_model(
        torch.nn.Sequential(
            torch.nn.Linear(32, width), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(config["samples"], 32, generator=torch.Generator().manual_seed(1))
    loader = prepare_data_loader(DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=8, shuffle=True))
    step = first_epoch = trained_batches = 0
    saved_on_preemption = False

    def save(epoch, batches):
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"step": step, "epoch": epoch, "batches": batches}
                torch.save(state, os.path.join(folder, "state.pt"))
            checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report({"step": step}, checkpoint=checkpoint)
        note(f"saved {step}")

    def note(text):
        with open(os.path.join(config["out"], f"steps-{rank}"), "a") as file:
            file.write(f"{time.time()} {os.getpid()} {ray.get_runtime_context().get_node_id()} {text}\n")

    if config["recipe"] and (checkpoint := ray.train.get_checkpoint()):
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, first_epoch, trained_batches = state["step"], state["epoch"], state["batches"]
    began = time.perf_counter()
    for epoch in range(first_epoch, config["epochs"]):
        loader.sampler.set_epoch(epoch)
        for index, (inputs, targets) in enumerate(itertools.islice(loader, trained_batches, None), trained_batches):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == config["warm_up"]:
                began = time.perf_counter()
            if config["step_s"]:
                time.sleep(config["step_s"])
                note(f"step {step}")
            if config["recipe"] and ray.train.get_preemption_info() is not None and not saved_on_preemption:
                saved_on_preemption = True
                save(epoch, index + 1)
        trained_batches = 0
        if config["recipe"]:
            save(epoch + 1, 0)
    seconds = time.perf_counter() - began
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    result = {"digest": digest.hexdigest(), "step_ms": 1000 * seconds / max(1, step - config["warm_up"])}
    with open(os.path.join(config["out"], f"result-{rank}.json"), "w") as file:
        json.dump(result, file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--recipe", action="store_true")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=800)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--warm-up", type=int, default=0)
    options = parser.parse_args()
    ray.init(address=options.address)
    TorchTrainer(
        train_func,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=options.name, storage_path=options.storage, failure_config=FailureConfig(max_failures=0)
        ),
    ).fit()


if __name__ == "__main__":
    main()
