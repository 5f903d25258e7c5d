"""GradScaler on the CPU with an absurd first scale, so that some steps are skipped, and the scheduler only if not."""

import torch
from torch import nn

torch.manual_seed(55)
x = torch.randn(240, 6)
y = 3 * x[:, :2] + 1
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=20)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=15)
skipped = 0
for epoch in range(6):
    for xb, yb in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 16, shuffle=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(xb).float(), yb)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
        else:
            scheduler.step()
    print(
        f"epoch {epoch} loss {loss.item():.6f} scale 2**{torch.tensor(scaler.get_scale()).log2():.0f} skipped {skipped}"
    )
torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, "amp.pt")
