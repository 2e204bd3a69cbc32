import pytest
from tables import each

from cnnexp.network import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Residual, Sigmoid
from cnnexp.network.losses import Loss, check_loss
from cnnexp.network.models import Custom, Ffn, Knm, MobileNet, OneConv, ResNet, TwoConvMlp, TwoConvPool4
from cnnexp.network.shapes import walk

MNIST = (28, 28, 1)


@each(
    (OneConv(), 108_810),  # castanheira: 10 d + 1690 d + 10, d = 64
    (OneConv(filters=32), 10 * 32 + 1690 * 32 + 10),
    (OneConv(filters=256), 10 * 256 + 1690 * 256 + 10),
    (TwoConvMlp(), 105_496),  # garg, as published: no biases in the linear layers
    (TwoConvMlp(linear_bias=True), 105_634),
    (TwoConvPool4(), 26_594),  # rendon
    (Knm(kernel=5, filters=50, hidden=100), 26 * 50 + (12 * 12 * 50 + 1) * 100 + 101 * 10),
)
def test_parameter_counts(model, count):
    assert model.network(MNIST, 10).parameter_count == count


def test_knm_ffn_and_custom_are_their_layers():
    network = Knm().network((48, 48, 1), 7)
    assert network.output_shape == (7,)
    assert [stage.output_shape for stage in network.stages][:3] == [(44, 44, 50), (44, 44, 50), (22, 22, 50)]

    network = Ffn(hidden=(5, 4)).network((2,), 2)  # for points it ends in one sigmoid
    assert network.layers == (Linear(5), ReLU(), Linear(4), ReLU(), Linear(1), Sigmoid())
    assert Ffn().loss == Loss.BINARY_CROSS_ENTROPY
    check_loss(network, Ffn().loss, 2)
    model = Ffn(hidden=(), loss_name="softmax_cross_entropy")
    assert model.network(MNIST, 10).layers == Custom(layers=(Flatten(), Linear(10))).network(MNIST, 10).layers
    assert (model.network(MNIST, 10).layers, model.loss) == ((Flatten(), Linear(10)), Loss.SOFTMAX_CROSS_ENTROPY)


@pytest.mark.parametrize("model", [OneConv, TwoConvMlp, TwoConvPool4, Knm])
def test_auto_padding_reaches_the_pooling_layer(model):
    layers = model(kernel=4, pool=3, padding="auto").network((28, 28, 1), 10).layers
    convs, pools = ([layer for layer in layers if isinstance(layer, kind)] for kind in (Conv2d, MaxPool2d))
    assert {layer.padding for layer in convs + pools} == {"auto"}


@each(
    # the paper's table 6 rounds them to 0.27, 0.46, 0.66 and 0.85 million; by its rule for 10 classes
    *((ResNet(blocks), n) for blocks, n in ((3, 269_722), (5, 464_154), (7, 658_586), (9, 853_018))),
    # by hand: 3x3 convolutions without bias, 2 numbers per normalized channel, a linear layer of 10
    (
        ResNet(downsample="convolution"),
        9 * (3 * 16 + 2 * 16**2 + 16 * 32 + 2 * 32**2 + 32 * 64 + 2 * 64**2) + 2 * 3 * (16 + 32 + 64) + 650,
    ),
    (
        ResNet(2, 4, downsample="convolution"),
        9 * (12 + 4 * 16 + 32 + 4 * 64 + 128 + 4 * 256) + 2 * 5 * (4 + 8 + 16) + 170,
    ),
)
def test_resnet_has_the_published_parameters(model, parameters):
    network, padded = model.network((32, 32, 3), 10), model.downsample != "convolution"
    assert network.parameter_count == parameters
    weights = [stage for stage in walk(network.stages) if isinstance(stage.layer, Conv2d | Linear)]
    assert len(weights) == 6 * model.blocks + (2 if padded else 4)
    sides = [(32, model.width), (16, 2 * model.width), (8, 4 * model.width)]
    residuals = [stage for stage in network.stages if isinstance(stage.layer, Residual)]
    shapes = [stage.output_shape for stage in residuals]
    assert shapes == [(side, side, width) for side, width in sides for _ in range(model.blocks)]
    shortcuts = [i for i, stage in enumerate(residuals) if stage.layer.shortcut == "padded"]
    assert shortcuts == ([model.blocks, 2 * model.blocks] if padded else [])


def test_mobilenet():
    network = MobileNet(blocks=1, width=4).network((28, 28, 1), 10)
    # by hand: depthwise 3 x 3 of 4, 8, 16 channels and 1 x 1 to twice as many, 2 numbers per normalized channel
    depthwise, pointwise = 9 * (4 + 8 + 16), 4 * 8 + 8 * 16 + 16 * 32
    assert network.parameter_count == 9 * 4 + depthwise + pointwise + 2 * (2 * (4 + 8 + 16) + 32) + 330
    of_channels = [stage for stage in network.stages if isinstance(stage.layer, Conv2d) and stage.layer.groups > 1]
    assert [stage.output_shape for stage in of_channels] == [(28, 28, 4), (14, 14, 8), (7, 7, 16)]
    assert [stage.macs for stage in of_channels] == [9 * 28**2 * 4, 9 * 14**2 * 8, 9 * 7**2 * 16]
    assert MobileNet().network((32, 32, 3), 10).output_shape == (10,)
