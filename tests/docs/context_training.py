"""What a page takes for granted: a model, its optimizer and scheduler, and a loader."""

import torch

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
inputs = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
validation = torch.utils.data.DataLoader(data, batch_size=8)
loss_of = torch.nn.CrossEntropyLoss()
