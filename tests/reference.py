"""The oracle: networks, losses and optimizers in float64, written to be read, and importing nothing from cnnexp.

A network is a list of dicts, one per layer: `kind`, its class in lower case, and what the layer needs, e.g.
`{"kind": "conv2d", "weight": w, "bias": b, "stride": 1, "padding": "same"}`. Images are (N, H, W, C).
"""

from __future__ import annotations

import math

import numpy as np


def geometry(size, window, stride, padding):
    """Return (zeros before the first pixel, number of windows) along one axis."""
    if str(padding).startswith("floor"):
        before = int(padding.partition("+")[2] or 0)
        return before, (size + 2 * before - window) // stride + 1
    if padding == "same":
        count = -(-size // stride)
        return max((count - 1) * stride + window - size, 0) // 2, count
    if padding == "auto":
        padded = max(size, window)
        padded += (window - padded) % stride
        return (padded - size) // 2, (padded - window) // stride + 1
    before = {"valid": 0, "full": window - 1}.get(padding, padding)
    return before, (size + 2 * before - window) // stride + 1


def axes(x, window, layer):
    """Return the geometry of rows and of columns of images x, the elements of a window `dilation` pixels apart."""
    covered = (window - 1) * layer.get("dilation", 1) + 1
    return [geometry(size, covered, layer["stride"], layer["padding"]) for size in x.shape[1:3]]


def places(x, window, layer):
    """Yield (p, q, i, j, row, column) of every window element that lies on a pixel of images x."""
    (top, rows), (left, columns) = axes(x, window, layer)
    stride, dilation = layer["stride"], layer.get("dilation", 1)
    for p, q, i, j in np.ndindex(rows, columns, window, window):
        row, column = p * stride + i * dilation - top, q * stride + j * dilation - left
        if 0 <= row < x.shape[1] and 0 <= column < x.shape[2]:
            yield p, q, i, j, row, column


def filled(value, x, window, layer, channels):
    """Return an output whose every number is a value."""
    return np.full((len(x), *(count for _, count in axes(x, window, layer)), channels), value)


def by_group(x, count):
    """Return the last axis of x, channels or filters, as (count, those of a group)."""
    return x.reshape(*x.shape[:-1], count, -1)


def conv2d(x, layer):
    w = layer["weight"]
    y, count = filled(0.0, x, len(w), layer, w.shape[3]), x.shape[3] // w.shape[2]
    inputs, weights, outputs = (by_group(array, count) for array in (x, w, y))
    for p, q, i, j, row, column in places(x, len(w), layer):
        outputs[:, p, q] += np.einsum("ngc,cgf->ngf", inputs[:, row, column], weights[i, j])
    return y if layer["bias"] is None else y + layer["bias"]


def conv2d_backward(x, y, dy, layer):
    w = layer["weight"]
    dx, dw, count = np.zeros_like(x), np.zeros_like(w), x.shape[3] // w.shape[2]
    inputs, weights, d_outputs, d_inputs, d_weights = (by_group(array, count) for array in (x, w, dy, dx, dw))
    for p, q, i, j, row, column in places(x, len(w), layer):
        d_inputs[:, row, column] += np.einsum("ngf,cgf->ngc", d_outputs[:, p, q], weights[i, j])
        d_weights[i, j] += np.einsum("ngc,ngf->cgf", inputs[:, row, column], d_outputs[:, p, q])
    return dx, dw, dy.sum(axis=(0, 1, 2))


def maxpool2d(x, layer, where=None):
    """Return the largest value of every window; leave in `where` the (row, column) of the first pixel that has it."""
    y = filled(-np.inf, x, layer["pool"], layer, x.shape[3])
    for p, q, _, _, row, column in places(x, layer["pool"], layer):
        larger = x[:, row, column] > y[:, p, q]
        y[:, p, q][larger] = x[:, row, column][larger]
        if where is not None:
            where[:, p, q][larger] = row, column
    return y


def maxpool2d_backward(x, y, dy, layer):
    dx, where = np.zeros_like(x), np.zeros((*dy.shape, 2), int)
    maxpool2d(x, layer, where)
    n, _, _, c = np.indices(dy.shape)
    np.add.at(dx, (n, where[..., 0], where[..., 1], c), dy)
    return dx, None, None


def window_sums(x, layer):
    y = filled(0.0, x, layer["pool"], layer, x.shape[3])
    for p, q, _, _, row, column in places(x, layer["pool"], layer):
        y[:, p, q] += x[:, row, column]
    return y


def avgpool2d(x, layer):
    return window_sums(x, layer) / window_sums(np.ones_like(x[:1]), layer)


def avgpool2d_backward(x, y, dy, layer):
    dx, share = np.zeros_like(x), dy / window_sums(np.ones_like(x[:1]), layer)
    for p, q, _, _, row, column in places(x, layer["pool"], layer):
        dx[:, row, column] += share[:, p, q]
    return dx, None, None


erf = np.vectorize(math.erf, otypes=[float])
ELEMENTWISE = {  # y of (x, layer), and dy/dx of (x, y, layer)
    "relu": (lambda x, layer: np.where(x > 0, x, 0.0), lambda x, y, layer: x > 0),
    "leakyrelu": (
        lambda x, layer: np.where(x > 0, x, layer["slope"] * x),
        lambda x, y, layer: np.where(x > 0, 1, layer["slope"]),
    ),
    "sigmoid": (lambda x, layer: np.exp(-np.logaddexp(0, -x)), lambda x, y, layer: y * (1 - y)),
    "tanh": (lambda x, layer: np.tanh(x), lambda x, y, layer: 1 / np.cosh(x) ** 2),
    "gelu": (
        lambda x, layer: x / 2 * (1 + erf(x / math.sqrt(2))),
        lambda x, y, layer: (1 + erf(x / math.sqrt(2))) / 2 + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi),
    ),
}


def chain_rule(derivative):
    """Return the backward pass of an elementwise layer."""
    return lambda x, y, dy, layer: (dy * derivative(x, y, layer), None, None)


def globalavgpool(x, layer):
    return x.mean(axis=(1, 2))


def globalavgpool_backward(x, y, dy, layer):
    return np.broadcast_to(dy[:, None, None] / (x.shape[1] * x.shape[2]), x.shape), None, None


def flatten(x, layer):
    return x.reshape(len(x), -1)


def flatten_backward(x, y, dy, layer):
    return dy.reshape(x.shape), None, None


def linear(x, layer):
    y = x @ layer["weight"]
    return y if layer["bias"] is None else y + layer["bias"]


def linear_backward(x, y, dy, layer):
    return dy @ layer["weight"].T, x.T @ dy, dy.sum(axis=0)


def shortcut(x, layer):
    """Return a view of the pixels that are added, every `step`-th: option A of He et al. 2016, section 4.2."""
    return x[:, :: layer["step"], :: layer["step"]] if "step" in layer else x


def residual(x, layer):
    y = forward(layer["layers"], x)[-1].copy()
    y[..., : x.shape[-1]] += shortcut(x, layer)
    return y


def residual_backward(x, y, dy, layer):
    """Return dx, and in the place of dw what `backward` found of the layers inside."""
    dx, found = backward(layer["layers"], forward(layer["layers"], x), dy)
    dx = dx.copy()
    shortcut(dx, layer)[...] += dy[..., : x.shape[-1]]
    return dx, found, None


def dropout(x, layer):
    """In a step of training `layer` holds what is `kept` of each image."""
    return x * layer["kept"] / (1 - layer["rate"]) if "kept" in layer else x


def dropout_backward(x, y, dy, layer):
    return dy * layer["kept"] / (1 - layer["rate"]), None, None


def batchnorm2d(x, layer):
    """Without `running` averages, (mean, variance), a step of training: what they move towards is left in `layer`."""
    mean, variance = layer.get("running", (x.mean(axis=(0, 1, 2)), x.var(axis=(0, 1, 2))))
    count = x[..., 0].size
    layer["seen"] = mean, variance * count / max(count - 1, 1)
    return (x - mean) / np.sqrt(variance + layer["epsilon"]) * layer["weight"] + layer["bias"]


def batchnorm2d_backward(x, y, dy, layer):
    """Ioffe and Szegedy 2015, section 3, in its three steps: through the variance, the mean, and x itself."""
    axes, count = (0, 1, 2), x[..., 0].size
    centred, deviation = x - x.mean(axis=axes), np.sqrt(x.var(axis=axes) + layer["epsilon"])
    d_normal = dy * layer["weight"]
    d_variance = (d_normal * centred).sum(axis=axes) * -0.5 / deviation**3
    d_mean = -d_normal.sum(axis=axes) / deviation
    dx = d_normal / deviation + d_variance * 2 * centred / count + d_mean / count
    return dx, (dy * centred / deviation).sum(axis=axes), dy.sum(axis=axes)


KINDS = ["conv2d", "maxpool2d", "avgpool2d", "globalavgpool", "linear", "flatten", "dropout", "batchnorm2d", "residual"]
LAYERS = {
    **{kind: (globals()[kind], globals()[f"{kind}_backward"]) for kind in KINDS},
    **{kind: (rule, chain_rule(derivative)) for kind, (rule, derivative) in ELEMENTWISE.items()},
}


def forward(network, x):
    """Return the input and the output of every layer."""
    values = [np.asarray(x, np.float64)]
    for layer in network:
        values.append(LAYERS[layer["kind"]][0](values[-1], layer))
    return values


def backward(network, values, dy):
    """Return (dx, the gradients of all parameters in order), given what `forward` returned."""
    found = []
    for layer, x, y in reversed(list(zip(network, values, values[1:], strict=False))):
        dy, dw, db = LAYERS[layer["kind"]][1](x, y, dy, layer)
        if isinstance(dw, list):
            found = dw + found
        elif dw is not None:
            found = [dw, *([] if layer["bias"] is None else [db]), *found]
    return dy, found


def softmax_cross_entropy(scores, labels, smoothing=0.0):
    """Return the loss of every image and the gradient of their mean.

    Smoothed as in Szegedy et al. 2016, section 7: against a mixture of the label and of all classes alike.
    """
    targets = (1 - smoothing) * np.eye(scores.shape[1])[labels] + smoothing / scores.shape[1]
    shifted = scores - scores.max(axis=1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return -(targets * log_softmax).sum(axis=1), (np.exp(log_softmax) - targets) / len(scores)


def binary_cross_entropy(scores, labels):
    """Return the loss of every image and the gradient of their mean; logarithms are clamped at -100, as in PyTorch."""
    p = scores[:, 0]
    with np.errstate(divide="ignore"):
        losses = -np.where(labels == 1, np.maximum(np.log(p), -100), np.maximum(np.log(1 - p), -100))
    return losses, ((p - labels) / np.maximum(p * (1 - p), 1e-12) / len(p))[:, None]


def mean_squared_error(scores, labels):
    """Return the loss of every image, the mean over its outputs, and the gradient of their mean."""
    difference = scores - np.eye(scores.shape[1])[labels]
    return (difference**2).mean(axis=1), 2 * difference / difference.size


LOSSES = {f.__name__: f for f in (softmax_cross_entropy, binary_cross_entropy, mean_squared_error)}


def gradients(network, x, labels, loss, smoothing=0.0):
    """Return (losses, hits, [gradient of every parameter]): the mean loss's gradients."""
    values = forward(network, x)
    scores = values[-1]
    losses, dy = LOSSES[loss](scores, labels, *([smoothing] if smoothing else []))
    predicted = scores[:, 0] >= 0.5 if loss == "binary_cross_entropy" else scores.argmax(axis=1)
    return losses, predicted == labels, backward(network, values, dy)[1]


# The optimizers as published, one step each: `w`, `g` arrays, `memory` a dict that starts empty, `t` = 1, 2, ...


def sgd(w, g, memory, t, lr=0.01, momentum=0.0, nesterov=False, weight_decay=0.0):
    """Polyak 1964; Nesterov in the form of Sutskever et al. 2013 that PyTorch uses."""
    g = g + weight_decay * w
    memory["v"] = momentum * memory.get("v", 0.0) + g
    return w - lr * (g + momentum * memory["v"] if nesterov else memory["v"])


def rmsprop(w, g, memory, t, lr=0.01, alpha=0.99, eps=1e-8, momentum=0.0, weight_decay=0.0):
    """Tieleman and Hinton 2012, lecture 6e, with PyTorch's momentum."""
    g = g + weight_decay * w
    memory["mean_square"] = alpha * memory.get("mean_square", 0.0) + (1 - alpha) * g**2
    memory["v"] = momentum * memory.get("v", 0.0) + g / (np.sqrt(memory["mean_square"]) + eps)
    return w - lr * memory["v"]


def adagrad(w, g, memory, t, lr=0.01, lr_decay=0.0, eps=1e-10, weight_decay=0.0):
    """Duchi, Hazan and Singer 2011."""
    g = g + weight_decay * w
    memory["sum"] = memory.get("sum", 0.0) + g**2
    return w - lr / (1 + (t - 1) * lr_decay) * g / (np.sqrt(memory["sum"]) + eps)


def adadelta(w, g, memory, t, lr=1.0, rho=0.9, eps=1e-6, weight_decay=0.0):
    """Zeiler 2012, algorithm 1."""
    g = g + weight_decay * w
    memory["g2"] = rho * memory.get("g2", 0.0) + (1 - rho) * g**2
    dx = -np.sqrt(memory.get("dx2", 0.0) + eps) / np.sqrt(memory["g2"] + eps) * g
    memory["dx2"] = rho * memory.get("dx2", 0.0) + (1 - rho) * dx**2
    return w + lr * dx


def adam(w, g, memory, t, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
    """Kingma and Ba 2015, algorithm 1."""
    g = g + weight_decay * w
    memory["m"] = beta1 * memory.get("m", 0.0) + (1 - beta1) * g
    memory["v"] = beta2 * memory.get("v", 0.0) + (1 - beta2) * g**2
    m_hat, v_hat = memory["m"] / (1 - beta1**t), memory["v"] / (1 - beta2**t)
    return w - lr * m_hat / (np.sqrt(v_hat) + eps)


def adamw(w, g, memory, t, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01):
    """Loshchilov and Hutter 2019, algorithm 2."""
    return adam(w, g, memory, t, lr, beta1, beta2, eps) - lr * weight_decay * w


def adamax(w, g, memory, t, lr=2e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
    """Kingma and Ba 2015, algorithm 2, with PyTorch's eps against division by zero."""
    g = g + weight_decay * w
    memory["m"] = beta1 * memory.get("m", 0.0) + (1 - beta1) * g
    memory["u"] = np.maximum(beta2 * memory.get("u", 0.0), np.abs(g) + eps)
    return w - lr / (1 - beta1**t) * memory["m"] / memory["u"]


OPTIMIZERS = {f.__name__: f for f in (sgd, rmsprop, adagrad, adadelta, adam, adamw, adamax)}


def numeric_gradient(function, array, step=1e-6):
    """Return the central differences of a scalar `function()` by every element of `array`."""
    gradient = np.zeros_like(array)
    for index in np.ndindex(array.shape):
        middle = array[index]
        array[index] = middle + step
        above = function()
        array[index] = middle - step
        gradient[index] = (above - function()) / (2 * step)
        array[index] = middle
    return gradient


def relative_error(actual, expected):
    """Return the largest difference, relative to the largest expected value."""
    scale = np.abs(expected).max(initial=0.0)
    difference = np.abs(np.asarray(actual, np.float64) - expected).max(initial=0.0)
    return difference / scale if scale else (0.0 if difference == 0 else math.inf)
