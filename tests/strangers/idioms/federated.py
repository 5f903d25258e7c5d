"""Federated averaging: each round, clients deepcopy the global model, make an optimizer in a function, and train."""

import copy

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Subset, TensorDataset

torch.manual_seed(17)
x = torch.randn(240, 6)
y = (x.sum(1) > 0).long()
dataset = TensorDataset(x, y)
clients = [Subset(dataset, range(i, 240, 4)) for i in range(4)]


def local_update(model, subset, lr):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    losses = []
    for _ in range(2):
        for data, label in DataLoader(subset, batch_size=12, shuffle=True):
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(data), label)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model.state_dict(), sum(losses) / len(losses)


def average_weights(w):
    w_avg = copy.deepcopy(w[0])
    for key in w_avg:
        for i in range(1, len(w)):
            w_avg[key] += w[i][key]
        w_avg[key] = torch.div(w_avg[key], len(w))
    return w_avg


global_model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
for rnd in range(3):
    local_weights, local_losses = [], []
    for subset in clients:
        w, loss = local_update(copy.deepcopy(global_model), subset, lr=0.1 * 0.9**rnd)
        local_weights.append(copy.deepcopy(w))
        local_losses.append(loss)
    global_model.load_state_dict(average_weights(local_weights))
    with torch.no_grad():
        acc = (global_model(x).argmax(1) == y).float().mean().item()
    print(f"round {rnd} loss {sum(local_losses) / 4:.6f} accuracy {acc:.4f}")
