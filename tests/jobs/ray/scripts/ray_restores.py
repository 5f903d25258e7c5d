"""Ray's documented example of a restore: a function that raises once, and goes on from its own checkpoint."""

import argparse
import json
import os
import tempfile
import time

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer, prepare_model


class Reported(UserCallback):
    """Notes what Ray's callbacks are given."""

    def __init__(self, path):
        self.path = path

    def after_report(self, run_context, metrics, checkpoint):
        with open(self.path, "a") as file:
            file.write(json.dumps([metrics[0]["epoch"], metrics[0]["loss"], checkpoint is not None]) + "\n")


def train_func(config):
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    x = torch.arange(160, dtype=torch.float32).reshape(40, 4) / 100
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    with open(os.path.join(config["out"], f"starts-{rank}"), "a") as file:
        file.write(f"{first}\n")
    for epoch in range(first, 4):
        for step in range(epoch * 5 + 1, epoch * 5 + 6):
            loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with open(os.path.join(config["out"], f"steps-{rank}"), "a") as file:
                file.write(f"{step} {os.getpid()} {ray.get_runtime_context().get_node_id()}\n")
            while str(step) in config["gates"] and not os.path.exists(os.path.join(config["out"], f"gate-{step}")):
                time.sleep(0.01)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0 and config["own"]:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, os.path.join(folder, "state.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch, "loss": loss.item()}, checkpoint=checkpoint)
        raised = os.path.join(config["out"], f"raised-{rank}")
        if epoch == 1 and rank in config["raising"] and (first == 0 if config["own"] else not os.path.exists(raised)):
            open(raised, "w").close()
            raise RuntimeError("Intentional error to showcase restoration!")
    with open(os.path.join(config["out"], f"result-{rank}.json"), "w") as file:
        json.dump({name: value.tolist() for name, value in model.module.state_dict().items()}, file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    parser.add_argument("--out", required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--name")
    parser.add_argument("--own", type=int, default=1)
    parser.add_argument("--raising", type=int, nargs="*", default=[])
    parser.add_argument("--max-failures", type=int, default=1)
    parser.add_argument("--gates", nargs="*", default=[])
    options = parser.parse_args()
    ray.init(address=options.address)
    TorchTrainer(
        train_func,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage,
            callbacks=[Reported(os.path.join(options.out, "reported"))],
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
    ).fit()


if __name__ == "__main__":
    main()
