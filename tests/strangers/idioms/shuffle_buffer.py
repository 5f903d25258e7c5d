"""webdataset's way: an IterableDataset over shards, split between workers, shuffled in a buffer, batched and mapped."""

import random

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Pipeline(IterableDataset):
    def __init__(self, source, *stages):
        self.source, self.stages = source, stages

    def compose(self, stage):
        return Pipeline(self.source, *self.stages, stage)

    def shuffle(self, size, seed=0):
        epochs = [0]

        def run(samples):
            info = get_worker_info()
            rng = random.Random(f"{seed} {epochs[0]} {info.id if info else 0}")
            epochs[0] += 1
            buf = []
            for sample in samples:
                buf.append(sample)
                if len(buf) >= size:
                    yield buf.pop(rng.randrange(len(buf)))
            rng.shuffle(buf)
            yield from buf

        return self.compose(run)

    def map(self, f):
        return self.compose(lambda samples: (f(s) for s in samples))

    def batched(self, n):
        def run(samples):
            batch = []
            for s in samples:
                batch.append(s)
                if len(batch) == n:
                    yield torch.stack(batch)
                    batch = []

        return self.compose(run)

    def __iter__(self):
        it = self.source()
        for stage in self.stages:
            it = stage(it)
        yield from it


def shards():
    info = get_worker_info()
    worker, workers = (info.id, info.num_workers) if info else (0, 1)
    urls = [f"shard-{n:03d}.tar" for n in range(6)]
    for url in urls[worker::workers]:
        number = int(url[6:9])
        for k in range(40):
            yield {"__key__": f"{url}/{k}", "x": number + k / 40}


def augment(sample):
    return torch.tensor([sample["x"], sample["x"] ** 2]) + 0.01 * torch.randn(2)


torch.manual_seed(6)
dataset = Pipeline(shards).shuffle(30).map(augment).batched(8)
loader = DataLoader(dataset, batch_size=None, num_workers=2)
model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
seen = 0
for epoch in range(3):
    for step, batch in enumerate(loader):
        loss = (model(batch) - batch[:, :1].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(batch)
        if step % 5 == 0:
            print(f"epoch {epoch} step {step} first {batch[0, 0].item():.5f} loss {loss.item():.6f}")
print("samples", seen)
