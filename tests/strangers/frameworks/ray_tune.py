"""Ray Tune's PyTorch guide: a grid search over a training function with checkpoints and ``ASHAScheduler``."""

import os
import tempfile

import ray
import torch
from ray import tune
from ray.tune import Checkpoint, RunConfig
from ray.tune.schedulers import ASHAScheduler


def train_model(config):
    torch.manual_seed(0)
    x = torch.randn(160, 6)
    y = x.sum(1, keepdim=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, config["hidden"]), torch.nn.Tanh(), torch.nn.Linear(config["hidden"], 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True)
    for epoch in range(6):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), os.path.join(folder, "checkpoint.pt"))
            tune.report({"loss": loss.item(), "epoch": epoch}, checkpoint=Checkpoint.from_directory(folder))


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
tuner = tune.Tuner(
    train_model,
    param_space={"lr": tune.grid_search([0.01, 0.1]), "hidden": tune.grid_search([4, 8])},
    tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=ASHAScheduler(grace_period=6, max_t=6)),
    run_config=RunConfig(name="search", storage_path=os.path.abspath("results"), verbose=0),
)
results = tuner.fit()
for result in sorted(results, key=lambda result: str(result.config)):
    print(f"result {result.config} loss {result.metrics['loss']:.8f} epoch {result.metrics['epoch']}")
print("best", results.get_best_result().config)
