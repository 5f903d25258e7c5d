"""Copies and pickles of what a script trains: an average that is called, the best model so far, pickles."""

import copy
import hashlib
import os
import pickle

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset


class Loader(DataLoader):
    """A loader of the script's own."""


def pickled(thing):
    """What a process reads that has no holdfast."""
    content = pickle.dumps(thing)
    assert b"holdfast." not in content
    return pickle.loads(content)


def digest(module):
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in module.state_dict().values())).hexdigest()[:16]


def main():
    if os.environ.get("WORLD_SIZE"):
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 2))
    if dist.is_initialized():
        model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    average = AveragedModel(model)
    torch.manual_seed(1 + rank)
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(2))
    loader = Loader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4, shuffle=True)
    best, lowest = None, float("inf")
    for epoch in range(3):
        for index, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            # The average is asked in the middle of a step, and draws random numbers then.
            other = average(x).detach().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
            print(f"step {epoch * 6 + index + 1} {loss.item():.8f} {other.item():.6f}", flush=True)
            mean = loss.detach().clone()
            if dist.is_initialized():
                dist.all_reduce(mean)
            if mean.item() < lowest and (rank == 0 or os.environ["BEST"] == "all"):
                best, lowest = copy.deepcopy(model), mean.item()
        again, *_ = copy.deepcopy((model, optimizer, scheduler, loader))
        assert digest(again) == digest(model)
        assert [digest(pickled(one)) for one in (model, average)] == [digest(model), digest(average)]
        assert len(pickled(loader)) == len(loader)
        pickled((optimizer, scheduler))
    print(f"end {rank} {digest(model)} {digest(average)} {best and digest(best)}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
