"""A Ray Train script whose workers have a torch that lacks a name which a loop must have to be followed."""

import os

import ray_vanilla


def take_away():
    import torch.optim.lr_scheduler

    del torch.optim.lr_scheduler.SequentialLR


def train_func(config):
    import torch

    open(os.path.join(config["out"], "began"), "w").close()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    open(os.path.join(config["out"], "trained"), "w").close()


if __name__ == "__main__":
    init = ray_vanilla.ray.init
    ray_vanilla.ray.init = lambda **options: init(**options, runtime_env={"worker_process_setup_hook": take_away})
    ray_vanilla.train_func = train_func
    ray_vanilla.main()
