"""Networks to hold whatever runs them to: named ones, one for each odd case, and random ones."""

import functools
import zlib

import conformance
from conformance import check_case, make_case
from hypothesis import HealthCheck, assume, given, seed, settings
from hypothesis import strategies as st

from cnnexp import Loss, MaxPool2d, Network, ReLU, Residual, Sigmoid, Tanh
from cnnexp.errors import NetworkError
from cnnexp.network import GELU, AvgPool2d, BatchNorm2d, Conv2d, Dropout, Flatten, GlobalAvgPool, LeakyReLU, Linear
from cnnexp.testing import END, LOSSES
from cnnexp.testing import NETWORKS as SHIPPED

CONV = Conv2d(4, 3, padding="same", bias=False)
BLOCK = CONV, BatchNorm2d(), ReLU(), CONV, BatchNorm2d()
WIDER = Conv2d(6, 3, padding="same", bias=False), BatchNorm2d()
NETWORKS = {
    **{name: network for name, network in SHIPPED.items() if name not in LOSSES},
    "one_conv": ((8, 8, 1), (Conv2d(4, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(5))),
    "two_conv_mlp": ((10, 10, 1), (
        Conv2d(3, 3), ReLU(), Conv2d(2, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(7, False), ReLU(), Linear(4, False),
    )),
    "two_conv_pool4": ((8, 8, 1), (
        Conv2d(4, 2, padding="same"), ReLU(), Conv2d(4, 2, padding="same"), ReLU(), MaxPool2d(4), Flatten(), Linear(6),
        ReLU(), Linear(3),
    )),
    "one_pixel": ((1, 1, 1), (Conv2d(1, 1), ReLU(), Flatten(), Linear(2))),
    "one_score": ((3,), (Linear(1),)),
    "rows_and_columns_differ": ((5, 9, 2), (Conv2d(3, 3, padding="same"), MaxPool2d(2, padding="auto"), Flatten())),
    "stride_larger_than_kernel": ((7, 7, 2), (Conv2d(3, 1, stride=3), ReLU(), *END)),
    "windows_in_the_padding_alone": ((3, 4, 2), (Conv2d(3, 2, padding=4), ReLU(), MaxPool2d(3, 2, "auto"), Flatten())),
    "auto_padding": ((8, 7, 1), (Conv2d(2, 3, stride=2, padding="auto"), Conv2d(3, 2, 2, "auto"), Flatten())),
    "pools_skip": ((9, 9, 2), (Conv2d(3, 1), MaxPool2d(1, 2), AvgPool2d(2, 3), *END)),
    "pool_larger_than_image": ((2, 3, 1), (Conv2d(2, 1), MaxPool2d(5, padding="auto"), Flatten(), Linear(2))),
    "relu_first": ((4, 4, 2), (ReLU(), Conv2d(3, 2), *END)),
    "pool_first": ((6, 6, 2), (MaxPool2d(2), Conv2d(3, 2), *END)),
    "flatten_twice": ((2, 2, 2), (Flatten(), Flatten(), Linear(3), Flatten(), Linear(3))),
    "elementwise_after_flatten": ((5, 6, 2), (Conv2d(3, 2), MaxPool2d(2, 1), Flatten(), Tanh(), Linear(3))),
    "floor": ((13, 12, 1), (Conv2d(3, 3, 2, "floor"), MaxPool2d(2, padding="floor"), AvgPool2d(2, 3, "floor"), *END)),
    "floor_and_pixels": ((8, 9, 2), (
        Conv2d(4, 3, 2, "floor+1"), ReLU(), MaxPool2d(3, 2, "floor+1"), Conv2d(3, 2, 1, 1), AvgPool2d(2, 2, "floor+1"),
        *END,
    )),
    "floor_fused": ((9, 9, 1), (Conv2d(32, 2), ReLU(), MaxPool2d(3, padding="floor"), *END)),
    "floor_twice": ((9, 9, 1), (
        Conv2d(4, 2), ReLU(), MaxPool2d(3, padding="floor"), Conv2d(4, 1, 2, "floor"), ReLU(), MaxPool2d(1), *END,
    )),
    "dropouts": ((7, 8, 2), (
        Dropout(0.2), Conv2d(3, 2), Dropout(0.5), Tanh(), Conv2d(20, 3), ReLU(), Dropout(0.0), AvgPool2d(2, 1),
        Dropout(0.9), Flatten(), Dropout(0.1), Linear(9), ReLU(), Dropout(0.6), Linear(5), Dropout(0.25),
    )),
    "batch_norm": ((5, 4, 2), (
        Conv2d(3, 2), BatchNorm2d(), ReLU(), Conv2d(4, 2), BatchNorm2d(0.5, 1e-2), Tanh(), BatchNorm2d(1.0), *END,
    )),
    "batch_norm_pooled": ((8, 8, 3), (
        Conv2d(18, 3, padding="same", bias=False), BatchNorm2d(), ReLU(), MaxPool2d(2), Conv2d(5, 1), BatchNorm2d(),
        Residual((Conv2d(5, 3, padding="same"), BatchNorm2d(), MaxPool2d(2)), "padded"), ReLU(),
        BatchNorm2d(), MaxPool2d(2), ReLU(), *END,
    )),
    "batch_norm_first": ((3, 3, 2), (BatchNorm2d(), Conv2d(3, 2), GlobalAvgPool(), Linear(3))),
    "grouped_points": ((4, 3, 2), (Conv2d(6, 1, groups=2), Flatten(), Linear(3))),
    "batch_norm_last": ((3, 3, 2), (Conv2d(3, 2), ReLU(), Residual((ReLU(),)), BatchNorm2d(), Flatten())),
    "batch_norm_before_the_last": ((4, 4, 1), (Dropout(0.3), BatchNorm2d(), Conv2d(4, 1, 3), Flatten())),
    "residual_after_dropout": ((4, 4, 2), (Dropout(0.3), Residual((Conv2d(2, 1),)), *END)),
    "residual_network": ((6, 6, 3), (
        CONV, BatchNorm2d(), ReLU(), Residual(BLOCK), ReLU(), Conv2d(4, 3, 2, "same", bias=False), BatchNorm2d(),
        ReLU(), Residual(BLOCK), ReLU(), GlobalAvgPool(), Dropout(0.2), Linear(5),
    )),
    "residual_padded": ((6, 5, 3), (
        CONV, BatchNorm2d(), ReLU(),
        Residual((Conv2d(6, 3, 2, "floor+1", bias=False), BatchNorm2d(), ReLU(), *WIDER), "padded"), ReLU(),
        Residual((Conv2d(6, 1),), "padded"), Residual((AvgPool2d(1, 3, "floor"),), "padded"), *END,
    )),
    "residual_padded_first": ((4, 4, 2), (Residual((Conv2d(5, 2, 2),), "padded"), GlobalAvgPool(), Linear(3))),
    "depthwise": ((7, 8, 3), (
        Conv2d(3, 3, padding="same", groups=3), ReLU(), Conv2d(10, 1), BatchNorm2d(), ReLU(),
        Conv2d(10, 3, 2, "floor+1", bias=False, groups=10), BatchNorm2d(), ReLU(), Conv2d(17, 1), Tanh(),
        Conv2d(17, 2, 1, "full", groups=17), ReLU(), MaxPool2d(2, padding="floor"), Conv2d(34, 2, groups=17), *END,
    )),
    "depthwise_last": ((5, 5, 9), (Conv2d(9, 1), ReLU(), Conv2d(9, 3, groups=9), ReLU(), *END)),
    "depthwise_dilated": ((9, 8, 9), (
        Conv2d(9, 3, 1, "same", groups=9, dilation=2), ReLU(), Conv2d(9, 2, 2, "floor+3", groups=9, dilation=3), Tanh(),
        Conv2d(9, 3, 3, 4, groups=9, dilation=2), GlobalAvgPool(), Linear(3),
    )),
    "grouped": ((6, 7, 4), (
        Conv2d(6, 3, padding="same", groups=2), ReLU(), MaxPool2d(2, padding="floor"),
        Conv2d(9, 2, 1, "full", groups=3), ReLU(), Conv2d(18, 2, 2, "floor", groups=9), *END,
    )),
    "dilated": ((9, 8, 2), (
        Conv2d(4, 3, padding="same", dilation=2), ReLU(), Conv2d(5, 2, 2, "floor+2", dilation=3), Tanh(),
        Conv2d(6, 2, 1, "full", dilation=2), ReLU(), MaxPool2d(2, padding="floor"), *END,
    )),
    "residual_first": ((4, 4, 2), (Residual((Conv2d(2, 3, padding="same"), ReLU())), GlobalAvgPool(), Linear(3))),
    "residual_nested": ((3, 3, 2), (
        Conv2d(2, 1), Residual((Residual((Conv2d(2, 1), Residual((Sigmoid(),)))), Conv2d(2, 3, padding="same"))),
        Flatten(), Residual((Flatten(),)), Linear(3), Residual((Flatten(), ReLU())),
    )),
    "residual_of_a_view": ((3,), (Linear(3), Residual((Sigmoid(), Residual((Flatten(),)))), Linear(3))),
    "residual_without_parameters": ((3,), (Residual((Sigmoid(),)), Linear(3), Residual((Tanh(), Sigmoid())))),
    "many_filters": ((5, 5, 3), (Conv2d(37, 3), ReLU(), MaxPool2d(3), Flatten(), Linear(11))),
    "rows_unseen": ((1, 5, 2), (Conv2d(3, 1), Conv2d(3, 1, 3, "floor+1", groups=3), Conv2d(9, 1, 3, "floor+1"), *END)),
}  # fmt: skip


@st.composite
def cases(draw, kind=None):
    """Draw a network that holds a layer of a kind of `KINDS`, either loss, with data whose decisions are clear."""
    channels = draw(st.integers(1, 3))
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(channels)))
    binary = draw(st.booleans())
    held = draw(KINDS[kind]) if kind else None
    layers = [] if held is None or isinstance(held, ENDS) else [held]
    assume(fits(shape, layers))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(layers)))
        layers.insert(at, draw(image_layers))
        if not fits(shape, layers):
            layers.pop(at)
    layers.append(GlobalAvgPool() if draw(st.integers(0, 4)) == 0 else Flatten())
    if isinstance(held, ENDS):
        layers[-1:] = [held] if isinstance(held, GlobalAvgPool) else [Flatten(), held]
    for _ in range(draw(st.integers(0, 2))):
        layers.append(draw(flat_layers))
        if not fits(shape, [*layers, Linear(1)]):
            layers.pop()
    if binary:
        layers += [Linear(1, bias=draw(st.booleans())), Sigmoid()]
    elif draw(st.booleans()) or not trains(shape, layers):
        layers.append(Linear(draw(st.integers(1, 5)), bias=draw(st.booleans())))
    loss = Loss.BINARY_CROSS_ENTROPY if binary else Loss.SOFTMAX_CROSS_ENTROPY
    drawn = (draw(st.integers(1, 6)), draw(st.integers(0, 2**16)), draw(st.booleans()))  # images, seed, exact
    case = make_case(Network(shape, tuple(layers)), loss, *drawn)
    assume(conformance.decisions_are_clear(case))
    return case


def check_random_networks(backend, kind, count):
    """Hold a backend to the oracle on `count` networks that hold a layer of a kind, the same ones every time."""
    try:
        for case in _drawn(kind, count):
            check_case(backend, case)
    except Exception:
        _each(kind, count, lambda case: check_case(backend, case))  # shows the smallest such network
        raise


@functools.cache
def _drawn(kind, count):
    """Draw once for all backends: to draw a case, and the oracle's answer, take longer than most of them."""
    found = []
    _each(kind, count, found.append)
    return found


def _each(kind, count, check):
    @seed(zlib.crc32(kind.encode()))
    @settings(max_examples=count, database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases(kind))
    def each(case):
        check(case)

    each()


def fits(shape, layers) -> bool:
    """Tell whether the layers fit."""
    return trains(shape, (*layers, Flatten(), Linear(1)))


def trains(shape, layers) -> bool:
    """Tell whether the layers fit, and there is something to train."""
    try:
        Network(shape, tuple(layers))
    except NetworkError:
        return False
    return True


ENDS = GlobalAvgPool | Flatten | Linear  # what stands at the end of the images, or after it
sides = st.integers(1, 4)
paddings = st.sampled_from(["valid", "same", "full", "auto", "floor", 0, 1, 3])
pool_paddings = st.sampled_from(["valid", "auto", "floor"])
RULES = ReLU(), Sigmoid(), Tanh(), LeakyReLU(0.1), GELU()
elementwise = st.sampled_from(RULES)
places = (sides, st.integers(1, 3), paddings, st.booleans())
convolutions = st.one_of(
    st.builds(Conv2d, st.integers(1, 5), *places),
    st.builds(Conv2d, st.integers(1, 6), *places, st.integers(1, 3), st.integers(1, 3)),
)
max_pools, avg_pools = (st.builds(pool, sides, st.none() | sides, pool_paddings) for pool in (MaxPool2d, AvgPool2d))
norms = st.builds(BatchNorm2d, st.sampled_from([0.1, 1.0]))
plain_image_layers = st.one_of(convolutions, max_pools, avg_pools, elementwise, norms, st.just(Dropout(0.3)))


@st.composite
def residuals(draw, layers, shape_keeping, nested=None):
    """Draw a Residual whose layers mostly keep the shape; it may hold another, and shall if `nested`."""
    inner = draw(st.lists(shape_keeping, min_size=1, max_size=2))
    if draw(st.booleans()) if nested is None else nested:
        inner.append(Residual(tuple(draw(st.lists(layers, min_size=1, max_size=2)))))
    if draw(st.integers(0, 3)) == 0:
        wider = Conv2d(draw(st.integers(1, 5)), 1, draw(st.integers(1, 3)), "floor")
        return Residual((*inner, wider), "padded")
    return Residual(tuple(inner))


same_convolutions = st.builds(Conv2d, st.integers(1, 3), sides, st.just(1), st.just("same"), st.booleans())
image_layers = st.one_of(plain_image_layers, residuals(same_convolutions, elementwise | same_convolutions))
plain_flat_layers = st.one_of(
    st.builds(Linear, st.integers(1, 9), st.booleans()), elementwise, st.just(Flatten()), st.just(Dropout(0.4))
)
flat_layers = st.one_of(plain_flat_layers, residuals(plain_flat_layers, elementwise | plain_flat_layers))
KINDS = {
    **{type(layer).__name__: st.just(layer) for layer in (*RULES, Flatten(), GlobalAvgPool(), Dropout(0.3))},
    "Conv2d": convolutions,
    "MaxPool2d": max_pools,
    "AvgPool2d": avg_pools,
    "BatchNorm2d": norms,
    "Linear": st.builds(Linear, st.integers(1, 9), st.booleans()),
    "Residual": residuals(elementwise, elementwise, nested=False),
    "Residual in a Residual": residuals(elementwise, elementwise, nested=True),
}
"""By what it is, a layer that a random network holds."""
