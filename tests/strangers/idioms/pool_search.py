"""A search over learning rates with multiprocessing.Pool.map, the best of which is printed."""

import multiprocessing as mp

import torch


def objective(lr):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(100, 4)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(60):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    grid = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3]
    with mp.get_context("fork").Pool(2) as pool:
        results = pool.map(objective, grid, chunksize=1)
    for lr, loss in zip(grid, results):
        print(f"lr={lr}: {loss:.6f}")
    print("best", min(zip(results, grid))[1])
