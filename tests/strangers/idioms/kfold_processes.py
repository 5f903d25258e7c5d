"""Cross validation with a multiprocessing.Process for each fold, one after the other, results through a Queue."""

import multiprocessing as mp

import torch
import torch.nn as nn


def train_fold(fold, queue):
    torch.set_num_threads(1)
    torch.manual_seed(100 + fold)
    data = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    target = data.abs().sum(1, keepdim=True)
    held_out = torch.arange(200) % 4 == fold
    x, y = data[~held_out], target[~held_out]
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=15, shuffle=True)
    for epoch in range(4):
        for a, b in loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            opt.step()
    with torch.no_grad():
        score = nn.functional.mse_loss(model(data[held_out]), target[held_out]).item()
    torch.save(model.state_dict(), f"fold{fold}.pt")
    queue.put((fold, score))


if __name__ == "__main__":
    queue = mp.Queue()
    scores = {}
    for fold in range(4):
        p = mp.Process(target=train_fold, args=(fold, queue))
        p.start()
        number, score = queue.get()
        p.join()
        assert p.exitcode == 0, p.exitcode
        scores[number] = score
        print(f"fold {number}: {score:.6f}", flush=True)
    print("mean", sum(scores.values()) / 4)
