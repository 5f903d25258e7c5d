"""fastai's learning rate finder by hand: a sweep on the model, its state put back, then the real training."""

import copy
import math

import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(4)
np.random.seed(4)
data = torch.utils.data.TensorDataset(torch.randn(512, 12), torch.randint(0, 3, (512,)))
train_loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 3))
criterion = nn.CrossEntropyLoss()


def find_lr(net, optimizer, init_value=1e-4, final_value=1.0, beta=0.9):
    saved_model = copy.deepcopy(net.state_dict())
    saved_optimizer = copy.deepcopy(optimizer.state_dict())
    num = len(train_loader) - 1
    mult = (final_value / init_value) ** (1 / num)
    lr = init_value
    optimizer.param_groups[0]["lr"] = lr
    avg_loss, best_loss = 0.0, 0.0
    losses, log_lrs = [], []
    for batch_num, (inputs, labels) in enumerate(train_loader, 1):
        optimizer.zero_grad()
        loss = criterion(net(inputs), labels)
        avg_loss = beta * avg_loss + (1 - beta) * loss.item()
        smoothed_loss = avg_loss / (1 - beta**batch_num)
        if batch_num > 1 and smoothed_loss > 4 * best_loss:
            break
        if smoothed_loss < best_loss or batch_num == 1:
            best_loss = smoothed_loss
        losses.append(smoothed_loss)
        log_lrs.append(math.log10(lr))
        loss.backward()
        optimizer.step()
        lr *= mult
        optimizer.param_groups[0]["lr"] = lr
    net.load_state_dict(saved_model)
    optimizer.load_state_dict(saved_optimizer)
    return 10 ** log_lrs[int(np.argmin(np.gradient(losses)))]


optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
suggested = find_lr(net, optimizer)
print(f"suggested lr {suggested:.3e}")
for group in optimizer.param_groups:
    group["lr"] = suggested
for epoch in range(5):
    total = 0
    for inputs, labels in train_loader:
        optimizer.zero_grad()
        loss = criterion(net(inputs), labels)
        loss.backward()
        optimizer.step()
        total += loss.item() * inputs.size(0)
    print("epoch", epoch, "train loss", total / len(data))
