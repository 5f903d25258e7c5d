"""Fine-tuning: a frozen body and a new head, then the last layers are unfrozen and added to the optimizer."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(10)
backbone = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU())
torch.save(backbone.state_dict(), "pretrained.pth")

model = nn.Sequential()
model.add_module(
    "features", nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU())
)
model.features.load_state_dict(torch.load("pretrained.pth", map_location="cpu"))
for param in model.features.parameters():
    param.requires_grad = False
model.add_module("classifier", nn.Linear(16, 3))

x = torch.randn(300, 12)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=25, shuffle=True)
optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[5], gamma=0.3)
for epoch in range(7):
    if epoch == 3:
        print("unfreezing")
        for param in model.features[3].parameters():
            param.requires_grad = True
        optimizer.add_param_group({"params": model.features[3].parameters(), "lr": 0.01})
    model.train()
    correct = 0
    for a, b in loader:
        optimizer.zero_grad()
        out = model(a)
        loss = nn.CrossEntropyLoss()(out, b)
        loss.backward()
        optimizer.step()
        correct += (out.argmax(1) == b).sum().item()
    scheduler.step()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"epoch {epoch}: loss {loss.item():.5f} acc {correct / 300:.4f} trainable {trainable}")
