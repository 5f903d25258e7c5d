"""OneCycleLR stepped with each batch, momentum cycled too, curves kept in a list and saved as an array."""

import numpy as np
import torch
from torch import nn

torch.manual_seed(23)
x, y = torch.randn(256, 14), torch.randn(256, 2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True)
epochs = 6
model = nn.Sequential(nn.Linear(14, 20), nn.ReLU(), nn.Linear(20, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=0.2, epochs=epochs, steps_per_epoch=len(loader), pct_start=0.3
)
lrs, moms, losses = [], [], []
for epoch in range(epochs):
    for data, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        lrs.append(optimizer.param_groups[0]["lr"])
        moms.append(optimizer.param_groups[0]["momentum"])
        losses.append(loss)
        scheduler.step()
    print(f"epoch {epoch}: lr {lrs[-1]:.6f} mom {moms[-1]:.4f} loss {torch.stack(losses[-16:]).mean():.6f}")
np.save("curves.npy", np.array([lrs, moms, [loss.item() for loss in losses]]))
