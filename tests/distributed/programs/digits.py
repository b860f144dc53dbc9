"""Trains on handwritten digits as torch's first tutorial on FSDP1 does: a policy by size, Adadelta, a state dict."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))), dim=1)


def run_epoch(model, loader, optimizer=None):
    """Return the mean loss and the share of right answers over all ranks."""
    total = torch.zeros(3)
    model.train(optimizer is not None)
    for x, y in loader:
        with torch.set_grad_enabled(optimizer is not None):
            output = model(x)
            loss = F.nll_loss(output, y, reduction="sum")
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total += torch.tensor([loss.item(), (output.argmax(1) == y).sum().item(), len(x)])
    dist.all_reduce(total)
    return (total[:2] / total[2]).tolist()


def main(rank, world_size, folder):
    torch.manual_seed(1)
    digits = load_digits()
    images, labels = torch.tensor(digits.images[:320], dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    parts = [TensorDataset(images[place], labels[place]) for place in (slice(256), slice(256, 320))]
    samplers = [DistributedSampler(part, world_size, rank, shuffle=place == 0) for place, part in enumerate(parts)]
    loaders = [DataLoader(part, 32, sampler=sampler) for part, sampler in zip(parts, samplers, strict=True)]

    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    model = FSDP(Net(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    history = []
    for epoch in range(2):
        samplers[0].set_epoch(epoch)
        history.append([*run_epoch(model, loaders[0], optimizer), *run_epoch(model, loaders[1])])
        scheduler.step()

    dist.barrier()
    states = model.state_dict()
    if rank == 0:
        torch.save(states, f"{folder}/digits.pt")
    return history
