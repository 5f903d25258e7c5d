"""Ray Train's quick start: ``TorchTrainer``, ``prepare_model``, ``prepare_data_loader``, a checkpoint per report."""

import os
import tempfile

import ray
import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_func(config):
    torch.manual_seed(0)
    x = torch.randn(320, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=config["batch_size"], shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    model = ray.train.torch.prepare_model(model)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    for epoch in range(config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
            ray.train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=Checkpoint.from_directory(folder))


ray.init(num_cpus=3, include_dashboard=False)
trainer = TorchTrainer(
    train_func,
    train_loop_config={"lr": 0.01, "batch_size": 8, "epochs": 10},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="quick-start", storage_path=os.path.abspath("results")),
)
result = trainer.fit()
print(f"result epoch {result.metrics['epoch']} loss {result.metrics['loss']:.8f}")
with result.checkpoint.as_directory() as folder:
    state = torch.load(os.path.join(folder, "model.pt"))
    print(f"result parameters {sum(value.double().sum().item() for value in state.values()):.12f}")
