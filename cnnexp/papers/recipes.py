"""Recipes that people know, from Keras's and PyTorch's examples and from papers, each under three backends."""

from cnnexp.papers.experiment import Column, Experiment, line
from cnnexp.papers.measures import accuracy, training_s

START = (
    "All three rows start from the same parameters, see the same batches and draw the same masks of dropout, made on "
    "the host in the peers' rows; the frameworks' own examples start from other random numbers."
)
CHOICE = "Accuracy is of the test images after the last epoch: nothing is chosen by them. Evaluation is not timed."


def recipe(title: str, source: str, published: float | None, *notes: str) -> Experiment:
    """Return the table of a recipe: mean over the seeds of the accuracy, %, and the seconds of training."""
    return Experiment(
        title=title,
        source=source,
        quantity="accuracy of the test images (%) and training time (s)",
        lines=tuple(line(backend, published) for backend in ("cpu-simd", "keras", "torch")),
        columns=(Column("accuracy (%)", measure=accuracy), Column("training time (s)", measure=training_s)),
        notes=(*notes, START, CHOICE),
    )


EXPERIMENTS = {
    "keras_mnist_convnet": recipe(
        "Keras's simple MNIST convnet",
        "Keras, code examples, mnist_convnet (Chollet 2015)",
        99.0,
        'The example says "about 99 %". Its epsilon of Adam is 1e-7, ours too.',
    ),
    "keras_mnist_cnn": recipe(
        "Keras's older MNIST example",
        "Keras 2, examples/mnist_cnn.py",
        99.25,
        "Adadelta as in Keras 2: rate 1.0, rho 0.95, epsilon 1e-7. Weights begin as PyTorch draws them.",
    ),
    "pytorch_mnist": recipe(
        "PyTorch's MNIST example",
        "PyTorch, examples/mnist/main.py",
        None,
        "The example prints no accuracy to compare with. It subtracts 0.1307 from every pixel and divides by 0.3081; "
        "here pixels are fractions from 0 to 1.",
    ),
    "lenet5": recipe(
        "LeNet-5",
        "LeCun, Bottou, Bengio and Haffner (1998), section III",
        99.05,
        "The paper's sub-sampling layers have a weight and a bias for each map, its third layer is connected in part, "
        "its last layer has radial basis functions and its steps are scaled by a diagonal Hessian, one image each. "
        "Here: average pooling, all connections, softmax, and momentum with batches of 32, its rate falling by steps.",
    ),
    "simard2003": recipe(
        "Small convolutions and elastic distortions",
        "Simard, Steinkraus and Platt (2003), section 5",
        99.6,
        "The paper's steps are of one image, and its passes many more. Here: momentum with batches of 32.",
    ),
    "resnet20_cifar10": recipe(
        "ResNet-20 on CIFAR-10",
        "He, Zhang, Ren and Sun (2016), section 4.2, table 6",
        91.25,
        "The paper subtracts the mean of every pixel; here pixels are fractions from 0 to 1.",
    ),
}
