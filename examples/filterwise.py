"""A backend of one's own, in one file: NumPy's layers, but a convolution that Numba compiles.

python -m cnnexp check filterwise plugins=examples/filterwise.py
"""

from dataclasses import dataclass
from typing import ClassVar

import numba
import numpy as np

from cnnexp import register
from cnnexp.backends.layerwise import LayerwiseProgram
from cnnexp.backends.plain.numpy import NumpyOps, one_blas_thread, pad
from cnnexp.backends.processor import SequentialBackend


@numba.njit
def convolve(x, w, b, stride, y):
    """y[n,p,q,f] = b[f] + sum of x[n, p*stride + i, q*stride + j, c] * w[i,j,c,f].

    The innermost loop is over the filters, which lie beside each other: the compiler makes vectors of them.
    """
    kernel, _, channels, filters = w.shape
    for n, p, q in np.ndindex(y.shape[:3]):
        y[n, p, q] = b
        for i, j, c in np.ndindex((kernel, kernel, channels)):
            pixel = x[n, p * stride + i, q * stride + j, c]
            for f in range(filters):
                y[n, p, q, f] += pixel * w[i, j, c, f]


class FilterwiseOps(NumpyOps):
    """NumPy's layers, but for the forward pass of a convolution."""

    def conv2d(self, x, w, b, window, y):
        if window.dilation > 1 or w.shape[2] < x.shape[3]:  # dilation and groups stay NumPy's
            return super().conv2d(x, w, b, window, y)
        return convolve(pad(x, window), w, np.zeros(w.shape[3], np.float32) if b is None else b, window.stride, y)


@register("backend", "filterwise")
@dataclass(frozen=True)
class Filterwise(SequentialBackend):
    """A convolution whose innermost loop is over the filters."""

    name: ClassVar[str] = "filterwise"

    def compile(self, network, loss, optimizer, batch_size):
        return LayerwiseProgram(FilterwiseOps(), network, loss, optimizer, batch_size, scope=one_blas_thread)
