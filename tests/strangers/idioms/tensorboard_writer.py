"""A SummaryWriter in runs/, scalars each few steps, histograms, and validation curves from the same global step."""

import torch
import torch.nn as nn
from tensorboardX import SummaryWriter

torch.manual_seed(9)
writer = SummaryWriter("runs/experiment_1")
x = torch.randn(400, 10)
y = (x[:, :1] - x[:, 1:2]) ** 2
trainset = torch.utils.data.TensorDataset(x[:320], y[:320])
testset = torch.utils.data.TensorDataset(x[320:], y[320:])
trainloader = torch.utils.data.DataLoader(trainset, batch_size=16, shuffle=True)
testloader = torch.utils.data.DataLoader(testset, batch_size=40)
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
running_loss = 0.0
for epoch in range(4):
    for i, (inputs, labels) in enumerate(trainloader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(inputs), labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
        if i % 5 == 4:
            n_iter = epoch * len(trainloader) + i
            writer.add_scalar("training loss", running_loss / 5, n_iter)
            writer.add_scalar("lr", optimizer.param_groups[0]["lr"], n_iter)
            running_loss = 0.0
    with torch.no_grad():
        test_loss = sum(nn.functional.mse_loss(net(a), b).item() for a, b in testloader) / len(testloader)
    writer.add_scalar("test loss", test_loss, epoch)
    for name, p in net.named_parameters():
        writer.add_scalar(f"norm/{name}", p.norm().item(), epoch)
    print(f"[{epoch + 1}] test loss {test_loss:.6f}")
writer.close()
print("Finished Training")
