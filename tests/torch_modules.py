# ruff: noqa: E501 - one module a line
"""Small networks as people write them in PyTorch, for what reads such."""

import pytest

NAMES = (
    *("lenet5", "vgg", "resnet", "plain_resnet", "padded_resnet", "mobilenet", "gelu_mlp", "views"),
    *("mean", "stem", "ceil", "no_biases", "convolutions", "rows_and_columns"),
)


def torch_modules():
    """Return modules of PyTorch's by name, each with the shape of its input and with averages that were trained."""
    torch = pytest.importorskip("torch", reason="no torch is installed")
    nn, functional = torch.nn, torch.nn.functional

    class Block(nn.Sequential):
        def forward(self, x):
            return functional.relu(x + super().forward(x))

    def block(width, norm=nn.BatchNorm2d):
        first, second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        return Block(first, norm(width), nn.ReLU(), second, norm(width))

    class PaddedBlock(nn.Sequential):
        def forward(self, x):
            return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, 2)) + super().forward(x)

    class Views(nn.Sequential):
        def forward(self, x):
            x = functional.leaky_relu(self[0](x), 0.2)
            return functional.log_softmax(self[1](x.view(x.size(0), -1)), dim=1)

    class Mean(nn.Sequential):
        def forward(self, x):
            return self[1](torch.sigmoid(self[0](x)).mean((2, 3)))

    modules = {
        "lenet5": (nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
        ), (1, 28, 28)),
        "vgg": (nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8, 1e-3, 0.2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(8 * 2 * 3, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 5),
        ), (3, 8, 12)),
        "resnet": (nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), block(4), block(4),
            nn.Conv2d(4, 6, 3, 2, 1), block(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10),
        ), (3, 10, 10)),
        "plain_resnet": (nn.Sequential(nn.Conv2d(1, 4, 3), block(4, nn.Identity), nn.Flatten(), nn.Linear(144, 3)), (1, 8, 8)),
        "padded_resnet": (nn.Sequential(
            nn.Conv2d(3, 4, 3), PaddedBlock(nn.Conv2d(4, 6, 3, 2, 1)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5),
        ), (3, 9, 8)),
        "mobilenet": (nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 4, 3, 1, 1, groups=4, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 1),
            nn.Conv2d(8, 4, 3, 1, 2, dilation=2, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        ), (3, 9, 8)),
        "gelu_mlp": (nn.Sequential(nn.Linear(9, 7), nn.GELU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)), (9,)),
        "views": (Views(nn.Conv2d(3, 5, (3, 3), stride=2, padding=1), nn.Linear(5 * 5 * 6, 4)), (3, 9, 11)),
        "mean": (Mean(nn.Conv2d(2, 6, 3), nn.Linear(6, 3)), (2, 6, 7)),
        "stem": (nn.Sequential(nn.Conv2d(1, 4, 7, 2, 3), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(64, 2)), (1, 16, 16)),
        "ceil": (nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(32, 2)), (1, 8, 8)),
        "no_biases": (nn.Sequential(nn.Flatten(), nn.Linear(64, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, False)), (1, 8, 8)),
        "convolutions": (nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.Conv2d(4, 10, 6), nn.Flatten()), (1, 8, 8)),
        "rows_and_columns": (nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Softmax(1)), (8, 8)),
    }  # fmt: skip
    torch.manual_seed(0)
    for module, _ in modules.values():
        for name, average in module.named_buffers():
            if name.endswith(("mean", "var")):
                average.uniform_(0.5, 1.5)
    return modules


def channels_last(images):
    return images.transpose(0, 2, 3, 1) if images.ndim == 4 else images[..., None] if images.ndim == 3 else images
