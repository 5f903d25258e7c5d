"""A tqdm bar around the loader with set_postfix, and trange for the epochs, tqdm.write for results."""

import torch
import torch.nn as nn
from tqdm import tqdm, trange

torch.manual_seed(16)
x = torch.randn(320, 9)
y = x.cumsum(1)[:, ::3]
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(9, 30), nn.ReLU(), nn.Linear(30, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for epoch in trange(5, desc="epochs", leave=False):
    total = 0.0
    with tqdm(loader, unit="batch", leave=False) as tepoch:
        for data, target in tepoch:
            tepoch.set_description(f"Epoch {epoch}")
            optimizer.zero_grad()
            output = model(data)
            loss = nn.functional.mse_loss(output, target)
            loss.backward()
            optimizer.step()
            total += loss.item()
            tepoch.set_postfix(loss=loss.item(), mean=total / (tepoch.n + 1))
    tqdm.write(f"epoch {epoch} loss {total / len(loader):.6f}")
