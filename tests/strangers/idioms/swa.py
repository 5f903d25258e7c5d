"""PyTorch's blog post on stochastic weight averaging: AveragedModel, SWALR from epoch 4 on, update_bn at the end."""

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(31)
xs = torch.randn(320, 3, 6, 6)
ys = (xs[:, 0].sum((1, 2)) > xs[:, 1].sum((1, 2))).long()
loader = DataLoader(TensorDataset(xs, ys), batch_size=32, shuffle=True)
loss_fn = torch.nn.CrossEntropyLoss()
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 6, 3, bias=False),
    torch.nn.BatchNorm2d(6),
    torch.nn.ReLU(inplace=True),
    torch.nn.Flatten(),
    torch.nn.Linear(96, 2),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
swa_model = AveragedModel(model)
scheduler = CosineAnnealingLR(optimizer, T_max=8)
swa_start = 4
swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)

for epoch in range(8):
    for input, target in loader:
        optimizer.zero_grad()
        loss_fn(model(input), target).backward()
        optimizer.step()
    if epoch > swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    print(epoch, "lr", round(optimizer.param_groups[0]["lr"], 6))

update_bn(loader, swa_model)
swa_model.eval()
preds = swa_model(xs)
print("swa loss", loss_fn(preds, ys).item(), "bn", swa_model.module[1].running_mean.sum().item())
