"""How `cpu-simd` chooses among the algorithms of a layer; that each of them computes it; and what `explain` shows."""

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from backends.on_target import AVX2, AVX512, HOST, NETWORKS, TARGETS, OnTarget
from conformance import BARELY_CLEAR, check_case, check_gradients, check_scores, clear_case, make_case, oracle, started
from llvmlite import ir
from machine_code import CPUS, Cpu, KernelProgram, add_function, product_loops
from numba import njit
from tables import each

from cnnexp import GELU, SGD, AvgPool2d, BatchNorm2d, Conv2d, Dropout, Flatten, Linear, Loss, MaxPool2d, Network, ReLU
from cnnexp.backends import simd
from cnnexp.backends.simd import CpuSimd
from cnnexp.backends.simd.algorithms.convolution import winograd
from cnnexp.backends.simd.algorithms.reorder import reorder
from cnnexp.backends.simd.compiler.compose import compose
from cnnexp.backends.simd.compiler.emit import FLOAT, INDEX, Target
from cnnexp.backends.simd.layouts import Arena
from cnnexp.backends.simd.lowering import Plan
from cnnexp.backends.simd.planner import ALGORITHMS, allowed, candidates, choose_nodes, split
from cnnexp.backends.simd.runtime import program
from cnnexp.backends.simd.runtime.program import make_plan
from cnnexp.errors import ConfigError
from cnnexp.network import Residual, Sigmoid
from cnnexp.network.models import MobileNet, OneConv, ResNet, TwoConvMlp, TwoConvPool4
from cnnexp.network.shapes import walk

OFTEN = ("most", "here"), ("between", "neon")
HERE = [name for name in ("sse4", "avx2", "avx512") if CPUS[name].runs_here]
RATE = 0.1
FUSED = "filters-fused", "lanes-pair"
"""The algorithms that take in the layers after, too."""


def every_algorithm(network: Network, target: Target) -> list[tuple[str, str]]:
    """Return (layer, algorithm) for all that the registers hold and the layers around allow."""
    sections, found = split(network.stages), []
    for at, section in enumerate(sections):
        for node in allowed(sections[at:], target, {}, first=at == 0):
            pair = section.stage.name, node.algorithm
            with suppress(ConfigError):
                choose_nodes(network, replace(target, forced=(pair,)), 9)
                found.append(pair)
    return found


def rounds(network: Network, target: Target) -> list[tuple[tuple[str, str], ...]]:
    """Return what to force in a few programs that together take every algorithm of every layer."""
    pairs = every_algorithm(network, target)
    fused = [(pair,) for pair in pairs if pair[1] in FUSED]
    alone = {layer: [pair for pair in pairs if pair[0] == layer and pair[1] not in FUSED] for layer, _ in pairs}
    most = max(map(len, alone.values()))
    return fused + [tuple(found[i % len(found)] for found in alone.values()) for i in range(most)]


def check_step(cpu: Cpu, network: Network, forced=(), target: Target | None = None) -> KernelProgram:
    """Compile the kernels, and train one step beside the oracle where they can run; look at the code where not."""
    target = replace(target or cpu.target, forced=forced)
    program = KernelProgram(cpu, network, target.lanes + 3, target)
    if not cpu.runs_here:
        program.read()
        return program
    # Winograd's transformation makes fractions of whole numbers, so those come last
    case = clear_case(network, images=target.lanes + 3, whole_after=500, apart=BARELY_CLEAR)
    program.restore({"parameters": case.parameters})
    handle, batch = program.load(case.images, case.labels), np.arange(len(case.images))[:0:-1]
    check_scores(program, handle, case)
    check_gradients(program, handle, case, batch)
    program.apply(program.gradients(handle, batch)[1], RATE)
    _, _, gradient, *_ = oracle(case, batch)
    expected = case.parameters - RATE * gradient
    np.testing.assert_allclose(program.state()["parameters"], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    return program


@each(("avx2",), ("avx512",))
def test_sums_of_products_stay_in_registers(cpu):
    """LLVM kept constants of Winograd's transformations in registers past its products; sums went by the stack."""
    layers = Conv2d(128, 3, padding="same"), Conv2d(64, 5, padding="same"), Flatten(), Linear(64)
    target = replace(CPUS[cpu].target, forced=(("conv1", "winograd"), ("conv2", "winograd")))
    loops = product_loops(KernelProgram(CPUS[cpu], Network((8, 8, 128), layers), 64, target).read())
    assert len(loops) >= 6
    for loop in loops:
        assert "(%rsp)" not in loop, loop


@pytest.mark.parametrize("network", [Network((9,), (Linear(16), ReLU(), Linear(3))), ResNet().network((8, 8, 3), 3)])
def test_gradients_pass_a_relu_in_place_by_no_masked_store(network):
    """LLVM makes one of what goes back to where it came from; AMD's CPUs take 12 cycles for each with AVX2."""
    code = KernelProgram(CPUS["avx2"], network, 19, CPUS["avx2"].target).read()
    assert not re.search(r"vmaskmov\S+\s+%\S+, %\S+, [^%\n]*\(", code)


@pytest.mark.parametrize(("share", "together", "rows"), [(1, 1, 4), (9, 9, 12), (16, 8, 11)])
def test_products_are_of_as_many_rows_as_a_block_has_tiles(share, together, rows):
    """Blocks are equal, and of one image no rows are multiplied that are not there: with 14 it took 5 times as long."""
    target = replace(AVX512, forced=(("conv1", "winograd"),), forward_only=True)
    plan = Plan(Network((8, 8, 64), (Conv2d(64, 3, padding="same"), Flatten(), Linear(10))), target, 1, share)
    add_function(module := ir.Module(), "forward", target, plan.forward, [FLOAT, FLOAT, FLOAT, INDEX])
    [products] = [function for function in module.functions if ".products" in function.name]
    assert plan.nodes[0].transformed.together == together
    assert str(products).count("llvm.fmuladd") == 2 * rows


@pytest.mark.parametrize(("algorithm", "threads"), [("winograd", 1), ("winograd", 2), ("channels", 2)])
def test_weights_that_leave_l2_go_by_pieces(algorithm, threads, monkeypatch):
    """Tiles of odd images over each other, pieces of the channels with a rest, several blocks of images, a max-pool.

    Of the weights that the input's gradient needs turned no more than a panel is in memory.
    """
    lanes, forced = HOST.lanes, tuple((f"conv{i}", algorithm) for i in (1, 2, 3))
    layers = Conv2d(2 * lanes, 3, padding="same"), ReLU(), Conv2d(3 * lanes, 5, padding=2), MaxPool2d(2), ReLU()
    network = Network((10, 14, 40), (*layers, Conv2d(lanes, 3, padding="same"), ReLU(), Flatten(), Linear(4)))
    target = replace(HOST, l2_bytes=2**13, forced=forced)
    monkeypatch.setattr(winograd, "L3_BYTES", 2**20)
    monkeypatch.setattr(winograd.Tiling, "is_faster", lambda self, other, images: True)
    monkeypatch.setattr(program, "load_or_make", lambda key, load, make: load(make()))  # such code is not to be kept
    monkeypatch.setattr(program.compilation, "compile_in_subprocess", lambda *_: None)
    plan = make_plan(network, target, 2 * lanes)
    nodes, turned = plan.nodes, [conv.panels for node in plan.nodes[1:3] for *_, conv in node.phases]
    assert algorithm == "winograd" or plan.arena.needed == max(p.rows * p.width * lanes for p in turned)
    if algorithm == "winograd":
        passes = [part for node in nodes for part in (vars(node).get("transformed"), vars(node).get("back")) if part]
        assert [part.by_panel for part in passes] == [True] * 5
        assert len({part.together for part in passes}) > 1
    check_case(OnTarget(target, threads), make_case(network, images=2 * lanes + 3))


@pytest.mark.parametrize("images", [HOST.lanes - 1, 5 * HOST.lanes])
def test_linear_weights_that_leave_l2_go_panel_by_panel_for_few_images(images, monkeypatch):
    """Rows that fill no panel, outputs that fill no vector, and a first layer whose input needs no gradient."""
    network = Network((23,), (Linear(132), ReLU(), Linear(75), ReLU(), Linear(60), ReLU(), Linear(4)))
    target = replace(HOST, l2_bytes=2**15)
    monkeypatch.setattr(program, "load_or_make", lambda key, load, make: load(make()))
    monkeypatch.setattr(program.compilation, "compile_in_subprocess", lambda *_: None)
    plan = make_plan(network, target, images)
    node = next(node for node in plan.nodes if node.name == "linear2")
    assert node.panels.rows > 132
    few = target.l2_bytes >= 8 * plan.arena.floats(node.dx_lanes)
    assert few == (images < HOST.lanes)
    assert 4 * node.panels.size > target.l2_bytes
    check_case(OnTarget(target, 1), make_case(network, images=images))


def check_every_algorithm(cpu: Cpu, network: Network, target: Target | None = None) -> None:
    target, taken = target or cpu.target, set()
    for forced in rounds(network, target):
        nodes = check_step(cpu, network, forced, target).plan.nodes
        taken |= {(node.name.partition("+")[0], node.algorithm) for node in nodes}
    assert taken >= set(every_algorithm(network, target))


def trials():
    """Yield every network on this machine's widest vectors and, one after another, on those that it may not have."""
    natives = {"avx2 native": AVX2} if "avx2" in HERE else {}
    for i, name in enumerate(NETWORKS):
        # vectors of 16 that must be split take LLVM long: of small networks alone
        others = ("sse", "wide") if name.startswith("filters ") else ("avx2", "sse", "neon", *natives)
        title = others[i % len(others)]
        for where, target in (("here", CPUS[HERE[-1]].target), (title, (TARGETS | natives)[title])):
            mark = () if (name, where) in OFTEN else pytest.mark.thorough
            yield pytest.param(name, target, id=f"{name}-{where}", marks=mark)


@pytest.mark.parametrize(("name", "target"), list(trials()))
def test_every_algorithm_of_every_layer_computes_it(name, target):
    check_every_algorithm(CPUS[HERE[-1]], Network(*NETWORKS[name]), target)


@pytest.mark.thorough
@pytest.mark.parametrize("cpu", HERE)
@pytest.mark.parametrize("shape", [(5, 7, 3), (6, 9, 3)])
def test_tiles_of_odd_images_lie_over_each_other(cpu, shape):
    layers = Conv2d(5, 3, padding="same"), ReLU(), Conv2d(17, 5, padding="same"), ReLU(), Flatten(), Linear(4)
    check_every_algorithm(CPUS[cpu], Network(shape, layers))


@each((3,), (5,))
def test_winograds_algorithm_rounds_little_more_than_a_direct_convolution(kernel):
    layers = Conv2d(64, kernel, padding="same"), Conv2d(64, kernel, padding="same"), Flatten(), Linear(4)
    case, batch, errors = make_case(Network((12, 12, 64), layers), images=8), np.arange(8), []
    wanted = oracle(case, batch)[2]
    for algorithm in "channels", "winograd":
        backend = CpuSimd(threads=1, algorithms=(f"conv1:{algorithm}", f"conv2:{algorithm}"))
        program, handle = started(backend, case, SGD(), 8)
        gradient = program.gradients(handle, batch)[1]
        errors.append([np.std(p.view(gradient) - p.view(wanted)) for p in case.network.parameters])
    direct, transformed = np.array(errors)[:, :4:2]
    assert (direct < transformed).all()
    assert (transformed < 2.5 * direct).all(), transformed / direct


@each(
    ((Conv2d(6, 3, groups=2), ReLU(), MaxPool2d(2)), {"lanes"}),
    ((Conv2d(8, 3, dilation=2), ReLU(), MaxPool2d(2)), {"lanes"}),
    ((Conv2d(8, 3, groups=4),), {"lanes"}),
    ((Conv2d(4, 3, 2, "floor", groups=4, dilation=2), ReLU()), {"depthwise", "lanes"}),
    ((Conv2d(4, 3, groups=4), ReLU(), MaxPool2d(2)), {"lanes"}),
    ((Conv2d(4, 9, groups=4),), {"lanes"}),
)
def test_groups_and_dilation_have_their_algorithms(layers, fits):
    network = Network((10, 10, 4), (*layers, Flatten(), Linear(3)))
    for first in (True, False):
        assert {node.algorithm for node in candidates(split(network.stages), first)} == fits


def test_the_planner_takes_what_suits_a_network():
    def taken(network, target=AVX512, images=16):
        return [node.algorithm for node in choose_nodes(network, target, images) if node.trains]

    one, mlp, pool4 = (model().network((28, 28, 1), 10) for model in (OneConv, TwoConvMlp, TwoConvPool4))
    lenet = Network((28, 28, 1), (Conv2d(6, 5), ReLU(), Conv2d(8, 5), ReLU(), Flatten(), Linear(10)))
    wide = Conv2d(128, 3), ReLU(), Conv2d(128, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(9)
    assert taken(one) == ["filters-fused"]
    assert taken(mlp) == ["lanes", "lanes-argmax", "wide", "skinny"]
    assert taken(pool4) == ["lanes-pair", "wide", "skinny"]
    assert taken(lenet, images=64) == ["lanes", "lanes", "skinny"]
    assert taken(lenet, images=1) == ["channels", "winograd", "skinny"], "empty lanes cost as well"
    for target in (AVX2, AVX512):
        assert taken(Network((16, 16, 64), wide), target, 32) == ["winograd", "winograd-argmax", "skinny"]
    assert taken(MobileNet().network((32, 32, 3), 10), AVX2, 8).count("depthwise") == 6
    nodes = choose_nodes(ResNet(3).network((32, 32, 3), 10), AVX2, 8)
    assert [node.algorithm for node in nodes].count("residual") == 18


@pytest.mark.parametrize("target", [pytest.param(AVX2, marks=pytest.mark.thorough), AVX512], ids=["avx2", "avx512"])
def test_rows_show_every_kernel_of_a_step(target):
    """And an algorithm has a file of its name."""
    last = (4, 4, 1), (BatchNorm2d(), Residual((ReLU(),)), Flatten(), Dropout(0.5), Linear(3))
    names, networks = set(), [network for name, network in NETWORKS.items() if not name.startswith("filters ")]
    for shape, layers in (*networks, last):
        network = Network(shape, layers)
        computing = {stage.name for stage in walk(network.stages) if not isinstance(stage.layer, Flatten)}
        for pair in every_algorithm(network, target):
            plan = Plan(network, replace(target, forced=(pair,)), 1, 9)
            rows = plan.explain(threads=2)
            kernels = [name for name, _ in (*plan.forward, *plan.backward, *plan.gradients)]
            assert [row.kernel for row in rows] == kernels
            assert all(row.cycles >= 0 and row.threads == 2 for row in rows)
            assert {layer for row in rows for layer in row.layers} == computing
            forward = sum(row.macs for row in rows if row.kernel.endswith(".forward"))
            dropped = 0.5 * 36 / 144  # a floor leaves pixels out, and Winograd's algorithm takes 36 for 144
            assert dropped * sum(s.macs for s in network.stages) <= forward <= sum(s.macs for s in network.stages)
            names |= {row.algorithm for row in rows}
    assert names - {"together"} == {algorithm.algorithm for algorithm in ALGORITHMS} | {"reorder"}
    files = [path.stem for path in (Path(simd.__file__).parent / "algorithms").rglob("*.py")]
    assert {name: files.count(name.replace("-", "_")) for name in names} == dict.fromkeys(names, 1)


def test_the_share_of_the_limit_is_of_what_the_core_can_do():
    network = TwoConvMlp().network((28, 28, 1), 10)
    for target in (AVX512, AVX2):
        (row,) = (row for row in Plan(network, target, 1, 8).explain(1) if row.kernel == "linear1.forward")
        assert row.macs == network.stages[6].macs
        assert row.share == pytest.approx(row.macs / (2 * target.lanes * row.cycles), rel=1e-2)
        assert 0.5 < row.share < 1


@each(
    ("conv1", r"backend.algorithms='conv1': must be LAYER:ALGORITHM"),
    ("conv1:lane", r"cannot be computed by 'lane' here; there are channels, .*lanes, .*did you mean 'lanes'"),
    ("conv7:lanes", r"no layer 'conv7' to force; there are conv1, linear1"),
)
def test_an_algorithm_is_forced_and_one_that_is_none_refused(algorithm, message):
    def compiled(algorithm):
        network = OneConv(filters=4).network((8, 8, 1), 10)
        return CpuSimd(1, algorithms=(algorithm,)).compile(network, Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 4)

    assert {row.algorithm for row in compiled("conv1:channels").explain() if "conv1" in row.layers} == {"channels"}
    with pytest.raises(ConfigError, match=message):
        compiled(algorithm)


@pytest.mark.parametrize(("after", "linear"), [((), True), ((Sigmoid(),), True), ((AvgPool2d(1),), False)])
def test_a_window_of_the_whole_image_is_a_linear_layer_where_rows_follow(after, linear):
    network = Network((6, 6, 3), (Conv2d(4, 3), ReLU(), Conv2d(20, 4), *after, Flatten(), Linear(3)))
    chosen = {node.name: node.algorithm for node in choose_nodes(network, AVX2, 16)}
    assert (chosen["conv2"] == "wide") is linear
    assert chosen["conv1"] != "wide"


@pytest.mark.parametrize("images", [1, 3, 8])
def test_a_change_of_layout_leaves_the_rows_of_other_images_alone(images):
    arena, target = Arena(8, 1, images), TARGETS["avx2"]
    x, y = arena.blocked((1, 1, 13)), arena.nc(13)
    memory = np.random.default_rng(0).standard_normal(arena.size + 8 * y.stride).astype(np.float32)
    before, rows = memory.copy(), slice(int(y.offset), int(y.offset) + images * y.stride)
    run = compose("reorder", target, [("to_rows", lambda k: reorder(k, x, y))])
    njit(lambda memory: run(memory, memory, memory, images))(memory)
    expected = before[int(x.offset) :][: 13 * 8].reshape(13, 8).T[:images]
    np.testing.assert_array_equal(memory[rows].reshape(images, -1)[:, :13], expected)
    memory[rows] = before[rows]
    np.testing.assert_array_equal(memory, before)


def test_what_stands_between_convolutions_keeps_their_layout_and_shares_room():
    """No reorder around a pool, an activation or a dropout; an output that no backward pass reads has no room alone."""
    convolution = Conv2d(64, 3, padding="same", bias=False), BatchNorm2d()
    layers = *convolution, GELU(), MaxPool2d(3, 2, "floor+1"), Dropout(0.2), *convolution, AvgPool2d(2), *convolution
    plan = Plan(Network((16, 16, 64), (*layers, MaxPool2d(2), Flatten(), Linear(10))), AVX512, 1, 16)
    assert "reorder" not in {row.algorithm for row in plan.explain(2)}
    norms = [node for node in plan.nodes if node.algorithm == "batch-norm"]
    assert norms[1].y.offset in {node.dy.offset for node in plan.nodes}
