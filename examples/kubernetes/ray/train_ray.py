"""An ordinary Ray Train script: a small network on two workers. It has no line about checkpoints or preemption."""

import argparse
import hashlib
import os
import time
from typing import Any

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset


def train_func(config: dict[str, Any]) -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 2)]
    model = prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(800, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader = prepare_data_loader(DataLoader(data, batch_size=8, shuffle=True))
    for epoch in range(config["epochs"]):
        loader.sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(config["step_s"])
        ray.train.report({"epoch": epoch, "loss": loss.item()})
    if ray.train.get_context().get_world_rank() == 0:
        digest = hashlib.sha256()
        for value in model.state_dict().values():
            digest.update(value.cpu().numpy().tobytes())
        with open(os.path.join(config["results"], "digest"), "w", encoding="ascii") as file:
            file.write(digest.hexdigest())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", default="/results", help="storage that all nodes share")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds that a step takes at least")
    options = parser.parse_args()
    TorchTrainer(
        train_func,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="spot-training", storage_path=options.results),
    ).fit()


if __name__ == "__main__":
    main()
