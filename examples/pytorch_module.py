"""A network of PyTorch's, trained here and evaluated there: python examples/pytorch_module.py."""

import time

import numpy as np
import torch
from torch import nn

from cnnexp import SGD, Digits, fit, from_torch, to_torch

EPOCHS = 10


def make() -> nn.Sequential:
    """Return the network, with the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 12 * 12, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def train_there(module: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Train with PyTorch, on as many threads as here, one; return the seconds."""
    torch.set_num_threads(1)
    optimizer, started = torch.optim.SGD(module.parameters(), 0.1), time.perf_counter()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(images[batch]), labels[batch]).backward()
            optimizer.step()
    return time.perf_counter() - started


def accuracy(module: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of images that a module classifies right."""
    with torch.no_grad():
        return (module.eval()(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    """Train the network here and there; print how good it is and how long that took."""
    data = Digits().load()
    splits = [
        (torch.from_numpy(np.moveaxis(split.images, 3, 1) / np.float32(255)), torch.from_numpy(split.labels).long())
        for split in (data.train, data.test)
    ]
    module = make()
    result = fit(
        from_torch(module, (1, 28, 28)), data, epochs=EPOCHS, optimizer=SGD(lr=0.1), baseline=None, schedule="constant"
    )
    to_torch(result, module)
    here_s = sum(epoch.epoch_s for epoch in result.epochs)
    print(f"trained here:  {accuracy(module, *splits[1]):.2%} in PyTorch, {result.accuracy:.2%} here, {here_s:.2f} s")
    other = make()
    there_s = train_there(other, *splits[0])
    print(f"trained there: {accuracy(other, *splits[1]):.2%} in PyTorch, {there_s:.2f} s")


if __name__ == "__main__":
    main()
