"""A kernel is compiled for a shape, not for a place in the network."""

import copy
from dataclasses import replace

import pytest
from backends.on_target import AVX512, HOST
from llvmlite import ir
from machine_code import add_function

from cnnexp import AvgPool2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, Network, ReLU, Residual, ResNet, testing
from cnnexp.backends.simd.compiler.emit import FLOAT, INDEX, Offset
from cnnexp.backends.simd.lowering import Plan

BLOCK = (Conv2d(6, 3, padding="same"), ReLU(), Dropout(0.25))


def module_of(plan, keyed=True):
    """Return a module of the kernels of a step; without their keys every kernel is emitted and its code compared."""
    module = ir.Module("kernels")
    for name in ("forward", "backward"):
        kernels = getattr(plan, name)
        if not keyed:
            kernels = [(kernel, emit._emit) for kernel, emit in kernels]
        add_function(module, name, plan.target, kernels, [FLOAT, FLOAT, FLOAT, INDEX])
    return module


def test_more_equal_blocks_are_no_more_kernels(monkeypatch):
    """And most of their kernels are not even emitted; some call functions of their own."""
    plans = [Plan(ResNet(blocks=blocks).network((16, 16, 3), 10), HOST, 1, 8) for blocks in (3, 5)]
    few, many = ([*plan.forward, *plan.backward] for plan in plans)
    assert len(many) > len(few) + 80
    emitted = []
    for _, kernel in many:
        emit = kernel._emit
        monkeypatch.setattr(kernel, "_emit", lambda k, emit=emit: (emitted.append(emit), emit(k)))
    of_few, of_many = ([f for f in module_of(plan).functions if not f.is_declaration] for plan in plans)
    assert len(of_few) == len(of_many) < len(few)
    assert len(emitted) < len(many) / 2


def test_kernels_of_a_resnet_are_few_instructions():
    """By which LLVM's time goes: once they were 4.5 million characters, and took half as long again."""
    assert len(str(module_of(Plan(ResNet(blocks=3).network((32, 32, 3), 10), AVX512, 1 / 4, 64)))) < 3_000_000


NETWORKS = {
    "resnet": ResNet(blocks=2).network((16, 16, 3), 10),
    "convolutions": Network((9, 9, 6), (*BLOCK * 3, MaxPool2d(2, 1), MaxPool2d(2, 1), Flatten(), Linear(3))),
    "pools": Network((8, 8, 2), (Conv2d(4, 3, 1, "same"), MaxPool2d(2)) * 2 + (AvgPool2d(2), Flatten(), Linear(3))),
    "linear": Network((12,), (Linear(12), ReLU()) * 3 + (Linear(3),)),
    "nested": Network((6, 6, 6), (Residual((Residual(BLOCK), *BLOCK)),) * 2 + testing.END),
    **{name: Network(*given) for name, given in testing.NETWORKS.items()},
}


def test_kernels_on_the_scratch_buffer_are_others():
    plan = Plan(NETWORKS["resnet"], HOST, 1, 40)
    node, keys = copy.copy(plan.nodes[0]), set()
    for offset in (Offset(16), Offset(32), Offset(-16)):  # an arena begins behind them: of no other tensor
        node.x = replace(node.x, offset=offset)
        keys.add(plan._key(node, "forward", "forward")[0])
    assert len(keys) == 2


@pytest.mark.parametrize(("name", "share"), [*((name, 8) for name in NETWORKS), ("resnet", 40)])
def test_kernels_of_equal_keys_have_equal_code(name, share):
    """Also where a share is several tiles, which share a scratch buffer."""
    plan = Plan(NETWORKS[name], HOST, 1, share)
    assert str(module_of(plan)) == str(module_of(plan, keyed=False))
