"""The transfer learning tutorial's train_model with an early stop: the best weights are deepcopied and put back."""

import copy
import time

import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim import lr_scheduler

torch.manual_seed(0)
inputs_all = torch.randn(360, 8)
labels_all = (inputs_all[:, 0] * inputs_all[:, 1] + 0.8 * torch.randn(360) > 0).long()
image_datasets = {
    "train": torch.utils.data.TensorDataset(inputs_all[:240], labels_all[:240]),
    "val": torch.utils.data.TensorDataset(inputs_all[240:], labels_all[240:]),
}
dataloaders = {
    x: torch.utils.data.DataLoader(image_datasets[x], batch_size=24, shuffle=True, num_workers=0)
    for x in ["train", "val"]
}
dataset_sizes = {x: len(image_datasets[x]) for x in ["train", "val"]}
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def train_model(model, criterion, optimizer, scheduler, num_epochs=25, patience=3):
    since = time.time()
    best_model_wts = copy.deepcopy(model.state_dict())
    best_loss, bad_epochs = float("inf"), 0
    for epoch in range(num_epochs):
        print(f"Epoch {epoch}/{num_epochs - 1}")
        for phase in ["train", "val"]:
            model.train() if phase == "train" else model.eval()
            running_loss = 0.0
            running_corrects = 0
            for inputs, labels in dataloaders[phase]:
                inputs, labels = inputs.to(device), labels.to(device)
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    _, preds = torch.max(outputs, 1)
                    loss = criterion(outputs, labels)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running_loss += loss.item() * inputs.size(0)
                running_corrects += torch.sum(preds == labels.data)
            if phase == "train":
                scheduler.step()
            epoch_loss = running_loss / dataset_sizes[phase]
            epoch_acc = running_corrects.double() / dataset_sizes[phase]
            print(f"{phase} Loss: {epoch_loss:.4f} Acc: {epoch_acc:.4f}")
            if phase == "val":
                if epoch_loss < best_loss:
                    best_loss, bad_epochs = epoch_loss, 0
                    best_model_wts = copy.deepcopy(model.state_dict())
                else:
                    bad_epochs += 1
        if bad_epochs >= patience:
            print("Early stopping")
            break
    time_elapsed = time.time() - since
    print(f"Training complete in {time_elapsed // 60:.0f}m {time_elapsed % 60:.0f}s")
    print(f"Best val loss: {best_loss:4f}")
    model.load_state_dict(best_model_wts)
    return model


model_ft = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
criterion = nn.CrossEntropyLoss()
optimizer_ft = optim.SGD(model_ft.parameters(), lr=0.2, momentum=0.9)
exp_lr_scheduler = lr_scheduler.StepLR(optimizer_ft, step_size=7, gamma=0.1)
model_ft = train_model(model_ft, criterion, optimizer_ft, exp_lr_scheduler, num_epochs=14)
torch.save(model_ft, "model_ft.pth")
print("checksum", sum(p.sum().item() for p in model_ft.parameters()))
