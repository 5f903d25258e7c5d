"""pytorch/examples' mnist_hogwild: processes that step one model in shared memory, without a lock."""

import torch
import torch.multiprocessing as mp
import torch.nn as nn


def train(rank, model, epochs):
    torch.set_num_threads(1)
    torch.manual_seed(1 + rank)
    x = torch.randn(120, 4)
    y = x.sum(1, keepdim=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(1, epochs + 1):
        for a, b in zip(x.split(10), y.split(10)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
        print(f"{rank} epoch {epoch}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(1)
    mp.set_start_method("spawn")
    model = nn.Linear(4, 1)
    model.share_memory()
    processes = []
    for rank in range(2):
        p = mp.Process(target=train, args=(rank, model, 8))
        p.start()
        processes.append(p)
    for p in processes:
        p.join()
    error = (model.weight - 1).abs().max().item()
    print("learned" if error < 0.5 else "failed")
