"""ReduceLROnPlateau driven by the validation loss, and a stop once the rate is small."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(14)
X = torch.randn(300, 5)
Y = torch.sin(X.sum(1, keepdim=True)) + 0.3 * torch.randn(300, 1)
train_loader = DataLoader(TensorDataset(X[:220], Y[:220]), batch_size=22, shuffle=True)
val_loader = DataLoader(TensorDataset(X[220:], Y[220:]), batch_size=80)
model = nn.Sequential(nn.Linear(5, 50), nn.ReLU(), nn.Linear(50, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.3, patience=1)
epoch = 0
while optimizer.param_groups[0]["lr"] > 1e-4 and epoch < 20:
    model.train()
    for a, b in train_loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
    model.eval()
    val_loss = 0
    with torch.no_grad():
        for a, b in val_loader:
            val_loss += nn.functional.mse_loss(model(a), b)
    val_loss /= len(val_loader)
    scheduler.step(val_loss)
    epoch += 1
    print(f"epoch {epoch} val {val_loss:.6f} lr {optimizer.param_groups[0]['lr']:.6f} bad {scheduler.num_bad_epochs}")
print("stopped after", epoch, "best", float(scheduler.best))
