"""The EMA class of many Kaggle notebooks: a dict of shadow weights, swapped in by ``param.data`` to validate."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class EMA:
    def __init__(self, model, decay):
        self.model = model
        self.decay = decay
        self.shadow = {}
        self.backup = {}

    def register(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.shadow[name] = param.data.clone()

    def update(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                assert name in self.shadow
                new_average = (1.0 - self.decay) * param.data + self.decay * self.shadow[name]
                self.shadow[name] = new_average.clone()

    def apply_shadow(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.backup[name] = param.data
                param.data = self.shadow[name]

    def restore(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                param.data = self.backup[name]
        self.backup = {}


torch.manual_seed(2020)
x = torch.rand(480, 10)
y = (x.sin().sum(1) > x.cos().sum(1) - 3.5).long()
train_dl = DataLoader(TensorDataset(x[:400], y[:400]), batch_size=20, shuffle=True)
valid_dl = DataLoader(TensorDataset(x[400:], y[400:]), batch_size=40)
model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
ema = EMA(model, 0.95)
ema.register()
best_score = 0
for epoch in range(5):
    model.train()
    for xb, yb in train_dl:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        ema.update()
    ema.apply_shadow()
    model.eval()
    correct, val_loss = 0, 0
    with torch.no_grad():
        for xb, yb in valid_dl:
            out = model(xb)
            val_loss += nn.functional.cross_entropy(out, yb).item() * len(xb)
            correct += out.argmax(1).eq(yb).sum().item()
    score = correct / 80
    print(f"Epoch {epoch + 1}: val_loss {val_loss / 80:.6f} score {score:.4f}")
    if score > best_score:
        best_score = score
        torch.save(model.state_dict(), "model_ema.bin")
    ema.restore()
print("best", best_score, "sum", sum(v.double().sum().item() for v in ema.shadow.values()))
