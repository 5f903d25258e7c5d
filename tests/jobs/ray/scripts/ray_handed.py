"""A Ray Train script that takes just-in-time checkpoints from ``ray.train.get_checkpoint()`` and loads them itself."""

import hashlib
import json
import os

import ray
import ray.train
import ray_vanilla
import torch
from ray.train.torch import prepare_model
from ray_vanilla import wait_at

import holdfast.ray


def train_func(config):
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(1)
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        first = holdfast.ray.load(checkpoint, model=model, optimizer=optimizer)
    with open(os.path.join(config["out"], f"starts-{rank}"), "a") as file:
        file.write(f"{first}\n")
    for step in range(first + 1, 31):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with open(os.path.join(config["out"], f"steps-{rank}"), "a") as file:
            file.write(f"{step} {os.getpid()} {ray.get_runtime_context().get_node_id()}\n")
        wait_at(config, str(step))
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
    with open(os.path.join(config["out"], f"result-{rank}.json"), "w") as file:
        json.dump({"digest": digest.hexdigest()}, file)


if __name__ == "__main__":
    ray_vanilla.train_func = train_func
    ray_vanilla.main()
