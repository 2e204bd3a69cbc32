"""Every backend of this machine against the oracle: the contract of `cnnexp.backends.protocol`."""

import conformance
import numpy as np
import pytest
import reference
from backends import outside_layer
from conformance import Case, assert_same_state, check_backend, check_case, check_training, make_case
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cnnexp.backends import BACKENDS, backend_class
from cnnexp.errors import BackendUnavailable, CheckpointError, ConfigError, NetworkError
from cnnexp.network import (
    GELU,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool,
    LeakyReLU,
    Linear,
    MaxPool2d,
    Network,
    ReLU,
    Residual,
    Sigmoid,
    Tanh,
)
from cnnexp.network.losses import Loss
from cnnexp.optimizers import OPTIMIZERS, SGD, Adam

# a backend that compiles anew for each network gets fewer of them
EXAMPLES = {"cpu-simd": 10, "gpu-fused": 10, "gpu": 10}


@pytest.fixture(params=BACKENDS)
def backend(request):
    try:
        return backend_class(request.param)()
    except BackendUnavailable as error:
        pytest.skip(str(error))


BLOCK = (
    *(Conv2d(4, 3, padding="same", bias=False), BatchNorm2d(), ReLU()),
    *(Conv2d(4, 3, padding="same", bias=False), BatchNorm2d()),
)
NETWORKS = {
    "one_conv": ((8, 8, 1), (Conv2d(4, 3), ReLU(), MaxPool2d(2), Flatten(), Linear(5))),
    "two_conv_mlp": (
        (10, 10, 1),
        (
            *(Conv2d(3, 3), ReLU(), Conv2d(2, 3), ReLU(), MaxPool2d(2)),
            *(Flatten(), Linear(7, bias=False), ReLU(), Linear(4, bias=False)),
        ),
    ),
    "two_conv_pool4": (
        (8, 8, 1),
        (
            *(Conv2d(4, 2, padding="same"), ReLU(), Conv2d(4, 2, padding="same"), ReLU(), MaxPool2d(4)),
            *(Flatten(), Linear(6), ReLU(), Linear(3)),
        ),
    ),
    "knm_colour": ((9, 9, 3), (Conv2d(5, 4), ReLU(), MaxPool2d(2), Flatten(), Linear(6), ReLU(), Linear(7))),
    "one_pixel": ((1, 1, 1), (Conv2d(1, 1), ReLU(), Flatten(), Linear(2))),
    "one_score": ((3,), (Linear(1),)),
    "rows_and_columns_differ": ((5, 9, 2), (Conv2d(3, 3, padding="same"), MaxPool2d(2, padding="auto"), Flatten())),
    "stride": ((9, 7, 2), (Conv2d(3, 3, stride=2), ReLU(), Conv2d(2, 2, padding="full"), Flatten(), Linear(3))),
    "stride_larger_than_kernel": ((7, 7, 2), (Conv2d(3, 1, stride=3), ReLU(), Flatten(), Linear(3))),
    "windows_in_the_padding_alone": ((3, 4, 2), (Conv2d(3, 2, padding=4), ReLU(), MaxPool2d(3, 2, "auto"), Flatten())),
    "auto_padding": ((8, 7, 1), (Conv2d(2, 3, stride=2, padding="auto"), Conv2d(3, 2, 2, "auto"), Flatten())),
    "pools_overlap": ((9, 9, 2), (Conv2d(3, 3), MaxPool2d(3, 2), AvgPool2d(2, 1), Flatten(), Linear(3))),
    "pools_skip": ((9, 9, 2), (Conv2d(3, 1), MaxPool2d(1, 2), AvgPool2d(2, 3), Flatten(), Linear(3))),
    "pool_larger_than_image": ((2, 3, 1), (Conv2d(2, 1), MaxPool2d(5, padding="auto"), Flatten(), Linear(2))),
    "averages_at_the_edge": ((7, 7, 2), (Conv2d(3, 2), AvgPool2d(4, padding="auto"), Flatten(), Linear(3))),
    "relu_first": ((4, 4, 2), (ReLU(), Conv2d(3, 2), Flatten(), Linear(3))),
    "pool_first": ((6, 6, 2), (MaxPool2d(2), Conv2d(3, 2), Flatten(), Linear(3))),
    "flatten_first": ((4, 4, 2), (Flatten(), Linear(5), ReLU(), Linear(3))),
    "flatten_twice": ((2, 2, 2), (Flatten(), Flatten(), Linear(3), Flatten(), Linear(3))),
    "sigmoids": ((4, 4, 1), (Conv2d(3, 2), Sigmoid(), Flatten(), Linear(3), Sigmoid(), Linear(3))),
    "elementwise": (
        (4, 5, 2),
        (
            *(Tanh(), Conv2d(3, 2), GELU(), Conv2d(2, 2), LeakyReLU(0.2), Flatten()),
            *(Linear(5), Tanh(), Linear(4), GELU(), Linear(3), LeakyReLU(), Linear(3)),
        ),
    ),
    "global_average": ((5, 3, 2), (Conv2d(3, 2), ReLU(), GlobalAvgPool(), Linear(3))),
    "floor": (
        (13, 12, 1),
        (Conv2d(3, 3, 2, "floor"), MaxPool2d(2, padding="floor"), AvgPool2d(2, 3, "floor"), Flatten(), Linear(3)),
    ),
    "floor_fused": ((9, 9, 1), (Conv2d(32, 2), ReLU(), MaxPool2d(3, padding="floor"), Flatten(), Linear(3))),
    "floor_twice": (
        (9, 9, 1),
        (
            *(Conv2d(4, 2), ReLU(), MaxPool2d(3, padding="floor")),
            *(Conv2d(4, 1, 2, "floor"), ReLU(), MaxPool2d(1), Flatten(), Linear(3)),
        ),
    ),
    "dropout": (
        (4, 3, 2),
        (
            *(Dropout(0.2), Conv2d(3, 2), Dropout(0.5), ReLU(), Flatten()),
            *(Dropout(0.1), Linear(6), Residual((Dropout(0.7), Linear(6))), Dropout(0.0), Linear(3)),
        ),
    ),
    "batch_norm": (
        (5, 4, 2),
        (
            *(Conv2d(3, 2, bias=False), BatchNorm2d(), ReLU(), Conv2d(4, 2), BatchNorm2d(0.5, 1e-2), Tanh()),
            *(BatchNorm2d(1.0), Flatten(), Linear(3)),
        ),
    ),
    "batch_norm_first": ((3, 3, 2), (BatchNorm2d(), Conv2d(3, 2), GlobalAvgPool(), Linear(3))),
    "residual_network": (
        (6, 6, 3),
        (
            *(Conv2d(4, 3, padding="same", bias=False), BatchNorm2d(), ReLU(), Residual(BLOCK), ReLU()),
            *(Conv2d(4, 3, 2, "same", bias=False), BatchNorm2d(), ReLU(), Residual(BLOCK), ReLU()),
            *(GlobalAvgPool(), Dropout(0.2), Linear(5)),
        ),
    ),
    "residual": (
        (5, 4, 2),
        (
            *(Conv2d(3, 2), Residual((ReLU(), Conv2d(3, 3, padding="same"), Tanh())), MaxPool2d(3, padding="floor")),
            *(Flatten(), Residual((Linear(3, bias=False),)), Linear(3)),
        ),
    ),
    "residual_first": ((4, 4, 2), (Residual((Conv2d(2, 3, padding="same"), ReLU())), GlobalAvgPool(), Linear(3))),
    "residual_nested": (
        (3, 3, 2),
        (
            *(Conv2d(2, 1), Residual((Residual((Conv2d(2, 1), Residual((Sigmoid(),)))), Conv2d(2, 3, padding="same")))),
            *(Flatten(), Residual((Flatten(),)), Linear(3), Residual((Flatten(), ReLU()))),
        ),
    ),
    "residual_without_parameters": ((3,), (Residual((Sigmoid(),)), Linear(3), Residual((Tanh(), Sigmoid())))),
    "no_bias": ((5, 5, 2), (Conv2d(3, 2, bias=False), ReLU(), Conv2d(2, 2, bias=False), Flatten())),
    "many_filters": ((5, 5, 3), (Conv2d(37, 3), ReLU(), MaxPool2d(3), Flatten(), Linear(11))),
}


@pytest.mark.parametrize("images", [1, 5])
@pytest.mark.parametrize("name", NETWORKS)
def test_network(backend, name, images):
    check_backend(backend, Network(*NETWORKS[name]), images=images)


def test_a_users_own_layer_from_outside_the_package(backend):
    with outside_layer.network() as network:
        check_backend(backend, network)


@pytest.mark.parametrize("name", ["one_conv", "two_conv_mlp", "pools_overlap"])
def test_ties_and_dead_relus(backend, name):
    check_backend(backend, Network(*NETWORKS[name]), images=9, exact=True)


@pytest.mark.parametrize(
    "layers", [(Linear(1), Sigmoid()), (Linear(8), ReLU(), Linear(4), ReLU(), Linear(1), Sigmoid())]
)
def test_binary_cross_entropy(backend, layers):
    check_backend(backend, Network((2,), layers), loss=Loss.BINARY_CROSS_ENTROPY, images=20, seed=1)


@pytest.mark.parametrize("loss", [Loss.MEAN_SQUARED_ERROR, Loss("softmax_cross_entropy", reference.SMOOTHING)])
def test_other_losses(backend, loss):
    check_backend(backend, Network((4,), (Linear(5), Tanh(), Linear(3))), loss=loss, images=7)


def test_saturated_binary_scores_stay_finite(backend):
    network = Network((1,), (Linear(1), Sigmoid()))
    parameters = np.array([1, 0], np.float32)
    images = np.array([[-200], [-200], [200], [200]], np.float32)
    case = Case(network, Loss.BINARY_CROSS_ENTROPY, parameters, images, np.array([0, 1, 0, 1]))
    program = backend.compile(network, case.loss, SGD(), 4)
    program.restore({"parameters": parameters})
    totals, gradient = program.gradients(program.load(images, case.labels), np.arange(4))
    assert totals.loss == pytest.approx(200)
    assert totals.correct == 2
    assert np.isfinite(gradient).all()
    program.close()


def test_huge_scores_stay_finite(backend):
    network = Network((1,), (Linear(3, bias=False),))
    case = Case(
        network, Loss.SOFTMAX_CROSS_ENTROPY, np.array([-1e4, 0, 1e4], np.float32), np.ones((2, 1), np.float32),
        np.array([0, 2]),
    )  # fmt: skip
    check_case(backend, case)


def test_bytes_stand_for_fractions(backend):
    network = Network(*NETWORKS["one_conv"])
    case = make_case(network)
    case.images = np.random.default_rng(3).integers(0, 256, case.images.shape).astype(np.uint8)
    assert conformance.decisions_are_clear(case)
    check_case(backend, case)


def test_images_that_may_not_be_written(backend):
    case = make_case(Network(*NETWORKS["one_conv"]))
    case.images.flags.writeable = False
    case.labels.flags.writeable = False
    check_case(backend, case)


def test_large_sums(backend):
    # rounding grows with the number of terms: as many as a batch of 100 at 28x28
    network = Network((28, 28, 1), (Conv2d(2, 3), ReLU(), Flatten(), Linear(4)))
    check_case(backend, make_case(network, images=3 if backend.name == "python" else 101))


@st.composite
def cases(draw):
    """Draw a network, both losses, with data whose decisions are clear."""
    channels = draw(st.integers(1, 3))
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(channels)))
    binary = draw(st.booleans())
    layers = []
    for _ in range(draw(st.integers(0, 4))):
        layers.append(draw(image_layers))
        if not fits(shape, layers):
            layers.pop()
    layers.append(GlobalAvgPool() if draw(st.integers(0, 4)) == 0 else Flatten())
    for _ in range(draw(st.integers(0, 2))):
        layers.append(draw(flat_layers))
        if not fits(shape, [*layers, Linear(1)]):
            layers.pop()
    if binary:
        layers += [Linear(1, bias=draw(st.booleans())), Sigmoid()]
    elif draw(st.booleans()) or not trains(shape, layers):
        layers.append(Linear(draw(st.integers(1, 5)), bias=draw(st.booleans())))
    case = make_case(
        Network(shape, tuple(layers)),
        Loss.BINARY_CROSS_ENTROPY if binary else Loss.SOFTMAX_CROSS_ENTROPY,
        images=draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 2**16)),
        exact=draw(st.booleans()),
    )
    assume(conformance.decisions_are_clear(case))
    return case


def fits(shape, layers) -> bool:
    """Tell whether the layers fit."""
    try:
        Network(shape, (*layers, Flatten(), Linear(1)))
    except NetworkError:
        return False
    return True


def trains(shape, layers) -> bool:
    """Tell whether there is something to train."""
    try:
        Network(shape, tuple(layers))
    except NetworkError:
        return False
    return True


sides = st.integers(1, 4)
paddings = st.sampled_from(["valid", "same", "full", "auto", "floor", 0, 1, 3])
pool_paddings = st.sampled_from(["valid", "auto", "floor"])
elementwise = st.sampled_from([ReLU(), Sigmoid(), Tanh(), LeakyReLU(0.1), GELU()])
plain_image_layers = st.one_of(
    st.builds(Conv2d, st.integers(1, 5), sides, st.integers(1, 3), paddings, st.booleans()),
    st.builds(MaxPool2d, sides, st.one_of(st.none(), sides), pool_paddings),
    st.builds(AvgPool2d, sides, st.one_of(st.none(), sides), pool_paddings),
    elementwise,
    st.builds(BatchNorm2d, st.sampled_from([0.1, 1.0])),
    st.just(Dropout(0.3)),
)


@st.composite
def residuals(draw, layers, shape_keeping):
    """Draw a Residual whose layers mostly keep the shape; it may hold another."""
    inner = draw(st.lists(shape_keeping, min_size=1, max_size=2))
    if draw(st.booleans()):
        inner.append(Residual(tuple(draw(st.lists(layers, min_size=1, max_size=2)))))
    return Residual(tuple(inner))


same_convolutions = st.builds(Conv2d, st.integers(1, 3), sides, st.just(1), st.just("same"), st.booleans())
image_layers = st.one_of(plain_image_layers, residuals(same_convolutions, elementwise | same_convolutions))
plain_flat_layers = st.one_of(
    st.builds(Linear, st.integers(1, 9), st.booleans()), elementwise, st.just(Flatten()), st.just(Dropout(0.4))
)
flat_layers = st.one_of(plain_flat_layers, residuals(plain_flat_layers, elementwise | plain_flat_layers))


def test_random_networks(backend):
    @settings(
        max_examples=EXAMPLES.get(backend.name, 40),
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.filter_too_much],
    )
    @given(case=cases())
    def check(case):
        check_case(backend, case)

    check()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains(backend, name):
    case = make_case(Network(*NETWORKS["one_conv"]), images=6)
    check_training(backend, case, OPTIMIZERS[name](weight_decay=0.01))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_continues_on_any_backend(backend, name):
    case, optimizer = make_case(Network(*NETWORKS["one_conv"]), images=6), OPTIMIZERS[name]()
    states = []
    for first, second in ((backend, backend_class("numpy")()), (backend_class("numpy")(), backend)):
        state = {"parameters": case.parameters}
        for half in (first, second):
            program = half.compile(case.network, case.loss, optimizer, 3)
            program.restore(state)
            program.train(program.load(case.images, case.labels), np.arange(6), 0.01)
            state = program.state()
            program.close()
        states.append(state)
    assert int(states[0]["step"]) == int(states[1]["step"]) == 4
    for key in ("parameters", *optimizer.slots):
        np.testing.assert_allclose(states[0][key], states[1][key], rtol=1e-4, atol=1e-5)


def test_programs_of_one_process_leave_each_other_alone(backend):
    case = make_case(Network(*NETWORKS["one_conv"]), images=6)
    alone = _trained(backend, case)
    one = backend.compile(case.network, case.loss, Adam(), 3)
    other = backend_class("cpu")().compile(case.network, case.loss, Adam(), 3)
    for program in (one, other):
        program.restore({"parameters": case.parameters})
    for start in (0, 3):
        for program in (one, other):
            program.train(program.load(case.images, case.labels), np.arange(start, start + 3), 0.01)
    assert_same_state(one.state(), alone)
    one.close()
    other.close()


def _trained(backend, case) -> dict:
    program = backend.compile(case.network, case.loss, Adam(), 3)
    program.restore({"parameters": case.parameters})
    program.train(program.load(case.images, case.labels), np.arange(6), 0.01)
    program.close()
    return program.state()


def test_a_state_of_another_network_is_refused(backend):
    program = backend.compile(Network((3,), (Linear(2),)), Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 2)
    with pytest.raises(CheckpointError, match=r"7.*8"):
        program.restore({"parameters": np.zeros(7, np.float32)})
    program.close()


def test_a_loss_that_does_not_suit_is_refused(backend):
    with pytest.raises(NetworkError, match="Sigmoid last"):
        backend.compile(Network((3,), (Linear(2),)), Loss.BINARY_CROSS_ENTROPY, SGD(), 2)


def test_a_backend_says_what_it_is(backend):
    assert backend.name in BACKENDS
    assert backend.threads >= 1
    assert backend.device_name
    program = backend.compile(Network((3,), (Linear(2),)), Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 2)
    assert program.compile_s >= 0
    assert program.batch_size == 2
    program.close()


@pytest.mark.parametrize("name", ["numpy-parallel", "unrolled-parallel", "cpu-parallel"])
@pytest.mark.parametrize("threads", [0, -1, 10_000])
def test_threads_out_of_range(name, threads):
    with pytest.raises(ConfigError, match=rf"backend.threads={threads}: must be 1 to \d+"):
        backend_class(name)(threads=threads)


def test_an_unknown_backend():
    with pytest.raises(ConfigError, match=r"'cpu-paralel'.*did you mean 'cpu-parallel'"):
        backend_class("cpu-paralel")
