"""Lightning on Ray as Ray documents it: RayDDPStrategy, RayLightningEnvironment, and a report after every epoch."""

import argparse
import hashlib
import json
import os
import time

import lightning.pytorch as pl
import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self, config, rank):
        super().__init__()
        self.config, self.rank = config, rank
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, index):
        step, config = self.trainer.global_step, self.config
        with open(os.path.join(config["out"], f"steps-{self.rank}"), "a") as file:
            file.write(f"{step} {os.getpid()} {ray.get_runtime_context().get_node_id()}\n")
        while str(step) in config["gates"] and not os.path.exists(os.path.join(config["out"], f"gate-{step}")):
            time.sleep(0.01)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train_func(config):
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    pl.seed_everything(5)
    x = torch.randn(160, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model = Model(config, rank)
    trainer = pl.Trainer(
        max_epochs=3,
        devices="auto",
        accelerator="cpu",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            trainer.fit(model, loader, ckpt_path=os.path.join(folder, RayTrainReportCallback.CHECKPOINT_NAME))
    else:
        trainer.fit(model, loader)
    hashed = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values()))
    result = {
        "digest": hashed.hexdigest(),
        "steps": trainer.global_step,
        "loss": trainer.callback_metrics["loss"].item(),
    }
    with open(os.path.join(config["out"], f"result-{rank}.json"), "w") as file:
        json.dump(result, file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    parser.add_argument("--out", required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--name")
    parser.add_argument("--max-failures", type=int, default=0)
    parser.add_argument("--gates", nargs="*", default=[])
    options = parser.parse_args()
    ray.init(address=options.address)
    result = TorchTrainer(
        train_func,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
    ).fit()
    with open(os.path.join(options.out, "reported"), "w") as file:
        for _, row in result.metrics_dataframe.iterrows():
            file.write(json.dumps([row["epoch"], row["step"], row["loss"]]) + "\n")


if __name__ == "__main__":
    main()
