"""`cnnexp check NAME`: is a backend, a layer, an optimizer or a loss right? For who writes one; see `testing`."""

import sys
from collections.abc import Sequence
from typing import Any

from cnnexp import testing
from cnnexp.app.config import build
from cnnexp.backends import BACKENDS, backend_class
from cnnexp.errors import CnnexpError, ConfigError, did_you_mean
from cnnexp.network import LAYERS, Conv2d, Elementwise, Flatten, Linear, Network, Structural
from cnnexp.network.losses import NAMES, Loss
from cnnexp.optimizers import OPTIMIZERS, Optimizer
from cnnexp.system.registry import load_installed

COMPILED = ("python", "cpu", "cpu-simd")  # that a rule is compared on, with `numpy`: whatever turns it into something


def command(arguments: Sequence[str]) -> None:
    """Check what `cnnexp check NAME` names, and print what was found.

    ConfigError: nothing is named, or what nobody knows; BackendUnavailable: the machine lacks what a backend needs;
    CnnexpError: it is wrong, or takes none of the networks.
    """
    if len(arguments) != 1 or "=" in arguments[0]:
        usage = "check NAME [plugins=FILE.py]"
        raise ConfigError(f"check: give one backend, layer, optimizer or loss, and its file where it is yours: {usage}")
    name = arguments[0]
    if name not in {*BACKENDS, *LAYERS, *OPTIMIZERS, *NAMES}:
        load_installed()
    if name in BACKENDS:
        backend, other = backend_class(name)(), testing.reference_of(name)
        sys.stdout.write(f"{name} beside {other}: scores, losses, gradients, steps taken twice, resumed steps\n")
        found = {title: _examine(title, backend, backend_class(other)(), title) for title in testing.NETWORKS}
        if guilty := testing.explain(found):
            sys.stdout.write(f"{guilty}\n")
        _conclude(name, [verdict for verdict, _ in found.values()], "networks")
    elif name in OPTIMIZERS:
        optimizer = build(OPTIMIZERS[name], {}, name)
        testing.check_optimizer(optimizer)
        testing.check_descent(optimizer)
        _compare(name, Network(*testing.NETWORKS["linear"]), optimizer)
    elif name in NAMES:
        for smoothing in (0.0, 0.1) if name == "softmax_cross_entropy" else (0.0,):
            testing.check_gradient(Loss(name, smoothing))
        sys.stdout.write(f"{name}: its gradient is the differences', NumPy's form agrees\n")
    elif name in LAYERS and issubclass(LAYERS[name], Elementwise):
        layer: Any = build(LAYERS[name], {}, name)
        testing.check_layer(layer)
        network = Network((5, 4, 2), (Conv2d(3, 2), layer, Flatten(), Linear(4), layer, Linear(3)))
        _compare(name, network, testing.TRAINING)
    elif name in LAYERS and issubclass(LAYERS[name], Structural):
        network = _around(build(LAYERS[name], {}, name))
        testing.check_rules(network, testing.TRAINING)
        _compare(name, network, testing.TRAINING)
    else:
        rules = [layer for layer in LAYERS if issubclass(LAYERS[layer], Elementwise | Structural)]
        legal = [*BACKENDS, *rules, *OPTIMIZERS, *NAMES]
        what = "is part of what `check BACKEND` checks" if name in LAYERS else "unknown"
        raise ConfigError(f"check {name}: {what}; legal: {', '.join(legal)}{did_you_mean(name, legal)}")


def _around(layer: Any) -> Network:
    """Return a network with a structural layer in it: of images or, where it takes none, of vectors."""
    try:
        return Network((8, 8, 2), (Conv2d(4, padding="same"), layer, Flatten(), Linear(3)))
    except Exception:  # whatever a layer raises on a shape that it does not expect
        return Network((8,), (Linear(16), layer, Linear(3)))


def _compare(name: str, network: Network, optimizer: Optimizer) -> None:
    """Compare a rule's outcome on the backends that compile it with NumPy's, on a network."""
    sys.stdout.write(f"{name}: right by itself; a network with it, beside numpy:\n")
    found = [_examine(one, backend_class(one)(), backend_class("numpy")(), network, optimizer) for one in COMPILED]
    _conclude(name, [verdict for verdict, _ in found], "backends")


def _examine(shown: str, *compared: Any) -> tuple[str, str]:
    """Return what `testing.examine` does, and print it beside what is tried."""
    verdict, text = testing.examine(*compared)
    sys.stdout.write(f"  {shown:<20}{text}\n")
    sys.stdout.flush()
    return verdict, text


def _conclude(name: str, verdicts: Sequence[str], what: str) -> None:
    if "WRONG" in verdicts:
        raise CnnexpError(f"check {name}: wrong on {verdicts.count('WRONG')} of {len(verdicts)} {what}")
    if "right" not in verdicts:
        raise CnnexpError(f"check {name}: takes none of the {what}")
    sys.stdout.write(f"{name} is right on {verdicts.count('right')} of {len(verdicts)} {what}\n")
