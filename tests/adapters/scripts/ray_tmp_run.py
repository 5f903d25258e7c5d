import argparse, os, sys, time, hashlib, json
import ray, ray.train, torch
from ray.train import RunConfig, ScalingConfig, FailureConfig
from ray.train.torch import TorchTrainer


def train_func(config):
    import torch, os, time, holdfast, ray.train

    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    log = open(f"{config['out']}/steps-{rank}", "a", buffering=1)
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(64, 4)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    with holdfast.Run(model=model, optimizer=opt) as run:
        for epoch in run.epochs(config["epochs"]):
            for b in run.batches(loader):
                loss = model(b).pow(2).mean()
                loss.backward()
                opt.step()
                opt.zero_grad()
                run.step(loss=loss)
                time.sleep(config["step_s"])
                log.write(f"{run.steps} {os.getpid()} {ray.get_runtime_context().get_node_id()}\n")
    json.dump(
        {"digest": hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:8]},
        open(f"{config['out']}/result-{rank}.json", "w"),
    )


p = argparse.ArgumentParser()
p.add_argument("--address")
p.add_argument("--out")
p.add_argument("--storage")
p.add_argument("--name")
p.add_argument("--epochs", type=int, default=3)
p.add_argument("--step-s", type=float, default=0.1)
o = p.parse_args()
ray.init(address=o.address)
TorchTrainer(
    train_func,
    train_loop_config=vars(o),
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name=o.name, storage_path=o.storage, failure_config=FailureConfig(max_failures=0)),
).fit()
