"""Mixed precision as the AMP recipe writes it: autocast to bfloat16, a disabled scaler, an accumulation of two."""

import torch
from torch import nn

torch.manual_seed(1234)
use_amp = True
device = "cuda" if torch.cuda.is_available() else "cpu"
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
batch_size, in_size, out_size, num_layers = 32, 32, 8, 3
layers = []
for _ in range(num_layers - 1):
    layers += [nn.Linear(in_size, in_size), nn.ReLU()]
net = nn.Sequential(*layers, nn.Linear(in_size, out_size)).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
data = [torch.randn(batch_size, in_size, device=device) for _ in range(20)]
targets = [torch.randn(batch_size, out_size, device=device) for _ in range(20)]
loss_fn = torch.nn.MSELoss().to(device)

for epoch in range(6):
    for i, (input, target) in enumerate(zip(data, targets)):
        with torch.autocast(device_type=device, dtype=torch.bfloat16, enabled=use_amp):
            output = net(input)
            assert output.dtype is torch.bfloat16
            loss = loss_fn(output, target) / 2
            assert loss.dtype is torch.float32
        scaler.scale(loss).backward()
        if (i + 1) % 2 == 0:
            scaler.unscale_(opt)
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.5)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    print(f"epoch {epoch} loss {loss * 2:.6f} norm {norm:.6f}")
