"""An ordinary Ray Train script that saves, reports and loads checkpoints of its own at the end of every epoch."""

import argparse
import hashlib
import json
import os
import tempfile
import time

import ray
import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    """Samples with random augmentation."""

    def __init__(self, size, seed, noise):
        self.noise = noise
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True).sin()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return x + self.noise * torch.randn(8) if self.noise else x, self.y[index]


def wait_at(config, gate):
    """Stop where the test wants to find the training, until it opens the gate."""
    while gate in config["gates"] and not os.path.exists(os.path.join(config["out"], f"gate-{gate}")):
        time.sleep(0.01)


def train_func(config):
    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank = context.get_world_rank()
    torch.manual_seed(11 + rank)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
    )
    model = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    noise, workers = config["noise"], config["loader_workers"]
    loader = DataLoader(Noisy(config["samples"], 1, noise), batch_size=4, shuffle=True, num_workers=workers)
    loader = prepare_data_loader(loader)
    validation = DataLoader(Noisy(16, 2, noise), batch_size=8)
    accumulate = 2
    steps = config["epochs"] * (len(loader) // accumulate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)
    step, first_epoch, best = 0, 0, float("inf")
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        step, first_epoch, best = state["step"], state["epoch"] + 1, state["best"]
        torch.manual_seed(1000 * first_epoch + rank)
    with open(os.path.join(config["out"], f"starts-{rank}"), "a") as file:
        file.write(f"{first_epoch}\n")
    log = os.path.join(config["out"], f"steps-{rank}")
    for epoch in range(first_epoch, config["epochs"]):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        model.train()
        for index, (x, y) in enumerate(loader):
            loss = torch.nn.functional.mse_loss(model(x), y)
            (loss / accumulate).backward()
            if (index + 1) % accumulate:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            with open(log, "a") as file:
                file.write(f"{step} {os.getpid()} {ray.get_runtime_context().get_node_id()}\n")
            wait_at(config, str(step))
        model.eval()
        with torch.no_grad():
            losses = [torch.nn.functional.mse_loss(model(x), y).item() for x, y in validation]
            wait_at(config, f"evaluation-{epoch}")
        mean = torch.tensor(sum(losses) / len(losses), dtype=torch.float64)
        torch.distributed.all_reduce(mean)  # its checkpoint has one best value, for all workers
        best = min(best, mean.item())
        torch.manual_seed(1000 * (epoch + 1) + rank)
        metrics = {"epoch": epoch, "validation_loss": sum(losses) / len(losses)}
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"scheduler": scheduler.state_dict(), "step": step, "epoch": epoch, "best": best}
                torch.save(state, os.path.join(folder, "state.pt"))
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)
    digest = hashlib.sha256()
    for tensors in (model.state_dict(), *optimizer.state_dict()["state"].values()):
        for value in tensors.values():
            digest.update(value.numpy().tobytes())
    result = {
        "digest": digest.hexdigest(),
        "steps": step,
        "best": best,
        "lr": scheduler.get_last_lr()[0],
        "next_random": torch.rand(1).item(),
    }
    with open(os.path.join(config["out"], f"result-{rank}.json"), "w") as file:
        json.dump(result, file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    parser.add_argument("--out", required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--name")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--loader-workers", type=int, default=1)
    parser.add_argument("--noise", type=float, default=0.01)
    parser.add_argument("--gates", nargs="*", default=[])
    parser.add_argument("--max-failures", type=int, default=0)
    options = parser.parse_args()
    ray.init(address=options.address)
    trainer = TorchTrainer(
        train_func,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage,
            checkpoint_config=CheckpointConfig(num_to_keep=1),
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
