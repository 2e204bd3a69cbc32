"""cnnexp: train convolutional networks with hand-written kernels, and measure how much faster each one is.

    from cnnexp import Digits, OneConv, fit

    result = fit(OneConv(filters=32), Digits(), backend="cpu-simd", epochs=5)
    print(result.table)  # and result.verdict, result.plot(), result.save(FOLDER)

What people use, each with a help of its own, e.g. `help(cnnexp.fit)`; `cnnexp help model=knm` explains its keys:

    train       fit -> Fit; step by step: train_epochs -> EpochResult, TrainingPlan, EarlyStopping,
                Baseline, backend
    data        Digits, Mnist, FashionMnist, Cifar10, Fer2013, Quadrants, Synthetic, Images, Npz; Dataset, Split
    augment     Shift, CropFlip, Affine, Elastic, Cutout
    models      OneConv, TwoConvMlp, TwoConvPool4, Knm, Ffn, ResNet, MobileNet, Custom, Onnx, from_torch, to_torch;
                Network
    layers      Conv2d, MaxPool2d, AvgPool2d, GlobalAvgPool, BatchNorm2d, Dropout, Flatten, Linear, Residual,
                ReLU, LeakyReLU, Sigmoid, Tanh, GELU; Elementwise
    optimizers  SGD, RMSprop, Adagrad, Adadelta, Adam, AdamW, AdaMax; Schedule, Constant, Cosine, Step
    losses      Loss, Totals
    your own    register
    mistakes    CnnexpError

`python -m cnnexp` puts the same pieces together from config. They are imported when first used, so `import cnnexp`
costs nothing and needs neither Hydra, MLflow, Numba nor a GPU.
"""

from importlib import import_module as _import_module

_HOMES = {
    "cnnexp.app.fit": "Fit fit",
    "cnnexp.backends": "backend",
    "cnnexp.datasets": "Cifar10 Dataset Digits FashionMnist Fer2013 Images Mnist Npz Quadrants Split Synthetic",
    "cnnexp.errors": "CnnexpError",
    "cnnexp.network.losses": "Loss Totals",
    "cnnexp.network.models": "Custom Ffn Knm MobileNet OneConv Onnx ResNet TwoConvMlp TwoConvPool4",
    "cnnexp.network.torch_module": "from_torch to_torch",
    "cnnexp.network": "AvgPool2d BatchNorm2d Conv2d Dropout Elementwise Flatten GELU GlobalAvgPool LeakyReLU Linear "
    "MaxPool2d Network ReLU Residual Sigmoid Tanh",
    "cnnexp.optimizers": "SGD Adadelta Adagrad AdaMax Adam AdamW RMSprop",
    "cnnexp.system.registry": "register",
    "cnnexp.training.schedules": "Constant Cosine Schedule Step",
    "cnnexp.training.augment": "Affine CropFlip Cutout Elastic Shift",
    "cnnexp.training.baseline": "Baseline",
    "cnnexp.training.early_stopping": "EarlyStopping",
    "cnnexp.training.loop": "EpochResult TrainingPlan train_epochs",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__version__ = "0.2.0"
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cnnexp' has no attribute {name!r}")
    return getattr(_import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
